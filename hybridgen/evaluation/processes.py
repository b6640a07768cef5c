"""Several processes that share a job, as `accelerate launch` and `torchrun` start them, on one machine or many.

The launcher tells each process by its environment which one it is. All do the same but for the parts that they take
turns at; what these give goes to process 0 through gloo, torch's communication between hosts, whatever the device is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

# torchrun's names, then those of MPI launchers, which accelerate uses for several CPU processes.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def take_own_share() -> None:
    """Of this machine's GPUs, one, and of its cores, as many as each process gets; before CUDA is first used."""
    rank, size = _number(_LOCAL_RANKS, 0), _number(_LOCAL_SIZES, 1)
    if size < 2:
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(index) for index in range(size)] if named is None else [gpu for gpu in named.split(",") if gpu]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= size:
        os.sched_setaffinity(0, cores[rank * len(cores) // size : (rank + 1) * len(cores) // size])


def started() -> int:
    """How many processes the launcher says there are."""
    return _number(_SIZES, 1)


@dataclass(frozen=True)
class Processes:
    """Which of how many this one is."""

    rank: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What all processes gave, by rank, in the first one; nothing in the others."""
        if self.count == 1:
            return [value]
        gathered = [None] * self.count if self.is_first else None
        dist.gather_object(value, gathered)
        return gathered or []

    def from_first(self, value: Any) -> Any:
        """What the first process gave, in all of them."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


@contextmanager
def join() -> Iterator[Processes]:
    """The processes of this job, once all of them are here. Only the first one prints."""
    processes = Processes(_number(_RANKS, 0), started())
    if processes.count == 1:
        yield processes
        return
    dist.init_process_group("gloo", rank=processes.rank, world_size=processes.count)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if processes.is_first else nowhere):
            yield processes
    finally:
        dist.destroy_process_group()


def _number(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), default)
