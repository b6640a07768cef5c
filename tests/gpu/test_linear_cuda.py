"""Products of a few rows and matrices of real models: by the kernel, and by torch where that is not for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridgen.models import linear_kernel
from hybridgen.models.layers import FEW, linear
from hybridgen.models.linear_kernel import SHAPES, linear_rows

# OPT-13B's, Llama-3.1-8B's (gate and up together), Qwen2.5-7B's, SmolLM2-135M's; heads.
SHAPES_OF_MODELS = [
    (15360, 5120), (5120, 5120), (20480, 5120), (5120, 20480), (50272, 5120),
    (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
    (4608, 3584), (3584, 18944), (960, 576), (576, 1536),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "channels"), SHAPES_OF_MODELS)
def test_real_shapes(rows: int, channels: int, dtype: torch.dtype) -> None:
    """Within a unit in the last place of float64's, rounded where torch rounds."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    weight, bias = (some(rows, channels) / channels**0.5).to(dtype), some(rows).to(dtype)
    exact = weight.double()
    for tokens in (1, 2, 3, FEW):
        x, residual = some(tokens, channels).to(dtype), some(tokens, rows).to(dtype)
        product = x.double() @ exact.T
        pairs = [
            (linear_rows(x, weight), product),
            (linear_rows(x, weight, bias, relu=True), (product + bias.double()).relu()),
            (
                linear_rows(x, weight, bias, residual=residual),
                (product + bias.double()).to(dtype).double() + residual.double(),
            ),
        ]
        unit = torch.finfo(dtype).eps
        for found, expected in pairs:
            assert found.dtype is dtype
            # Of a sum that cancels: a unit of its largest part, and in float32 of thousands of parts.
            atol = unit * (64.0 if dtype is torch.float32 else 8.0)
            torch.testing.assert_close(found.double(), expected, rtol=unit, atol=atol)


@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1])
def test_what_takes_the_kernel(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(x.shape[0])
        return linear_rows(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(linear_kernel, "linear_rows", counted)
    memory = torch.randn(64 * 96 + 8, device="cuda").half()
    x = torch.randn(tokens, 96, device="cuda").half()
    whole, shifted = memory[: 64 * 96].view(64, 96), memory[1 : 64 * 96 + 1].view(64, 96)
    for weight, fits in ((whole, True), (whole[:40], True), (shifted, False), (whole.view(96, 64).T, False)):
        calls.clear()
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=2e-3, atol=1e-2)
        assert calls == ([tokens] if fits and tokens <= FEW else [])


def test_it_may_be_captured() -> None:
    """Here with fewer rows than a program takes."""
    assert sorted(SHAPES) == [1, 2, 4, FEW]
    weight, x = torch.randn(3, 512, device="cuda").half(), torch.randn(2, 512, device="cuda").half()
    linear_rows(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear_rows(x, weight)
    x.copy_(torch.randn(2, 512, device="cuda"))
    graph.replay()
    torch.testing.assert_close(found, F.linear(x, weight), rtol=2e-3, atol=2e-2)
