"""InfiniGen's partial keys: skewing, columns, scores, the file of matrices, and how many tokens alpha keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridgen.config import Setting, build_config, load_strategy, merge_settings
from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError
from hybridgen.kv_cache.partial_keys import PartialKeys, Skews, partial_parts, partial_width, skew_matrix
from hybridgen.selection.budget import choose, keep_limits, most_by_alpha
from hybridgen.types import KeepRule
from tests.equivalence.tiny_models import random_tokens, save_tiny_model

CPU = torch.device("cpu")
BATCH, HEADS, GROUP, ROWS, DIM, PROMPT = 2, 2, 3, 192, 16, 90


def queries(seed: int, spread: float = 2.0) -> torch.Tensor:
    """[m, Hq, d], of which some directions have more than others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(HEADS * GROUP, DIM, DIM, generator=generator) / spread ** torch.arange(DIM)[:, None]
    return torch.einsum("mhd,hde->mhe", torch.randn(PROMPT, HEADS * GROUP, DIM, generator=generator), mixing)


def partial(ratio: float, seeds: tuple[int, int] = (1, 2)) -> PartialKeys:
    tensors = [torch.zeros(*part[0]) for part in partial_parts((BATCH, HEADS, ROWS, DIM), ratio, torch.float32)]
    skews = Skews({0: (HEADS, DIM, DIM)}, CPU)
    made = PartialKeys(lambda some: skews.of(0, some), *tensors)
    for sequence, seed in enumerate(seeds):
        made.begin(sequence, queries(seed))
    return made


def test_skewing_is_orthogonal_and_leaves_products_alone() -> None:
    some = queries(1)
    skew = skew_matrix(some, HEADS)
    keys = torch.randn(HEADS, 50, DIM)
    for head in range(HEADS):
        a = skew[head].double()
        torch.testing.assert_close(a.T @ a, torch.eye(DIM, dtype=torch.float64), rtol=0, atol=1e-6)
        stacked = some[:, head * GROUP : (head + 1) * GROUP].reshape(-1, DIM).double()
        k = keys[head].double()
        torch.testing.assert_close((stacked @ a) @ (k @ a).T, stacked @ k.T, rtol=1e-5, atol=1e-5)
        singular = torch.linalg.svdvals(stacked)  # descending
        torch.testing.assert_close((stacked @ a).norm(dim=0)[:8], singular[:8], rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dim", "ratio", "width"), [(128, 0.2, 25), (128, 0.1, 12), (100, 0.29, 29), (16, 1.0, 16)])
def test_how_many_columns(dim: int, ratio: float, width: int) -> None:
    assert partial_width(dim, ratio) == width


def test_no_column_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cache\.partial_ratio = 0\.1: of 8 channels .* at least 0\.1250"):
        partial_width(8, 0.1)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0])
def test_scores_are_of_the_columns_that_weigh_most(ratio: float) -> None:
    """A is of the first sequence's prompt; the columns are each sequence's and KV head's own."""
    made, width = partial(ratio), int(ratio * DIM)
    keys = torch.randn(BATCH, HEADS, ROWS, DIM)
    for sequence in range(BATCH):
        for first, last in ((0, 128), (128, 192)):
            made.store(sequence, first, keys[sequence, :, first:last])
    query = torch.randn(BATCH, HEADS * GROUP, DIM)
    found = made.score(query, [192, 64], 0.25)
    assert found.shape == (BATCH, HEADS * GROUP, 192) and found.is_contiguous() and found.dtype is torch.float32
    skew = skew_matrix(queries(1), HEADS).double()
    chosen = []
    for b, h in ((b, h) for b in range(BATCH) for h in range(HEADS)):
        prompt = queries(1 + b)[:, h * GROUP : (h + 1) * GROUP].double() @ skew[h]
        columns = prompt.abs().sum((0, 1)).argsort(descending=True)[:width]
        chosen.append(set(columns.tolist()))
        partial_keys = (keys[b, h].double() @ skew[h])[:, columns]
        for g in range(GROUP):
            q = (query[b, h * GROUP + g].double() @ skew[h])[columns]
            expected = 0.25 * partial_keys @ q
            torch.testing.assert_close(found[b, h * GROUP + g].double(), expected, rtol=1e-4, atol=1e-4)
    assert ratio == 1.0 or len(set(map(frozenset, chosen))) > 1


