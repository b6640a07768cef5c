"""The public API: `LLM` loads a model once and serves batches.

llm = LLM("smollm2-135m", overrides={"selection.keep": 0.1, "selection.keep_mass": None})
result = llm.generate([llm.tokenizer.encode("Once upon a time")], max_new_tokens=32)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hybridgen.config import Config, Setting, build_config, load_strategy, merge_settings
from hybridgen.engine import build, prompt_maps
from hybridgen.engine.batch import Batch
from hybridgen.engine.build import ModelChoice, ObtainedWeights
from hybridgen.engine.generation import Generation, generate
from hybridgen.engine.layer_factory import KVMemory, LayerFactory
from hybridgen.engine.layer_modes import LayerMode, fits_to_prompts, layer_modes
from hybridgen.engine.prefill import Prefill
from hybridgen.engine.prompt_maps import PromptMaps
from hybridgen.engine.runner import Runner
from hybridgen.engine.sampler import Sampler
from hybridgen.engine.schedule import Schedule, is_steered
from hybridgen.engine.scheduling import make_schedule, observe
from hybridgen.engine.synthetic_kv import SyntheticPrefill
from hybridgen.engine.torch_threads import TorchThreads
from hybridgen.errors import CheckpointError, ConfigError
from hybridgen.models.tokenizer import Tokenizer, load_tokenizer
from hybridgen.offload.disk import DiskReader, disk_folder, sweep
from hybridgen.offload.host_memory import SlabPool, place_kv
from hybridgen.offload.logit_worker import LogitWorker
from hybridgen.offload.transfer import LazyTransfer, make_transfer
from hybridgen.offload.weights import LayerWeightStore
from hybridgen.telemetry import StepTimings, Telemetry


class _Machine:
    """What all strategies over one model share: its mathematics, the scan threads, the clocks."""

    def __init__(self, config: Config, choice: ModelChoice, weights: ObtainedWeights) -> None:
        threads, cores = build.worker_threads(config, choice.device)
        self.telemetry = Telemetry()
        runtime = config.runtime
        self.transfer = make_transfer(runtime.transfer, choice.device, self.telemetry, runtime.cuda_graphs)
        in_half = choice.device.type == "cuda" and choice.dtype != torch.float32
        self.worker = LogitWorker(threads, cores, self.transfer, choice.device, in_half)
        if choice.device.type == "cuda":
            # cuDNN's attention builds a plan for every new length: 20 ms a call in decode.
            torch.backends.cuda.enable_cudnn_sdp(False)
        asked = config.runtime.torch_threads
        self.threads = TorchThreads(
            build.torch_threads(config, choice.device, threads), watches=asked == "auto" and choice.device.type == "cpu"
        )
        poison = isinstance(self.transfer, LazyTransfer)
        sweep(disk_folder(config.placement.disk_dir))  # what a killed process has left
        placed = place_kv(config.placement.memory, config.placement.near_node, config.placement.far_node)
        self.reader = DiskReader(config.placement.disk_threads, self.telemetry)
        self.memory = KVMemory(self.worker, self.transfer, SlabPool(choice.device, poison), placed, self.reader)
        self.model = choice.family(weights.spec, weights.tensors.shared, choice.device, choice.dtype)
        depth, layers = config.placement.prefetch_depth, weights.tensors.layers
        self.weights = LayerWeightStore(
            layers, weights.host, depth, self.transfer, choice.device, weights.disk, self.reader
        )

    def close(self) -> None:
        try:
            self.transfer.finish()  # first: what was issued last may still wait for scans
        finally:
            self.worker.close()
        try:
            self.weights.close()
            self.memory.close()
        finally:
            self.reader.close()


class LLM:
    """A loaded model with one strategy. Not thread-safe; use as a context manager or call `close`."""

    def __init__(self, model: str, overrides: Mapping[str, Any] | None = None, strategy: str = "hybridgen") -> None:
        """overrides: dotted setting -> value, over the strategy's; errors as on the command line."""
        given = {path: Setting(value, "LLM(overrides=...)") for path, value in (overrides or {}).items()}
        given["model.name"] = Setting(model, "LLM(model=...)")
        config = build_config(merge_settings(load_strategy(strategy), given))
        if config.placement.kv_on_gpu is not None:
            raise ConfigError(
                f"placement.kv_on_gpu = {config.placement.kv_on_gpu}: a share of a job's tokens, and no job is known "
                "here (allowed: null; give cache.gpu_window, a number of tokens)"
            )
        choice = build.choose_model(config)
        self._setup(config, choice, build.obtain_weights(choice, config, needs_text=True))

    @classmethod
    def from_parts(
        cls,
        config: Config,
        choice: ModelChoice,
        weights: ObtainedWeights,
        modes: tuple[LayerMode, ...] | None = None,
    ) -> LLM:
        """For callers that planned memory and loaded the weights themselves (`engine.build`)."""
        llm = cls.__new__(cls)
        llm._setup(config, choice, weights, modes)
        return llm

    def sharing(self, config: Config, modes: tuple[LayerMode, ...] | None = None) -> LLM:
        """Another strategy over the same weights, threads and clocks; valid as long as this one is open."""
        llm = LLM.__new__(LLM)
        llm._setup(config, self.choice, self.weights, modes, shared=self)
        return llm

    def _setup(
        self,
        config: Config,
        choice: ModelChoice,
        weights: ObtainedWeights,
        modes: tuple[LayerMode, ...] | None = None,
        shared: LLM | None = None,
    ) -> None:
        self.config, self.choice, self.weights = config, choice, weights
        self.spec, self.device, self.dtype = weights.spec, choice.device, choice.dtype
        self.modes = modes or layer_modes(config, self.spec.num_layers)
        self._owns_worker = shared is None
        self._machine: _Machine = _Machine(config, choice, weights) if shared is None else shared._machine
        self.model, self.telemetry = self._machine.model, self._machine.telemetry
        self._transfer, self._worker = self._machine.transfer, self._machine.worker
        self._layout = build.window_layout(config)
        make_schedule(config, self.modes, random_weights=weights.kind == "random")  # an error comes early
        chunk = build.prefill_chunk(config, self.device)
        self._query_maps = build.fitted_queries(config, weights, self.modes, self.device, self.dtype)
        store = self._machine.weights
        self._prefill = (
            SyntheticPrefill(self.model, store, chunk, config.run.seed)
            if config.runtime.synthetic_kv
            else Prefill(self.model, store, chunk)
        )
        # Others that bring rows ahead of a layer do so when the one before it begins.
        ahead = config.attention.lookahead_layers if config.attention.executor == "hybrid" else 1
        self._runner = Runner(self.model, self._machine.weights, self.telemetry, chunk, ahead)
        skews = build.skews(config, weights, self.modes, self.device)
        self._layers = LayerFactory(config, self.spec, self.modes, self.device, self.dtype, self._machine.memory, skews)
        self._tokenizer: Tokenizer | None = None
        #: Seconds until the GPU's libraries were ready; None where there is nothing to wait for.
        self.warm_up_s: float | None = None
        if shared is None and self.device.type == "cuda":
            self._transfer.follow()
            self.warm_up_s = self._runner.warm_up(config.run.seq or chunk)
            if fits_to_prompts(config):
                self.warm_up_s += prompt_maps.warm_up(self.device)

    @property
    def tokenizer(self) -> Tokenizer:
        """CheckpointError if the model came without one (random weights, nothing local)."""
        if self._tokenizer is None:
            if self.weights.directory is None:
                raise CheckpointError(f"{self.spec.name} has no local tokenizer: give a local directory as --model")
            self._tokenizer = load_tokenizer(self.weights.directory)
        return self._tokenizer

    @property
    def eos_token_ids(self) -> set[int]:
        """Tokens that end a text, by the config and, where there is one, the tokenizer."""
        known = set(self.spec.eos_token_ids)
        return known | set(self.tokenizer.eos_token_ids) if self.has_tokenizer else known

    @property
    def has_tokenizer(self) -> bool:
        return self.weights.has_tokenizer

    @property
    def weights_on_gpu(self) -> float:
        """Realised share of the decoder layers' weights that stays on the device."""
        return self._machine.weights.share

    @property
    def placement(self) -> dict[str, dict[str, float]]:
        """Realised shares of the decoder layers' weights, by where they lie."""
        on_gpu, on_disk = self._machine.weights.share, self._machine.weights.disk_share
        return {"weights": {"gpu": on_gpu, "host": max(0.0, 1.0 - on_gpu - on_disk), "disk": on_disk}}

    @property
    def weights_packed(self) -> str | None:
        """How the decoder layers' matrices are packed; None: they are not."""
        return None if self.weights.host is None else self.weights.host.form.name

    @property
    def disk(self) -> dict[str, Any]:
        """What was read from disk so far, how fast, and what there is to say of it."""
        reader = self._machine.reader
        return {"bytes_read": reader.bytes_read, "bytes_per_s": reader.bytes_per_s, "notes": reader.notes}

    @property
    def layer_weights(self) -> LayerWeightStore:
        """For callers that run layers themselves: `issue` one, then `wait` for it."""
        return self._machine.weights

    @property
    def worker_threads(self) -> int:
        return self._worker.threads

    @property
    def host_memory(self) -> dict[str, Any]:
        """Where the host's K and V lie, and how often their memory was made and used again."""
        memory = self._machine.memory
        return {**asdict(memory.placed), "slabs_allocated": memory.slabs.allocated_slabs,
                "slabs_reused": memory.slabs.reused_slabs}  # fmt: skip

    @property
    def torch_threads(self) -> TorchThreads:
        """How many threads torch computes with on the CPU, and how often they were fewer than there are cores."""
        return self._machine.threads

    @property
    def scans_by_isa(self) -> dict[str, int]:
        """Scans done so far, by the instruction set that did them."""
        return self._worker.jobs_by_isa

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, ignore_eos: bool = False) -> Generation:
        """Continue prompts (lists of token ids), drawing and stopping as `config.sampling` says."""
        batch = self.new_batch([len(prompt) + max_new_tokens for prompt in prompts])
        logits = self.prefill(batch, prompts)
        sampler = Sampler(self.config.sampling, self.device, self.config.run.seed)
        return generate(self, batch, logits, max_new_tokens, sampler, self.ends(ignore_eos))

    def ends(self, ignore_eos: bool = False) -> Callable[[list[int]], bool]:
        """Whether a sequence's generated ids are complete: an end-of-text token, or a stop string."""
        sampling = self.config.sampling
        eos = set() if ignore_eos or sampling.ignore_eos else self.eos_token_ids
        stop = sampling.stop if self.has_tokenizer else ()

        def ended(ids: list[int]) -> bool:
            if ids[-1] in eos:
                return True
            text = self.tokenizer.decode(ids) if stop else ""
            return any(word in text for word in stop)

        return ended

    def new_batch(self, capacities: Sequence[int], schedule: Schedule | None = None) -> Batch:
        """Room for sequences of up to capacities[b] tokens, prompt and generated together.

        schedule: of its decode steps, instead of a fresh one as the config says. Its plans must keep to what the
        config's may ask for: `pre_qkt` where `schedule.mode` is not `fixed`, and no larger K.
        """
        self.model.extend_positions(max(capacities, default=0) or 1)
        if schedule is None:
            schedule = make_schedule(self.config, self.modes, random_weights=self.weights.kind == "random")
        micro_batch = build.micro_batch_size(self.config, len(capacities))
        transfer = self._transfer
        batch = Batch(capacities, micro_batch, self._layout, self._layers, self.device, schedule, transfer)
        predicted = [layer for layer, mode in enumerate(self.modes) if mode == "lookahead"]
        attention = self.config.attention
        if attention.predictor == "delta" and predicted:
            batch.remember_changes(self.spec.num_layers, self.spec.hidden_size, self.dtype)
        if fits_to_prompts(self.config) and predicted:
            fitted = PromptMaps(self.model, predicted, attention.lookahead_layers)
            batch.predict_by(fitted.maps, fitted)
        else:
            batch.predict_by(self._query_maps)
        return batch

    def prefill(
        self,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        mirrors: Sequence[Batch] = (),
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Append prompt tokens to each sequence; see `Prefill.run`."""
        self._transfer.follow()
        self._machine.threads.use_all()
        return self._prefill.run(batch, prompts, mirrors, progress)

    def prefill_scored(
        self, batch: Batch, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Append prompt tokens to each sequence and judge what follows them; see `Prefill.scored`."""
        self._transfer.follow()
        self._machine.threads.use_all()
        return self._prefill.scored(batch, prompts, targets)

    def decode(self, batch: Batch, tokens: Sequence[int] | Tensor) -> Tensor:
        """One token of each sequence -> float32 next-token logits [B, vocab]; see `Runner.decode_step`."""
        self._transfer.follow()
        self._machine.threads.step()
        logits = self._runner.decode_step(batch, torch.as_tensor(tokens, device=self.device))
        self._machine.threads.end_step()
        return logits

    def call_by_call(self) -> AbstractContextManager[None]:
        """Inside, every kernel is launched by itself, none in a graph: a profiler tells them apart by their stream."""
        return self._transfer.call_by_call()

    def observe(self, batch: Batch, timings: StepTimings) -> None:
        """Tell the batch's schedule what its last decode step has measured, as `generate` does."""
        if is_steered(batch.schedule):
            observation = observe(batch, self.modes, timings)
            if observation is not None:
                batch.schedule.observe(observation)

    def close(self) -> None:
        """Stop the scan threads. The object is of no use afterwards."""
        if self._owns_worker:
            self._machine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
