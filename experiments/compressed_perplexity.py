"""What groups of 64 in 8 and 4 bits cost in perplexity: of weights, of the cache, and of both.

FlexGen's compression (arXiv 2303.06865, section 5; placement.compress_weights, cache.compress). Strategy aog: exact
attention over all tokens, those beyond the window as they come from the host. A passage's context is prefilled with the
weights as they are kept, and each of the tokens after it is fed and must predict the next one. All conditions see the
same passages: differences are paired.

    python experiments/compressed_perplexity.py run --data wikitext2_raw_test.txt --out compressed.json
    python experiments/compressed_perplexity.py table compressed.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridgen.config import with_settings
from hybridgen.engine.llm import LLM
from hybridgen.engine.report import current_commit, describe_machine
from hybridgen.evaluation import paired
from hybridgen.evaluation.perplexity import Measurement, Passage, cut_passages, measure
from hybridgen.output import write_whole
from hybridgen.quantities import parse_tokens

# Of weights: the caches that are measured with them.
CONDITIONS = {"none": ("none", "int8", "int4"), "int8": ("none", "int8"), "int4": ("none", "int4")}


def run(arguments: argparse.Namespace) -> None:
    """Measure, and write all losses: what is there so far after each kind of weights."""
    start = time.perf_counter()
    result: dict[str, Any] = {}
    passages: list[Passage] = []
    conditions: list[dict[str, Any]] = []
    for weights, caches in CONDITIONS.items():
        overrides = {
            "placement.compress_weights": weights,
            "cache.gpu_window": arguments.window,
            "model.weights": "real",
            "run.gen": arguments.decode,
        }
        with ExitStack() as stack:
            llms = [stack.enter_context(LLM(arguments.model, overrides, "aog"))]
            for cache in caches[1:]:
                config = with_settings(llms[0].config, {"cache.compress": cache})
                llms.append(stack.enter_context(llms[0].sharing(config)))
            if not passages:
                passages, result = cut(llms[0], arguments), about(llms[0], arguments)
            measured = measure_all(llms, passages, arguments, f"weights {weights}")
        for cache, found in zip(caches, measured, strict=True):
            conditions.append({"weights": weights, "cache": cache, "losses": found.losses})
        result["passages"] = [passage.first for passage in passages]
        result["conditions"] = [condition | estimates(condition, conditions[0]) for condition in conditions]
        result["seconds"] = time.perf_counter() - start
        write_whole("--out", arguments.out, json.dumps(result, indent=1))
    print(format_table(result))


def cut(llm: LLM, arguments: argparse.Namespace) -> list[Passage]:
    """Passages from all over the text."""
    first = llm.tokenizer.encode("")
    ids = llm.tokenizer.encode(arguments.data.read_text(encoding="utf-8"))[len(first) :]
    return cut_passages(ids, first, arguments.context, arguments.decode, arguments.passages)


def about(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """What was measured, and where."""
    given = {name: getattr(arguments, name) for name in ("context", "decode", "window", "batch")}
    assert llm.weights.directory is not None
    return {
        "model": llm.spec.name,
        "checkpoint": llm.weights.directory.name,  # its values may come from fewer bits (a GGUF file's)
        "dtype": str(llm.dtype).removeprefix("torch."),
        "text": arguments.data.name,
        **given,
        "machine": describe_machine(llm),
        "commit": current_commit(),
    }


def measure_all(llms: Sequence[LLM], passages: Sequence[Passage], arguments: Any, name: str) -> list[Measurement]:
    """All passages, some at a time."""
    total = [Measurement() for _ in llms]
    for llm in llms:
        llm.telemetry.enabled = False
    for first in range(0, len(passages), arguments.batch):
        measured = measure(llms, passages[first : first + arguments.batch], arguments.decode)
        for sofar, more in zip(total, measured, strict=True):
            sofar.extend(more)
        print(f"{name}: {len(total[0].losses)} of {len(passages)} passages", flush=True)
    return total


def estimates(condition: dict[str, Any], uncompressed: dict[str, Any]) -> dict[str, Any]:
    """Perplexity, and its change against no compression, with 95 % intervals."""
    losses, others = condition["losses"], uncompressed["losses"]
    return {
        "perplexity": asdict(paired.perplexity(losses)),
        "percent": None if condition is uncompressed else asdict(paired.percent_change(losses, others)),
        "difference": None if condition is uncompressed else asdict(paired.perplexity_difference(losses, others)),
    }


def format_table(result: dict[str, Any]) -> str:
    """As the README has it."""
    passages = len(result["passages"])
    lines = [
        f"{result['model']} ({result['checkpoint']}), {result['dtype']}, {result['text']}:",
        f"{result['decode']} tokens after {result['context']}, {passages} passages, window {result['window']}; "
        "95 % intervals, differences paired by passage",
        f"{'weights':8} {'cache':6} {'perplexity':26} {'change %':28} in perplexity",
    ]
    for row in result["conditions"]:
        cells = [interval(row["perplexity"], "", 2)]
        cells += ["" if row[name] is None else interval(row[name], "+", 3) for name in ("percent", "difference")]
        lines.append(f"{row['weights']:8} {row['cache']:6} {cells[0]:26} {cells[1]:28} {cells[2]}".rstrip())
    return "\n".join(lines)


def interval(figure: dict[str, float], sign: str, decimals: int) -> str:
    """A value and its limits."""
    value, low, high = (f"{figure[name]:{sign}.{decimals}f}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--model", default="smollm2-135m")
    runs.add_argument("--data", type=Path, required=True, help="a UTF-8 text, such as the test part of WikiText-2")
    runs.add_argument("--context", type=parse_tokens, default=1024)
    runs.add_argument("--decode", type=parse_tokens, default=64, help="tokens scored a passage")
    runs.add_argument("--passages", type=int, default=24)
    runs.add_argument("--window", type=parse_tokens, default=128)
    runs.add_argument("--batch", type=int, default=12, help="passages at a time")
    runs.add_argument("--out", type=Path, required=True)
    runs.set_defaults(do=run)
    tables = commands.add_parser("table")
    tables.add_argument("file", type=Path)
    tables.set_defaults(do=lambda given: print(format_table(json.loads(given.file.read_text(encoding="utf-8")))))
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
