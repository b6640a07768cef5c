"""Attention of long prompts, which goes to another library on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from hybridgen.models.layers import LONG_PROMPT, causal_attention
from hybridgen.models.spec import LayerSpec
from tests.unit.test_layers import dense

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("past", [0, 64])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 128), (4, 1, 64), (2, 1, 80)])
def test_a_long_prompt(heads: int, kv_heads: int, dim: int, past: int) -> None:
    layer = LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rope=None)
    length = past + LONG_PROMPT
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(LONG_PROMPT, heads, dim, generator=generator).half()
    keys, values = torch.randn(2, kv_heads, length, dim, generator=generator).half().unbind(0)
    found = causal_attention(query.cuda(), keys.cuda(), values.cuda(), layer, 1024)
    torch.testing.assert_close(found.cpu().double(), dense(query, keys, values), rtol=0, atol=2e-3)
