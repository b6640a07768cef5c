"""Rows of tensors where they lie in files: read in blocks, so that neither mappings nor the page cache fill memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridgen.errors import CheckpointError
from hybridgen.models.base import DecoderModel
from hybridgen.models.checkpoint import Checkpoint
from hybridgen.models.hf_directory import StoredTensor
from hybridgen.models.spec import ModelSpec
from hybridgen.types import DTYPES

BLOCK_BYTES = 32 << 20  # of rows read at a time
_ROW_TYPES = {**DTYPES, "U8": torch.uint8}  # of files of ours packed rows, too
_WORDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}

LayerParts = Mapping[str, Sequence[StoredTensor]]  # a layer's tensors: what each one is stacked from, in order


def stored_layers(
    family: type[DecoderModel], spec: ModelSpec, checkpoint: Checkpoint, dtype: torch.dtype
) -> list[LayerParts] | None:
    """Where each layer's tensors lie, if the matrices among them can be read as they are: plain rows of this dtype."""
    layers: list[LayerParts] = []
    for layer in range(spec.num_layers):
        sources = family.layer_tensors(spec, layer)
        layers.append({name: [checkpoint.stored(part) for part in source.parts] for name, source in sources.items()})
        matrices = [part for name, parts in layers[-1].items() if len(sources[name].shape) > 1 for part in parts]
        for part in matrices:
            if part.offset is None or part.offset % dtype.itemsize or DTYPES.get(part.dtype) is not dtype:
                return None
    return layers


def last_rows(parts: Sequence[StoredTensor], rows: int) -> Iterator[tuple[Path, int, int]]:
    """File, offset and bytes of the last rows of what is stacked from parts, in order."""
    first = sum(part.shape[0] for part in parts) - rows
    for part in parts:
        skipped, row_bytes = min(max(first, 0), part.shape[0]), part.nbytes // part.shape[0]
        first -= part.shape[0]
        if skipped < part.shape[0]:
            assert part.offset is not None
            yield part.file, part.offset + skipped * row_bytes, (part.shape[0] - skipped) * row_bytes


def read_blocks(parts: Iterable[StoredTensor]) -> Iterator[Tensor]:
    """All rows of what is stacked from parts, in blocks of at most BLOCK_BYTES; each is valid until the next one."""
    for part in parts:
        assert part.offset is not None
        total, *rest = part.shape
        row_bytes = part.nbytes // total
        rows = min(total, max(1, BLOCK_BYTES // row_bytes))
        memory = torch.empty(rows * row_bytes, dtype=torch.uint8)
        with open(part.file, "rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), part.offset, part.nbytes, os.POSIX_FADV_SEQUENTIAL)
            stream.seek(part.offset)
            for start in range(0, total, rows):
                block = memory[: min(rows, total - start) * row_bytes]
                _fill(stream.fileno(), block, part, part.offset + start * row_bytes)
                yield block.view(_ROW_TYPES[part.dtype]).view(-1, *rest)


def _fill(descriptor: int, block: Tensor, part: StoredTensor, offset: int) -> None:
    memory, done = block.numpy().data, 0
    while done < len(memory):
        read = os.preadv(descriptor, [memory[done:]], offset + done)
        if not read:
            raise CheckpointError(f"{part.file}: {part.stored_name} ends at byte {offset + done}: the file was changed")
        done += read
    os.posix_fadvise(descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


def safetensors_header(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], border: int
) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file of these names, shapes and types; each one's offset in the file.

    The data begin on a border. The format is 8 bytes of length, then JSON (https://huggingface.co/docs/safetensors).
    """
    entries: dict[str, object] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name, (shape, dtype) in tensors.items():
        offsets[name], start = end, end
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % border)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + offset for name, offset in offsets.items()}
