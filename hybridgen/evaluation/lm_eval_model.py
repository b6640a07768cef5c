"""hybridgen as a model of lm-evaluation-harness (extra `eval`): its tasks, scored with a strategy at work.

    python -m hybridgen.evaluation.lm_eval_model run --model hybridgen --tasks piqa \\
        --model_args model=smollm2-135m,strategy=hybridgen,gpu-window=16,keep=0.1

is the harness's own command, to which the model `hybridgen` has been made known first. Model arguments: `model`,
`strategy`, `decode_from`, `num_fewshot` (see `HybridGenLM`), and settings: the words of `--also`, or dotted names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from hybridgen.engine.generation import generate
from hybridgen.engine.llm import LLM
from hybridgen.engine.sampler import Sampler
from hybridgen.errors import ConfigError
from hybridgen.evaluation.conditions import DEFAULTS, parse_variant
from hybridgen.evaluation.loglikelihood import Request, cut_batches, encode, make_request, score
from hybridgen.evaluation.tasks import FEW_SHOT_DELIMITER

MOST_STEPS = 1024  # tokens that may follow a prefill, where a strategy keeps room for all of them
MOST_GENERATED = 256  # tokens, unless a task says otherwise


@register_model("hybridgen")
class HybridGenLM(TemplateLM):  # type: ignore[misc, unused-ignore]
    """One strategy over one model; one process."""

    def __init__(
        self,
        model: str = "smollm2-135m",
        strategy: str = "hybridgen",
        batch_size: int | str = 64,
        decode_from: int | None = None,
        num_fewshot: int = 0,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """decode_from: so many tokens of a context go through decode, 1 by default.

        num_fewshot: how many examples the harness puts before each question. With any, what follows the context's
        last blank line is the question, all of which goes through decode: the harness gives the context as one text.
        """
        super().__init__()
        overrides: dict[str, Any] = {**DEFAULTS, "run.gen": MOST_STEPS}
        for name, value in settings.items():
            if name != "max_batch_size":  # the harness gives it to every model
                variant = parse_variant(f"{name if '.' in name else name.replace('_', '-')}={value}")
                overrides |= {path: setting.value for path, setting in variant.items()}
        if device is not None:
            overrides["runtime.device"] = device.split(":")[0]
        if overrides.get("model.weights") == "random":
            raise ConfigError("model.weights = 'random': answers mean nothing (allowed: 'real', 'auto')")
        self._llm = LLM(model, overrides, strategy)
        self._llm.telemetry.enabled = False
        self._batch = 64 if batch_size == "auto" else int(batch_size)
        self._decode_from = None if decode_from is None else int(decode_from)
        self._shots = int(num_fewshot)

    @property
    def eot_token_id(self) -> int:
        return min(self._llm.eos_token_ids)

    @property
    def prefix_token_id(self) -> int:
        """Before a text that has no context: BOS if the tokenizer adds one, else what ends a text."""
        start: list[int] = self._llm.tokenizer.encode("")
        return start[0] if start else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self._llm.spec.max_positions

    @property
    def tokenizer_name(self) -> str:
        return self._llm.spec.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids: list[int] = self._llm.tokenizer.encode(string)
        if add_special_tokens is False:
            ids = ids[len(self._llm.tokenizer.encode("")) :]
        return ids

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Requests that follow each other with the same context are the choices of a question."""
        groups: list[list[Request]] = []
        previous: str | None = None
        for request in requests:
            context, continuation = request.args
            if context != previous:
                groups.append([])
            previous = context
            groups[-1].append(self._request(context, continuation))
        results = self._score(groups, disable_tqdm)
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Each text in windows as long as the model allows, each token predicted once."""
        groups = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            pairs = (utils.make_disjoint_window(window) for window in windows)
            groups.append([self._of_tokens(before, after) for before, after in pairs])
        scores = iter(self._score(groups, disable_tqdm))
        return [sum(next(scores)[0] for _ in group) for group in groups]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedily, one by one, up to a stop string or the end of the text."""
        texts, llm = [], self._llm
        for request in tqdm(requests, disable=disable_tqdm, desc="generating"):
            context, kwargs = request.args
            until = kwargs.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            most = int(kwargs.get("max_gen_toks", MOST_GENERATED))
            ids = llm.tokenizer.encode(context)[-max(1, self.max_length - most) :]

            def ended(tokens: list[int], stops: list[str] = stops) -> bool:
                return tokens[-1] in llm.eos_token_ids or any(stop in llm.tokenizer.decode(tokens) for stop in stops)

            batch = llm.new_batch([len(ids) + most])
            sampler = Sampler(llm.config.sampling, llm.device, 0)
            with torch.inference_mode():
                output = generate(llm, batch, llm.prefill(batch, [ids]), most, sampler, ended)
            text = llm.tokenizer.decode(output.output_ids[0])
            for stop in stops:
                text = text.split(stop)[0] if stop else text
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        groups = [[self._of_tokens(before, after)] for _, before, after in requests]
        return self._score(groups, bool(kwargs.get("disable_tqdm")))

    def _of_tokens(self, context: Sequence[int], continuation: Sequence[int]) -> Request:
        prefilled = len(context) - (self._decode_from or 1)
        return make_request([*context, *continuation], len(context), prefilled, self.max_length)

    def _request(self, context: str, continuation: str) -> Request:
        if not context:
            ids = [self.prefix_token_id, *self.tok_encode(continuation, add_special_tokens=False)]
            return make_request(ids, 1, 0, self.max_length)
        at = context.rfind(FEW_SHOT_DELIMITER) if self._shots else -1
        cut = at + len(FEW_SHOT_DELIMITER) if at >= 0 else 0
        tokenizer = self._llm.tokenizer
        return encode(tokenizer, context[:cut], context[cut:], continuation, self._decode_from, self.max_length)

    def _score(self, groups: Sequence[Sequence[Request]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        results: list[list[tuple[float, bool]]] = [[] for _ in groups]
        with tqdm(total=sum(map(len, groups)), disable=disable_tqdm, desc="loglikelihood") as bar:
            for batch in cut_batches(groups, self._batch):
                flat = [(index, request) for index in batch for request in groups[index]]
                scores = score([self._llm], [request for _, request in flat])[0]
                for (index, _), one in zip(flat, scores, strict=True):
                    results[index].append((one.log_likelihood, one.is_greedy))
                bar.update(len(flat))
        return [result for group in results for result in group]


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
