"""`cache.compress`: the host's K and V in groups of 64 channels, against a dense float64 simulation.

The simulation attends to what the host's bytes stand for, unpacked here by the definition (arXiv 2303.06865, and
the layout of a row in `offload/groupwise.py`), after each number was found within half a step of its own K and V.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.config import with_settings
from hybridgen.engine import build
from hybridgen.engine.memory_plan import plan_memory
from hybridgen.evaluation.byte_formulas import step_bytes
from hybridgen.evaluation.strategy_list import describe_strategy
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_simulation import DenseModel, DenseSimulation, Settings
from tests.equivalence.test_forgotten_wait import forget
from tests.equivalence.tiny_models import random_tokens
from tests.equivalence.zoo import ModelZoo

SETTINGS = Settings(keep=1.0, window=16, lookahead="off", exact_layers=(0,), exact_mode="select")
BITS = {"int4": 4, "int8": 8}
LENGTHS = (207, 12, 130)
# Of float32's keys, as `dense_keys.ROUNDING`, and of a bf16 minimum and step that make up a number.
ROUNDING = 1e-4


def unpacked(packed: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """What rows uint8 [..., bytes] of a float32 model stand for, float64 [..., dim], and the step of each number."""
    count = -(-dim // 64)
    # bf16 is the upper half of a float32.
    pairs = (packed[..., : 4 * count].contiguous().view(torch.int16).int() << 16).view(torch.float32).double()
    index = torch.arange(dim)
    code_bytes = packed[..., 4 * count + index * bits // 8].int()
    codes = (code_bytes >> (index * bits % 8)) & (2**bits - 1)
    step, minimum = pairs[..., 2 * (index // 64)], pairs[..., 2 * (index // 64) + 1]
    return step * codes + minimum, step


class Compressed(DenseSimulation):
    """Whose host rows are what the engine's bytes stand for."""

    def __init__(self, model: DenseModel, bits: int) -> None:
        super().__init__(model, SETTINGS)
        self.bits, self.followed = bits, [0] * model.num_layers

    def follow(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take over the rows that the host has and that were not judged yet; keys, values: uint8 [Hkv, N, bytes]."""
        first, last = self.followed[layer], self.host_lengths[layer]
        here = slice(self.settings.sinks + first, self.settings.sinks + last)
        for own, packed in ((self.keys[layer], keys), (self.values[layer], values)):
            made, step = unpacked(packed[:, first:last], self.bits, self.model.head_dim)
            exact, rows = own[:, here], own[:, here].unflatten(-1, (-1, min(64, self.model.head_dim)))
            assert ((made - exact).abs() <= step / 2 + ROUNDING * (1 + exact.abs())).all()
            span = (rows.amax(-1) - rows.amin(-1) + 2**-7 * rows.amin(-1).abs()) / (2**self.bits - 1)
            allowed = span.repeat_interleave(rows.shape[-1], -1) * (1 + 2**-7) + ROUNDING
            assert (step <= allowed).all(), "a step is what the range needs"
            own[:, here] = made
        self.followed[layer] = last


class Compared:
    """The engine and a simulation of each sequence."""

    def __init__(self, llm: Any, model: DenseModel, bits: int, capacities: list[int]) -> None:
        self.llm, self.batch = llm, llm.new_batch(capacities)
        self.sequences = [Compressed(model, bits) for _ in capacities]

    def follow(self) -> None:
        for some in self.batch.micro_batches:
            for layer, attention in enumerate(some.layers):
                keys, values = attention._kv.host_keys.in_place.tensor, attention._kv.host_values.tensor
                for row, member in enumerate(some.members):
                    self.sequences[member].follow(layer, keys[row], values[row])

    def prefill(self, lengths: tuple[int, ...], seed: int) -> None:
        vocabulary = self.sequences[0].model.vocab_size
        prompts = [random_tokens(vocabulary, length, seed=seed + index) for index, length in enumerate(lengths)]
        ours = self.llm.prefill(self.batch, prompts)
        self.follow()
        self.compare(ours, [one.prefill(prompt) for one, prompt in zip(self.sequences, prompts, strict=True)])

    def decode(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            tokens = torch.randint(3, 90, (len(self.sequences),), generator=generator).tolist()
            ours = self.llm.decode(self.batch, tokens)
            self.follow()  # by now the rows that aged are there
            pairs = zip(self.sequences, tokens, strict=True)
            self.compare(ours, [one.decode(token).logits for one, token in pairs])

    def compare(self, ours: Tensor, wanted: list[Tensor]) -> None:
        assert (ours.double().cpu() - torch.stack(wanted)).abs().max() < LOGITS_TOLERANCE


@pytest.mark.parametrize(
    ("name", "compress", "lengths", "overrides"),
    [
        ("opt", "int4", (207, 130), {}),
        ("llama-gqa2", "int4", LENGTHS, {"runtime__micro_batch": 2}),
        ("llama-gqa2", "int8", (207, 12), {"attention__stream_ahead": False}),
        ("qwen2", "int4", (205,), {"runtime__transfer": "immediate", "runtime__kernels": "native"}),
    ],
)
def test_equals_dense_attention_over_the_same_rows(
    zoo: ModelZoo, name: str, compress: str, lengths: tuple[int, ...], overrides: dict[str, Any]
) -> None:
    """Two turns; in 62 steps every layer of the first sequence ages."""
    overrides = {"cache__compress": compress, **overrides}
    with engine(zoo.directory(name), SETTINGS, "aog", **overrides) as llm:
        room = [length + 62 + 40 + 10 for length in lengths]
        run = Compared(llm, zoo.dense(name), BITS[compress], room)
        run.prefill(lengths, seed=1)
        run.decode(62)
        before = list(run.sequences[0].host_lengths)
        assert min(before) >= 192
        run.prefill((40,) * len(lengths), seed=7)
        run.decode(10)
        assert run.sequences[0].followed >= before
        kinds = {layer.key_kind for layer in run.batch.all_layers()}
        assert kinds == {f"{compress} in groups of 64"}


def test_rounding_matters(zoo: ModelZoo) -> None:
    """What is compared above is not full attention's, whatever the tolerance: 4 bits move logits more than 8 do."""
    moved = {}
    with engine(zoo.directory("llama-gqa2"), SETTINGS, "full") as full:
        exact = decoded(full)
    for compress in ("int8", "int4"):
        with engine(zoo.directory("llama-gqa2"), SETTINGS, "aog", cache__compress=compress) as llm:
            moved[compress] = float((decoded(llm) - exact).abs().max())
    assert 4 * LOGITS_TOLERANCE < moved["int8"] < moved["int4"] < 5.0


def decoded(llm: Any) -> Tensor:
    batch = llm.new_batch([300])
    llm.prefill(batch, [random_tokens(90, 207, seed=2)])
    logits: Tensor = llm.decode(batch, [3])
    return logits


@pytest.mark.parametrize("name", ["opt", "llama-gqa2"])
@pytest.mark.parametrize("compress", ["int4", "int8"])
def test_bytes_and_memory(zoo: ModelZoo, name: str, compress: str) -> None:
    """A row of d < 64 channels: 4 bytes for its one group, and its codes, in whole words."""
    with engine(zoo.directory(name), SETTINGS, "aog", cache__compress=compress, run__batch=2) as llm:
        spec, dim = llm.spec.layers[0], llm.spec.layers[0].head_dim
        row = 4 + math.ceil(dim * BITS[compress] / 32) * 4
        batch = llm.new_batch([230, 230])
        llm.prefill(batch, [random_tokens(90, 207, seed=2)] * 2)
        llm.telemetry.begin_step()
        llm.decode(batch, [3, 4])
        moved = llm.telemetry.end_step().bytes_moved
        wanted = len(llm.spec.layers) * 2 * 2 * 128 * spec.num_kv_heads * row
        assert moved == {"h2d": wanted}
        step = step_bytes(llm.spec, llm.config, llm.modes, torch.float32, 207, False)
        assert step.h2d == step.dram_read == wanted
        assert step.d2h * 128 == step.h2d  # a row's share of what ages
        sizes = [layer._kv.host_values.tensor.nbytes for layer in batch.all_layers()]
        plan = plan_memory(build.choose_model(llm.config), llm.config, llm.modes, 2, 230)
        assert plan.host["KV host tier"] == 2 * sum(sizes) == wanted * 192 // 128
        staging = batch.all_layers()[0]._staging._slots.nbytes
        unpacked_bytes = batch.all_layers()[0]._unpacking.unpacked._slots.nbytes
        plain = with_settings(llm.config, {"cache.compress": "none"})
        usual = plan_memory(build.choose_model(llm.config), plain, llm.modes, 2, 230)
        key = "streamed KV of two layers"
        assert plan.device[key] - usual.device[key] == staging + unpacked_bytes - 2 * unpacked_bytes
        words = describe_strategy("aog", llm.config, llm.modes, llm.spec, torch.float32, 2048, False)
        assert f"{compress} in groups of 64 channels" in words[2]


def is_packed(targets: list[Tensor], direction: str) -> bool:
    return direction == "h2d" and len(targets) == 2 and targets[0].dtype is torch.uint8


def is_leaving(targets: list[Tensor], direction: str) -> bool:
    return direction == "d2h" and targets[0].dtype is torch.uint8


@pytest.mark.parametrize("kind", [is_packed, is_leaving])
def test_a_forgotten_wait_shows(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    with engine(zoo.directory("llama-gqa2"), SETTINGS, "aog", cache__compress="int4") as llm:
        batch = llm.new_batch([200, 200])
        llm.prefill(batch, [random_tokens(90, length, seed=length) for length in (140, 146)])
        assert llm.decode(batch, [3, 4]).isfinite().all()
        forgotten = forget(monkeypatch, kind)
        logits = [llm.decode(batch, [3, 4]) for _ in range(25)]
    assert forgotten and logits[-1].isnan().any()
