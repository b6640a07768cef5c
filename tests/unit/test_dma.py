"""Which copies are given to the copy engines. That they copy is shown on a GPU (tests/gpu)."""

from __future__ import annotations

import torch

from hybridgen.offload.dma import LEAST_BYTES, is_for_dma


def test_heads_that_lie_apart_are() -> None:
    host = torch.zeros(4, 3000, 64)[:, :2000]
    assert is_for_dma(host, torch.zeros(4, 2000, 64))
    assert is_for_dma(torch.zeros(4, 2000, 64), host)
    assert host.nbytes >= LEAST_BYTES


def test_others_are_not() -> None:
    plain = torch.zeros(4, 2000, 64)
    assert not is_for_dma(plain, plain.half()), "it would have to be converted"
    assert not is_for_dma(torch.zeros(4, 2000, 80)[..., :64], plain), "channels that lie apart"
    assert not is_for_dma(plain.flatten(1), plain.flatten(1))
    assert not is_for_dma(plain[:, :64], plain[:, :64]), "too small to be worth it"
