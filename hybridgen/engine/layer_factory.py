"""Which executor and which memory each layer of a micro-batch gets."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from hybridgen.attention.base import LayerAttention
from hybridgen.attention.evicting import EvictingAttention
from hybridgen.attention.evicting_host import HostEvictingAttention
from hybridgen.attention.hybrid import HybridAttention
from hybridgen.attention.hybrid_cpu import CpuHybridAttention
from hybridgen.attention.hybrid_logits import LogitsHybridAttention
from hybridgen.attention.on_cpu import OnCpuAttention
from hybridgen.attention.resident import ResidentAttention
from hybridgen.attention.streamed import StreamedAttention, Unpacking
from hybridgen.config import Config
from hybridgen.engine import build
from hybridgen.engine.layer_modes import LayerMode
from hybridgen.engine.scheduling import most_fetched, names_candidates
from hybridgen.kv_cache.compact import CompactKV
from hybridgen.kv_cache.compact_host import HostCompactKV
from hybridgen.kv_cache.disk_rows import DiskTier, LayerOnDisk
from hybridgen.kv_cache.host_keys import key_parts, value_part
from hybridgen.kv_cache.layout import device_shape, host_shape
from hybridgen.kv_cache.partial_keys import Skews
from hybridgen.kv_cache.resident import ResidentKV
from hybridgen.kv_cache.staging import Staging
from hybridgen.kv_cache.tiered import TieredKV
from hybridgen.models.layers import inverse_frequencies
from hybridgen.models.spec import LayerSpec, ModelSpec
from hybridgen.offload.disk import DiskReader, disk_folder
from hybridgen.offload.groupwise import GroupCodec
from hybridgen.offload.host_memory import HostSlab, KVPlacement, SlabPool, padded_bytes
from hybridgen.offload.logit_worker import LogitWorker
from hybridgen.offload.transfer import TransferEngine
from hybridgen.selection.candidates import Candidates
from hybridgen.selection.eviction import policy_of


@dataclass
class KVMemory:
    """What all strategies on one machine share: who scans, moves and reads files, and host memory on its nodes."""

    worker: LogitWorker
    transfer: TransferEngine
    slabs: SlabPool
    placed: KVPlacement
    disk: DiskReader
    tiers: weakref.WeakSet[DiskTier] = field(default_factory=weakref.WeakSet)  # the files there are

    def close(self) -> None:
        """Remove the files, and give the host's memory back."""
        for tier in list(self.tiers):
            tier.close()
        self.slabs.release_idle()


