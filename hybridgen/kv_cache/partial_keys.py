"""InfiniGen's partial keys (OSDI'24, arXiv 2406.19707, section 4): some columns of skewed keys, on the device.

Skewing: for each layer and KV head an orthogonal matrix A, [d, d], of the right singular vectors of the queries of one
prompt, largest singular value first. (q A) . (k A) = q . k, but few columns of q A hold most of it. Where rotary
positions are, A cannot be folded into the projections, so both sides are multiplied by it after them; where there are
none (OPT) that is the same mathematics as folding. With grouped queries there is one A a KV head, of all queries of its
group: the published system has no GQA.
Partial columns: for each sequence and KV head the d' = floor(ratio * d) columns with the largest sum of |q A| over the
sequence's first prompt and the group's heads. The published system takes those of the batch's first sequence for all.
Score = scale * sum over the columns of (q A) (k A). A and the columns are applied as one matrix, A[:, columns].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hybridgen.errors import ConfigError
from hybridgen.kv_cache.device_sketch import DeviceSketch, product_to_float32
from hybridgen.kv_cache.row_pool import RowPool
from hybridgen.models.spec import LayerSpec
from hybridgen.output import write_whole
from hybridgen.types import TokenSelection

Shape = tuple[int, ...]
Skewing = Callable[[Tensor], Tensor]  # queries of a prompt [m, Hq, d] -> A of one layer, float32 [Hkv, d, d]

_SETTING = "cache.partial_skew"


def partial_width(head_dim: int, ratio: float) -> int:
    """d': ratio as the decimal that was written, times head_dim, rounded down."""
    width = int(Fraction(str(ratio)) * head_dim)
    if width < 1:
        raise ConfigError(
            f"cache.partial_ratio = {ratio}: of {head_dim} channels no column is left (allowed here: at least "
            f"{1 / head_dim:.4f})"
        )
    return width


def partial_parts(shape: Shape, ratio: float, dtype: torch.dtype) -> list[tuple[Shape, torch.dtype]]:
    """What partial keys of host keys [B, Hkv, N, d] take: [B, Hkv, d', N], rows contiguous, and A[:, columns]."""
    batch, heads, rows, dim = shape
    width = partial_width(dim, ratio)
    return [((batch, heads, width, rows), dtype), ((batch, heads, dim, width), dtype)]


def skew_shape(spec: LayerSpec) -> Shape:
    """Of A of one layer."""
    return (spec.num_kv_heads, spec.head_dim, spec.head_dim)


class PartialKeys(DeviceSketch):
    """Of the host rows of one layer and micro-batch."""

    name = "partial"

    def __init__(self, skewing: Skewing, columns: Tensor, projection: Tensor, pool: RowPool | None = None) -> None:
        """columns, projection: for `partial_parts`, zeroed; pool: None where every row stays alive."""
        self.columns, self.projection, self._skewing = columns, projection, skewing
        self.pool = pool

    def tensors(self) -> tuple[Tensor, ...]:
        return self.columns, self.projection, *(self.pool.tensors() if self.pool else ())

    def begin(self, sequence: int, queries: Tensor) -> None:
        skew, width = self._skewing(queries), self.projection.shape[3]
        for head, some in enumerate(_by_kv_head(queries, skew.shape[0])):
            weights = (some @ skew[head]).abs_().sum(0)
            best = torch.topk(weights, width).indices
            self.projection[sequence, head] = skew[head][:, best]

    def store(self, sequence: int, row: int, keys: Tensor) -> None:
        made = product_to_float32(keys.unsqueeze(0), self.projection[sequence : sequence + 1])[0]
        self.columns[sequence, :, :, row : row + keys.shape[1]] = made.transpose(1, 2)
        if self.pool is not None:
            self.pool.join(sequence, row, keys.shape[1])

    def score(self, query: Tensor, lengths: list[int], scale: float) -> Tensor:
        grouped = query.unflatten(1, (self.columns.shape[1], -1))
        some = product_to_float32(grouped, self.projection).to(self.columns.dtype)
        scores = product_to_float32(some, self.columns[..., : max(lengths)]).mul_(scale)
        return (scores if self.pool is None else self.pool.mask(scores)).flatten(1, 2)

    def prompted(self, sequence: int, rows: int) -> None:
        if self.pool is not None:
            self.pool.prompted(sequence, rows)

    def alive(self) -> list[int] | None:
        return None if self.pool is None else list(self.pool.alive)

    def fetched(self, chosen: TokenSelection) -> None:
        if self.pool is not None:
            self.pool.fetched(chosen)


