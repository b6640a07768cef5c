"""Packed rows (`cache.compress`) and rows in a file (`placement.kv_on_disk`) on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridgen.offload.groupwise import GroupCodec
from tests.equivalence.against_engine import LOGITS_TOLERANCE, engine
from tests.equivalence.dense_simulation import DenseModel, Settings
from tests.equivalence.test_compressed_cache import BITS, Compared
from tests.equivalence.tiny_models import save_tiny_model
from tests.gpu.test_all_tokens_cuda import generate

SETTINGS = Settings(keep=1.0, window=16)
CUDA: dict[str, Any] = {"runtime__device": "cuda", "runtime__transfer": "auto", "runtime__worker_threads": "auto"}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 80, 128, 1031])
def test_packed_as_on_the_cpu(width: int, dtype: torch.dtype, bits: int) -> None:
    values = (torch.randn(3, 200, width) * 10 + 3).to(dtype)
    codec, values[0] = GroupCodec(bits, dtype), 1 / 3
    packed = codec.encode(values)
    ours = codec.encode(values.cuda()).cpu()
    assert (ours == packed).float().mean() > 0.99  # a step may be rounded otherwise in the last bit
    steps = (values.float().amax(-1) - values.float().amin(-1)) / (2**bits - 1)
    far = codec.decode(ours, torch.empty_like(values)).float() - codec.decode(packed, torch.empty_like(values)).float()
    assert (far.abs().amax(-1) <= 1.02 * steps + torch.finfo(dtype).eps * values.float().abs().amax(-1)).all()
    decoded = codec.decode(packed.cuda(), torch.empty_like(values, device="cuda")).cpu()
    eps = torch.finfo(dtype).eps  # a sum may be rounded once or twice
    torch.testing.assert_close(decoded, codec.decode(packed, torch.empty_like(values)), rtol=eps, atol=1e-2 * eps)


@pytest.mark.parametrize("compress", ["int4", "int8"])
@pytest.mark.parametrize("name", ["opt", "llama-gqa2", "qwen2"])
def test_dense_attention_over_the_same_packed_rows(name: str, compress: str, directory: Path) -> None:
    model = save_tiny_model(name, directory)
    lengths = (207, 12, 130)
    with engine(model, SETTINGS, "aog", cache__compress=compress, **CUDA) as llm:
        run = Compared(llm, DenseModel(model), BITS[compress], [length + 112 for length in lengths])
        run.prefill(lengths, seed=1)
        run.decode(62)
        run.prefill((40, 40, 40), seed=7)
        run.decode(10)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["opt", "llama-gqa3", "qwen2"])
def test_tokens_of_full_attention(name: str, share: float, micro_batch: int, directory: Path) -> None:
    model = save_tiny_model(name, directory)
    overrides = {
        "placement.kv_on_disk": share,
        "placement.disk_dir": str(directory),
        "runtime.micro_batch": micro_batch,
    }
    assert generate(model, "aog", **overrides) == generate(model, "full", "cpu")
    assert not list(directory.glob("own-*"))


@pytest.mark.parametrize("compress", ["none", "int4"])
def test_where_rows_lie_changes_nothing(compress: str, directory: Path) -> None:
    model, found = save_tiny_model("llama-gqa2", directory), []
    for share in (0.0, 0.6):
        more = {"placement__kv_on_disk": share, "placement__disk_dir": str(directory), "cache__compress": compress}
        with engine(model, SETTINGS, "aog", **more, **CUDA) as llm:
            batch = llm.new_batch([500, 500])
            llm.prefill(batch, [list(range(90)) * 3, list(range(80)) * 2])
            steps: list[Tensor] = [llm.decode(batch, [3 + step, 4]) for step in range(30)]
            llm.prefill(batch, [list(range(60))] * 2)
            steps += [llm.decode(batch, [3 + step, 4]) for step in range(30)]
            found.append(torch.stack(steps).cpu())
    assert (found[0] - found[1]).abs().max() < LOGITS_TOLERANCE