def test_half_precision_is_close() -> None:
    whole, half = partial(0.5), partial(0.5)
    half.columns, half.projection = half.columns.half(), half.projection.half()
    keys, query = torch.randn(HEADS, ROWS, DIM).half(), torch.randn(BATCH, HEADS * GROUP, DIM).half()
    for made in (whole, half):
        made.store(0, 0, keys.to(made.columns.dtype))
    exact, found = (made.score(query.to(made.columns.dtype), [ROWS, 0], 0.25)[0] for made in (whole, half))
    torch.testing.assert_close(found, exact, rtol=0, atol=0.02)


# -- alpha


def by_definition(alpha: float, least: int, most: int, local: torch.Tensor, host: torch.Tensor) -> int:
    """Of sequences of one length: min(int(mean count), cap), not below the floor."""
    counts = []
    for logits, here in zip(host.flatten(0, 2), local.flatten(0, 2), strict=True):
        top = max(float(logits.max()), float(here.max()))
        counts.append(sum(float(x) > top - alpha for x in logits))
    return min(max(int(sum(counts) / len(counts)), least), most)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("alpha", [0.5, 2.0, 4.0])
def test_alpha_counts_what_is_near_each_heads_largest(alpha: float, group: int) -> None:
    local, host = torch.randn(3, 2, group, 9), 2 * torch.randn(3, 2, group, 128)
    local[..., 4:] = -torch.inf
    limits = keep_limits(KeepRule(0.5, None, 3, alpha), [128] * 3)
    assert limits.widest == 64 and limits.least == [3] * 3
    most = most_by_alpha(limits, local, host)
    assert most.tolist() == [[by_definition(alpha, 3, 64, local, host)]] * 3
    p = torch.rand(3, 2, 128)
    chosen = choose(limits, p, torch.zeros(3, 2), most)
    assert chosen.counts.tolist() == [[int(most[0])] * 2] * 3 and chosen.rows.shape[2] == int(most[0])


def test_a_head_whose_largest_is_local_counts_from_there() -> None:
    """And the largest is each head's own, not head 0's."""
    local, host = torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 64)
    local[0, 1] = 10.0
    limits = keep_limits(KeepRule(None, None, 0, 1.0), [64])
    assert most_by_alpha(limits, local, host).tolist() == [[32]]  # mean of 64 and 0


def test_in_a_ragged_batch_alpha_is_a_share() -> None:
    host = torch.full((3, 1, 1, 128), -50.0)
    host[0, ..., :32], host[1, ..., 64:] = 0.0, torch.nan  # rows that the second sequence does not have
    host[1, ..., :16], host[2] = 0.0, torch.nan
    limits = keep_limits(KeepRule(None, None, 0, 4.0), [128, 64, 0])
    local = torch.zeros(3, 1, 1, 2)
    assert most_by_alpha(limits, local, host).tolist() == [[32], [16], [0]]  # 48 of 192
    everything = keep_limits(KeepRule(None, None, 0, torch.inf), [128, 64, 0])
    assert most_by_alpha(everything, local, host).tolist() == [[128], [64], [0]]


# -- the file of matrices


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: save_tiny_model(name, parent) for name in ("llama-gqa2", "llama3-rope")}


def chosen(llm: LLM, seed: int) -> Any:
    batch = llm.new_batch([260, 200])
    llm.prefill(batch, [random_tokens(113, 250, seed), random_tokens(113, 190, seed + 1)])
    llm.decode(batch, [5, 6])
    return batch.selections()


def infinigen(directory: Path, **overrides: Any) -> LLM:
    values = {"runtime.device": "cpu", "cache.gpu_window": 16, "runtime.worker_threads": 0, "cache.partial_ratio": 0.3}
    return LLM(str(directory), values | {name.replace("__", "."): v for name, v in overrides.items()}, "infinigen")