def skew_matrix(queries: Tensor, kv_heads: int) -> Tensor:
    """A, float32 [Hkv, d, d]: right singular vectors of each group's queries [m, Hq, d], largest first."""
    gram = torch.stack([some.T @ some for some in _by_kv_head(queries, kv_heads)])
    vectors: Tensor = torch.linalg.eigh(gram.double()).eigenvectors  # of Q^T Q; eigenvalues ascend
    return vectors.flip(-1).float().contiguous()


class Skews:
    """A of every layer that needs one, of one engine: made from its first prompt, or read from a file.

    A file that is not there yet is written as soon as all matrices are made.
    """

    def __init__(
        self, shapes: Mapping[int, Shape], device: torch.device, file: Path | None = None, checkpoint: str = ""
    ) -> None:
        """shapes: of each layer's A, [Hkv, d, d]; checkpoint: tells the file's model from others."""
        self._shapes, self._device, self._file, self._checkpoint = shapes, device, file, checkpoint
        self._matrices: dict[int, Tensor] = {}
        if file is not None and file.exists():
            self._matrices = self._read(file)

    def of(self, layer: int, queries: Tensor) -> Tensor:
        """A of the layer; queries [m, Hq, d]: the prompt that it is made from if there is none yet."""
        if layer not in self._matrices:
            self._matrices[layer] = skew_matrix(queries, self._shapes[layer][0])
            if self._file is not None and self._matrices.keys() == self._shapes.keys():
                tensors = {_name(layer): matrix.cpu() for layer, matrix in self._matrices.items()}
                write_whole(_SETTING, self._file, save(tensors, {"checkpoint": self._checkpoint}))
        return self._matrices[layer]

    def _read(self, file: Path) -> dict[int, Tensor]:
        try:
            with safe_open(file, "pt") as found:
                made_for = (found.metadata() or {}).get("checkpoint")
                tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{_SETTING} = {file}: no safetensors file that can be read ({error})") from None
        another = "delete it, or name another file"
        if made_for != self._checkpoint:
            raise ConfigError(
                f"{_SETTING} = {file}: made for checkpoint {made_for}, but this is {self._checkpoint}; {another}"
            )
        for layer, shape in self._shapes.items():
            matrix = tensors.get(_name(layer))
            if matrix is None:
                raise ConfigError(
                    f"{_SETTING} = {file}: has no {_name(layer)}, it was made with other exact layers; {another}"
                )
            if matrix.shape != shape or matrix.dtype != torch.float32:
                raise ConfigError(
                    f"{_SETTING} = {file}: {_name(layer)} is {matrix.dtype} {tuple(matrix.shape)}, must be "
                    f"torch.float32 {tuple(shape)}; {another}"
                )
        return {layer: tensors[_name(layer)].to(self._device) for layer in self._shapes}


def _name(layer: int) -> str:
    return f"layers.{layer}.skew"


def _by_kv_head(queries: Tensor, kv_heads: int) -> Iterator[Tensor]:
    """float32 [m * G, d] of each KV head, one after another: copies of all would take gigabytes."""
    for group in queries.unflatten(1, (kv_heads, -1)).unbind(1):
        yield group.float().reshape(-1, queries.shape[2])
