"""The engine with maps of a file in place of Wq, against the oracle with the same maps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridgen.engine.llm import LLM
from hybridgen.errors import ConfigError
from hybridgen.models.checkpoint import checkpoint_key
from tests.equivalence.against_engine import Case, Turns
from tests.equivalence.dense_simulation import Settings
from tests.equivalence.fitted_maps import write_maps
from tests.equivalence.zoo import ModelZoo

RAGGED: Turns = (((210, 12, 180), 20),)
TURNS: Turns = (((150, 20, 260), 9), ((70, 60, 1), 4))
SELECT = Settings(window=16, keep=0.1, predictor="fitted")
MASS = Settings(window=16, keep=None, keep_mass=0.9, predictor="fitted")
LOGITS = dataclasses.replace(SELECT, lookahead="logits")
CASES = {
    "select, gqa2": Case("llama-gqa2", SELECT, RAGGED),
    "select, opt, mass": Case("opt", MASS, RAGGED),
    "select, gqa3, micro-batches": Case("llama-gqa3", SELECT, RAGGED, {"runtime__micro_batch": 2}),
    "select, qwen2, streamed weights": Case("qwen2", SELECT, RAGGED, {"placement__weights_on_gpu": 0.3}),
    "select, llama3, native": Case("llama3-rope", SELECT, RAGGED, {"runtime__transfer": "immediate"}),
    "logits, gqa2, append": Case("llama-gqa2", LOGITS, TURNS),
    "logits, opt, exact 0 2": Case("opt", dataclasses.replace(LOGITS, exact_layers=(0, 2)), RAGGED),
    "logits, qwen2": Case("qwen2", LOGITS, RAGGED),
}


def with_maps(zoo: ModelZoo, case: Case, file: Path, lookahead_layers: int = 1) -> Case:
    """The same case, with a file that both the engine and the oracle use."""
    write_maps(zoo.directory(case.model), file, lookahead_layers=lookahead_layers)
    read, model = load_file(file), zoo.dense(case.model)
    model.fitted = {
        layer: (read[f"layers.{layer}.query.weight"].double(), read[f"layers.{layer}.query.bias"].double())
        for layer in range(1, model.num_layers)
    }
    return dataclasses.replace(case, overrides={**case.overrides, "attention__predictor": str(file)})


@pytest.mark.parametrize("name", CASES)
def test_kept_sets_and_logits(zoo: ModelZoo, name: str, tmp_path: Path) -> None:
    case = with_maps(zoo, CASES[name], tmp_path / "maps.safetensors")
    run = case.run(zoo).simulated
    assert min(record.budget for records in run.steps for record in records) < 0.9


def engine(directory: Path, predictor: Path | str, strategy: str = "hybridgen", **values: Any) -> LLM:
    given = {"runtime.device": "cpu", "cache.gpu_window": 16, "runtime.worker_threads": 0} | {
        path.replace("__", "."): value for path, value in values.items()
    }
    return LLM(str(directory), {**given, "attention.predictor": str(predictor)}, strategy)


def exact(llm: LLM) -> list[int]:
    return [layer for layer, mode in enumerate(llm.modes) if mode != "lookahead"]


def test_the_file_names_exact_layers_unless_they_are_given(zoo: ModelZoo, tmp_path: Path) -> None:
    """A strategy file's list and the settings' come first; without a file's there is the default."""
    directory, file = zoo.directory("llama-gqa2"), tmp_path / "maps.safetensors"
    write_maps(zoo.directory("llama-gqa2"), file, exact=[0, 4])
    strategy = tmp_path / "own.yaml"
    strategy.write_text("attention:\n  executor: hybrid\nmodel:\n  exact_layers: [0, 3]\n")
    cases: list[tuple[Path | str, str, dict[str, Any], list[int]]] = [
        (file, "hybridgen", {}, [0, 4]),
        (file, "hybridgen", {"attention__lookahead": "logits"}, [0, 4]),
        (file, "hybridgen", {"model__exact_layers": [0, 2]}, [0, 2]),
        (file, str(strategy), {}, [0, 3]),
        (file, str(strategy), {"model__exact_layers": [5]}, [0, 5]),
        ("x", "hybridgen", {}, [0, 1, 2]),
        ("delta", "hybridgen", {}, [0, 1, 2]),
    ]
    for predictor, name, values, expected in cases:
        with engine(directory, predictor, name, **values) as llm:
            assert exact(llm) == expected, (predictor, name, values)
    write_maps(zoo.directory("llama-gqa2"), file, exact=[0, 1])  # written anew in the same process
    with engine(directory, file) as llm:
        assert exact(llm) == [0, 1]


def test_in_another_dtype_the_file_is_the_same_model(zoo: ModelZoo, tmp_path: Path) -> None:
    file = tmp_path / "maps.safetensors"
    write_maps(zoo.directory("qwen2"), file)
    with engine(zoo.directory("qwen2"), file, model__dtype="bfloat16") as llm:
        assert len(llm.generate([[5, 6, 7] * 60], 3).output_ids[0]) == 3


def test_strategies_that_predict_nothing_need_no_file(zoo: ModelZoo, tmp_path: Path) -> None:
    for strategy in ("full", "aog", "h2o"):
        with engine(zoo.directory("qwen2"), tmp_path / "none.safetensors", strategy) as llm:
            assert "lookahead" not in llm.modes


def test_a_file_that_does_not_fit(zoo: ModelZoo, tmp_path: Path) -> None:
    directory, file = zoo.directory("llama-gqa2"), tmp_path / "maps.safetensors"

    def refused(said: str, **values: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            engine(directory, file, **values)

    refused("maps.safetensors: No such file")
    write_maps(zoo.directory("llama3-rope"), file)
    refused("made for checkpoint [0-9a-f]{16}, but this is [0-9a-f]{16}: python -m hybridgen.calibrate")
    write_maps(zoo.directory("llama-gqa2"), file)
    refused("but this is random weights", model__weights="random")
    write_maps(zoo.directory("llama-gqa2"), file, exact=[0, 9])
    refused(r"maps\.safetensors: exact layers \[9\] are no layers of this model")
    key = checkpoint_key(directory)
    save_file({"layers.1.query.weight": torch.zeros(64, 64)}, file, {"checkpoint": key, "exact_layers": "[0]"})
    refused(r"has no layers\.1\.query\.bias")
    tensors = {"layers.1.query.weight": torch.zeros(64, 32), "layers.1.query.bias": torch.zeros(64)}
    save_file(tensors, file, {"checkpoint": key, "exact_layers": "[0, 2, 3, 4, 5]"})
    refused(r"layers\.1\.query\.weight is \(64, 32\), must be \(64, 64\)")
    for metadata in ({"checkpoint": key}, {"exact_layers": "[0]"}, {"checkpoint": key, "exact_layers": "[-1]"}):
        save_file(tensors, file, metadata)
        refused("no file that hybridgen.calibrate wrote")
    file.write_bytes(b"nothing of the kind")
    refused("no safetensors file that can be read")