def test_a_file_repeats_the_selection(tiny: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "skew.safetensors"
    given = {"cache__partial_skew": str(file)}
    with infinigen(tiny["llama-gqa2"], **given) as first:
        chosen(first, 1)
        assert sorted(load_file(file)) == [f"layers.{layer}.skew" for layer in (2, 3, 4, 5)]
        second_batch = chosen(first, 10)
        before = file.read_bytes()
    with infinigen(tiny["llama-gqa2"], **given) as second:
        assert chosen(second, 10) == second_batch
    assert file.read_bytes() == before
    with infinigen(tiny["llama-gqa2"]) as fresh:  # whose first prompt is the other one
        assert chosen(fresh, 10) != second_batch
        assert chosen(fresh, 10) == chosen(fresh, 10), "fixed from then on"


def test_a_file_that_does_not_fit(tiny: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "skew.safetensors"
    given: dict[str, Any] = {"cache__partial_skew": str(file)}
    with infinigen(tiny["llama-gqa2"], **given) as llm:
        chosen(llm, 1)
    with pytest.raises(ConfigError, match=r"made for checkpoint .* but this is"):
        infinigen(tiny["llama3-rope"], **given)
    with pytest.raises(ConfigError, match=r"has no layers\.1\.skew, it was made with other exact layers"):
        infinigen(tiny["llama-gqa2"], model__exact_layers=[0], **given)
    shape = {2: (2, 16, 16)}
    save_file({"layers.2.skew": torch.zeros(2, 8, 8)}, file, {"checkpoint": "mine"})
    with pytest.raises(ConfigError, match=r"layers\.2\.skew is torch\.float32 \(2, 8, 8\), must be .*\(2, 16, 16\)"):
        Skews(shape, CPU, file, "mine")
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="no safetensors file that can be read"):
        Skews(shape, CPU, file, "mine")
    with pytest.raises(ConfigError, match="the folder does not exist"):
        infinigen(tiny["llama-gqa2"], cache__partial_skew=str(tmp_path / "no" / "such.safetensors"))
    assert list(tmp_path.iterdir()) == [file], "nothing half written is left"


# -- settings


def settings(strategy: str, **values: Any) -> Any:
    given = {path.replace("__", "."): Setting(value, "the test") for path, value in values.items()}
    return build_config(merge_settings(load_strategy(strategy), given))


@pytest.mark.parametrize("kind", ["partial", "pages"])
def test_they_lie_on_the_gpu_alone(kind: str) -> None:
    assert settings("hybridgen", cache__sketch=kind, selection__keep=0.1).cache.sketch_home == "gpu"
    for wrong, said in (
        ({"cache__sketch_home": "host"}, "lies on the GPU alone .*allowed: 'auto' or 'gpu'"),
        ({"attention__lookahead": "logits"}, "allowed: 'select' or 'off'"),
        ({"schedule__mode": "feedback"}, "the GPU scores every token"),
        ({"attention__executor": "on_cpu"}, "every host token is attended to"),
    ):
        with pytest.raises(ConfigError, match=said):
            settings("hybridgen", cache__sketch=kind, selection__keep=0.1, **wrong)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"selection__alpha": 4.0, "selection__keep_mass": 0.9}, "give one of them"),
        ({"selection__alpha": 0.0}, r"selection\.alpha = 0\.0 .*a difference of logits > 0"),
        ({"cache__sketch": "int2"}, r"selection\.alpha = 4(\.0)? with cache\.sketch = 'int2'.*allowed: 'partial'"),
        ({"cache__partial_ratio": 0.0}, r"a fraction in \(0, 1\]"),
        ({"cache__partial_ratio": 1.5}, r"a fraction in \(0, 1\]"),
        ({"cache__partial_skew": "skew.bin"}, r"'prompt' or a file FILE\.safetensors"),
    ],
)
def test_wrong_settings(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings("infinigen", **values)


def test_alpha_and_a_mass_switch_each_other_off() -> None:
    def of(strategy: str, **values: Any) -> tuple[Any, ...]:
        selection = settings(strategy, **values).selection
        return selection.keep, selection.keep_mass, selection.alpha

    assert of("infinigen") == (0.2, None, 4.0)
    assert of("infinigen", selection__keep=0.1) == (0.1, None, 4.0)
    assert of("infinigen", selection__keep_mass=0.9) == (None, 0.9, None)
    assert of("infinigen", selection__keep=0.1, selection__keep_mass=0.9) == (0.1, 0.9, None)
    assert of("hybridgen", selection__alpha=5.0, cache__sketch="partial") == (0.3, None, 5.0)
    assert of("infinigen", selection__keep=None) == (None, None, 4.0)
