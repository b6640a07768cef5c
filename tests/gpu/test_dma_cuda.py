"""Large copies between the tiers, by the copy engines: each head's tokens to their place, and nothing beside it."""

from __future__ import annotations

import pytest
import torch

from hybridgen.offload.cuda_transfer import CudaTransfer
from hybridgen.offload.dma import is_for_dma
from hybridgen.offload.host_memory import HostSlab, padded_bytes
from hybridgen.telemetry import Telemetry

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_there_and_back(dtype: torch.dtype) -> None:
    heads, capacity, dim, first, last = 5, 9000, 80, 64, 8512
    slab = HostSlab(padded_bytes((heads, capacity, dim), dtype), DEVICE)
    host = slab.take((heads, capacity, dim), dtype)
    host.tensor.fill_(7)
    telemetry = Telemetry()
    transfer = CudaTransfer(telemetry, DEVICE)
    source = torch.randint(-100, 100, (heads, last, dim), device=DEVICE).to(dtype)[:, first:]
    target = host.device_view[:, first:last]
    assert is_for_dma(target, source)
    transfer.copy(target, source, "d2h").wait_host()
    assert torch.equal(host.tensor[:, first:last], source.cpu())
    assert (host.tensor[:, :first] == 7).all() and (host.tensor[:, last:] == 7).all()
    back = torch.zeros(heads, last + 3, dim, dtype=dtype, device=DEVICE)
    transfer.copy(back[:, 3 + first :], target, "h2d").wait()
    assert torch.equal(back[:, 3 + first :], source) and not back[:, : 3 + first].any()
    assert dict(telemetry.bytes_moved) == {"d2h": source.nbytes, "h2d": source.nbytes}