class LayerFactory:
    """Makes the attention of every layer, for `sequences` of up to `capacity` tokens."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        modes: Sequence[LayerMode],
        device: torch.device,
        dtype: torch.dtype,
        memory: KVMemory,
        skews: Skews | None = None,
    ) -> None:
        """skews: of partial keys, where the config asks for these."""
        self._config, self._spec, self._modes = config, spec, modes
        self._device, self._dtype, self._memory, self._skews = device, dtype, memory, skews
        self._layout = build.window_layout(config)
        self._keys_as = build.key_storage(config, dtype)
        self._lists = names_candidates(config)
        self._native = build.native_kernels(config, device)
        self._kernels = build.device_kernels(config, device)
        self._plain: type[HybridAttention] = HybridAttention
        if device.type == "cuda" and config.runtime.kernels == "auto":
            from hybridgen.attention.hybrid_cuda import CudaHybridAttention  # Triton: only where there is a GPU

            self._plain = CudaHybridAttention

    def __call__(self, sequences: int, capacity: int) -> list[LayerAttention]:
        tier = self._disk_tier(sequences, capacity)
        keys, values = self._slabs(sequences, capacity, 0 if tier is None else tier.layout.rows)
        stagings: dict[LayerSpec, Staging] = {}
        unpackings: dict[LayerSpec, Unpacking] = {}
        layers: list[LayerAttention] = []
        for layer, (spec, mode) in enumerate(zip(self._spec.layers, self._modes, strict=True)):
            if mode == "resident":
                kv = ResidentKV(spec, sequences, capacity, self._device, self._dtype)
                layers.append(ResidentAttention(spec, kv, self._kernels))
            elif mode == "evicting":
                layers.append(self._evicting(layer, spec, sequences, capacity, (keys, values), stagings))
            else:
                on_disk = None if tier is None else LayerOnDisk(tier, layer)
                layers.append(
                    self._tiered(layer, spec, mode, sequences, capacity, keys, values, stagings, unpackings, on_disk)
                )
            layers[-1].pieces = self._memory.transfer.pieces()
        for attention, following in pairwise(layers):
            if isinstance(attention, StreamedAttention) and isinstance(following, StreamedAttention):
                attention.following = following
            if isinstance(attention, HostEvictingAttention) and isinstance(following, HostEvictingAttention):
                attention.following = following
        return layers

    def _disk_tier(self, sequences: int, capacity: int) -> DiskTier | None:
        """The file for the oldest rows, if there are to be any, and memory for them on their way."""
        layout = build.kv_disk_layout(self._config, self._spec, sequences, capacity, self._dtype)
        if layout is None:
            return None
        memory, placement = self._memory, self._config.placement
        slab = memory.slabs.take(layout.memory_bytes, memory.placed.values)
        tier = DiskTier(disk_folder(placement.disk_dir), layout, memory.disk, memory.transfer, slab)
        memory.tiers.add(tier)
        return tier

    def _slabs(self, sequences: int, capacity: int, disk_rows: int) -> tuple[HostSlab, HostSlab]:
        """Memory for the keys (and the lists of their rows), and for the values; disk_rows: of each, not here."""
        whole = [
            host_shape(spec, sequences, self._layout, capacity)
            for spec, mode in zip(self._spec.layers, self._modes, strict=True)
            if mode not in ("resident", "evicting")
        ]
        shapes = [(batch, heads, rows - disk_rows, dim) for batch, heads, rows, dim in whole]
        key_bytes = sum(padded_bytes(*part) for shape in shapes for part in key_parts(shape, self._keys_as))
        if self._lists:
            key_bytes += sum(padded_bytes(shape[:3], torch.int32) for shape in shapes)
        value_bytes = sum(padded_bytes(*value_part(shape, self._keys_as, self._dtype)) for shape in shapes)
        if self._config.eviction.home == "host":
            slots = build.host_slots(self._config, capacity) if "evicting" in self._modes else 0
            evicting = [spec for spec, mode in zip(self._spec.layers, self._modes, strict=True) if mode == "evicting"]
            size = sum(padded_bytes(device_shape(spec, sequences, slots), self._dtype) for spec in evicting)
            key_bytes, value_bytes = key_bytes + size, value_bytes + size
        slabs, placed = self._memory.slabs, self._memory.placed
        return slabs.take(key_bytes, placed.keys), slabs.take(value_bytes, placed.values)

    def _evicting(
        self,
        layer: int,
        spec: LayerSpec,
        sequences: int,
        capacity: int,
        slabs: tuple[HostSlab, HostSlab],
        stagings: dict[LayerSpec, Staging],
    ) -> LayerAttention:
        config, run, transfer = self._config.eviction, self._config.run, self._memory.transfer
        policy = policy_of(config)(config, layer, run.seed, run.gen)
        frequencies = None
        if build.reindexes(self._config, spec):
            assert spec.rope is not None
            frequencies = inverse_frequencies(spec.rope, spec.head_dim).to(self._device)
        if config.home == "device":
            kv = CompactKV(spec, sequences, self._device, self._dtype)
            return EvictingAttention(layer, spec, kv, policy, transfer, capacity, frequencies)
        shape = device_shape(spec, sequences, build.host_slots(self._config, capacity))
        host = HostCompactKV(spec, shape, self._device, self._dtype, slabs, transfer)
        if spec not in stagings:
            stagings[spec] = Staging(*shape, self._device, self._dtype)
        return HostEvictingAttention(layer, spec, host, policy, transfer, capacity, frequencies, stagings[spec])

    def _tiered(
        self,
        layer: int,
        spec: LayerSpec,
        mode: LayerMode,
        sequences: int,
        capacity: int,
        keys: HostSlab,
        values: HostSlab,
        stagings: dict[LayerSpec, Staging],
        unpackings: dict[LayerSpec, Unpacking],
        on_disk: LayerOnDisk | None,
    ) -> LayerAttention:
        transfer, worker = self._memory.transfer, self._memory.worker
        # Where nothing waits for the host, layers age in one step, so that the others are all the same (WholeStep).
        turn = 0 if self._keys_as.on_device else layer
        threshold = self._layout.ageing_threshold(turn, self._spec.num_layers)
        kv = TieredKV(
            spec, sequences, capacity, self._layout, threshold, self._device, self._dtype, keys, values, transfer,
            self._keys_as, None if self._skews is None else partial(self._skews.of, layer), on_disk,
        )  # fmt: skip
        if mode == "on_cpu":
            return OnCpuAttention(layer, spec, kv, transfer, self._kernels, worker)
        if mode == "streamed":
            if spec not in stagings:
                host, heads = kv.host_values.tensor, spec.num_kv_heads
                held, width = kv.host_capacity, host.shape[3]  # packed rows are of another width and type
                stagings[spec] = Staging(sequences, heads, held, width, self._device, host.dtype)
                if self._keys_as.packed_bits is not None:
                    place = Staging(sequences, heads, held, spec.head_dim, self._device, self._dtype, turns=1)
                    unpackings[spec] = Unpacking(GroupCodec(self._keys_as.packed_bits, self._dtype), place)
            unpacking = unpackings.get(spec)
            streamed = StreamedAttention(layer, spec, kv, transfer, self._kernels, stagings[spec], unpacking)
            streamed.ahead = self._config.attention.stream_ahead
            return streamed
        predicts = mode == "lookahead"
        weighs = predicts and self._config.attention.lookahead == "logits"
        executor: type[HybridAttention] = LogitsHybridAttention if weighs else self._plain
        if self._native and not weighs:
            executor = CpuHybridAttention
        candidates = listed_rows = None
        if self._lists:
            rows = (sequences, spec.num_kv_heads, kv.host_values.tensor.shape[2])
            candidates, listed_rows = Candidates(rows, self._device), keys.take(rows, torch.int32)
        staging = None
        if executor is not CpuHybridAttention or self._keys_as.stored is torch.int8:  # else rows are read in place
            if spec not in stagings:
                kept = most_fetched(self._config, self._layout.host_rows(capacity))
                stagings[spec] = Staging(
                    sequences,
                    spec.num_kv_heads,
                    kept,
                    spec.head_dim,
                    self._device,
                    self._dtype,
                    self._keys_as.stored,
                    turns=self._config.attention.lookahead_layers + 1,
                )
            staging = stagings[spec]
        attention = executor(layer, spec, kv, worker, transfer, predicts, staging, candidates, listed_rows)
        attention.chooses_early = self._config.attention.lookahead_layers > 1
        if isinstance(attention, LogitsHybridAttention):
            attention.renormalise = self._config.attention.dropped == "renormalise"
        return attention
