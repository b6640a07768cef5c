"""Every error of contracts.md that `python -m hybridgen.run` can meet: exit 2, one message, no traceback."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import yaml
from huggingface_hub import constants
from tokenizers import decoders, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from hybridgen import run
from hybridgen.models import checkpoint, hub

POSITIONS = 1024
SIZES: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=4, vocab_size=260, num_attention_heads=4)
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = ["--seq", "100", "--gen", "2"]


def save_tokenizer(folder: Path) -> None:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def save_llama(folder: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    rest = dict(num_key_value_heads=2, intermediate_size=48, max_position_embeddings=POSITIONS)
    LlamaForCausalLM(LlamaConfig(**SIZES, **rest, **NO_TOKENS)).save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "opt"
    torch.manual_seed(0)
    config = OPTConfig(**SIZES, **NO_TOKENS, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=POSITIONS)
    OPTForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Nothing is cached, and whoever touches the network is written down and refused."""
    touched: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        touched.append(args)
        raise OSError("the network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return touched


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that was not told that it is offline."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub_alias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An alias whose weights only the hub has: a tiny OPT by the name of `opt-tiny`."""
    folder = tmp_path / "aliases"
    shutil.copytree(checkpoint.models_dir(), folder)
    entry = yaml.safe_load((folder / "opt-1.3b.yaml").read_text())
    entry["hub_id"] = "somebody/opt-tiny"
    entry["config"] |= {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "vocab_size": 300}
    entry["config"] |= {"num_hidden_layers": 4, "num_attention_heads": 2}
    (folder / "opt-tiny.yaml").write_text(yaml.safe_dump(entry))
    monkeypatch.setattr(checkpoint, "models_dir", lambda: folder)
    checkpoint.aliases.cache_clear()
    yield "opt-tiny"
    checkpoint.aliases.cache_clear()


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run, which must fail as a user's error does; returns the message."""

    def refuse(*argv: str | Path, says: tuple[str, ...] = (), prints: tuple[str, ...] = ()) -> str:
        capsys.readouterr()
        status = run.main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        # progress bars draw on stderr, too
        lines = [line.split("\r")[-1] for line in err.split("\n")]
        messages = [line for line in lines if line.startswith("error: ")]
        assert status == 2, f"exit status {status}; stdout: {out}; stderr: {err}"
        assert len(messages) == 1, err
        assert "Traceback" not in err + out
        message = err[err.index("error: ") :]
        for words in says:
            assert words in message, f"{words!r} is not in: {message}"
        return message

    return refuse


# Names


def test_unknown_model(refused: Refused, no_network: list[Any]) -> None:
    refused("--model", "opt-13", says=("unknown model 'opt-13'", "'opt-13b'", "llama-3.1-8b", "directory"))
    refused("--model", "/no/such/folder", says=("/no/such/folder", "does not exist"))
    refused("--model", "./gone.gguf", says=("gone.gguf", "does not exist"))
    assert not no_network


def test_unknown_strategy(refused: Refused) -> None:
    refused("--strategy", "hybridge", says=("unknown strategy 'hybridge'", "did you mean 'hybridgen'", "full"))
    refused("--strategy", "none.yaml", says=("none.yaml", "No such file"))


def test_unknown_setting(refused: Refused, tmp_path: Path) -> None:
    refused(
        *("--set", "selection.keep_mas=0.9"),
        says=("unknown setting 'selection.keep_mas'", "--set selection.keep_mas=0.9", "selection.keep_mass"),
    )
    file = tmp_path / "mine.yaml"
    file.write_text("cache:\n  windw: 3\n")
    refused("--strategy", file, says=("'cache.windw'", str(file), "cache.gpu_window"))
    refused("--set", "nonsense", says=("'nonsense'", "PATH=VALUE"))


def test_unknown_flag(refused: Refused) -> None:
    refused("--nonsense", says=("--nonsense",))
    refused("--seq", says=("--seq",))


# Values


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--seq", "0", "run.seq = 0 (from --seq): allowed is a number of tokens >= 1"),
        ("--seq", "-5", "-5"),
        ("--seq", "two", "'two'"),
        ("--gen", "0", "run.gen = 0 (from --gen): allowed is"),
        ("--batch", "0", "run.batch = 0 (from --batch): allowed is"),
        ("--batch", "-1", "run.batch = -1 (from --batch): allowed is"),
        ("--gpu-window", "0", "cache.gpu_window = 0 (from --gpu-window): allowed is"),
        ("--gpu-memory", "0GiB", "placement.gpu_memory_bytes = 0 (from --gpu-memory): allowed is a size > 0"),
        ("--gpu-memory", "lots", "'lots'"),
        ("--keep", "0.0", "selection.keep = 0.0 (from --keep): allowed is a fraction in (0, 1]"),
        ("--keep", "1.5", "selection.keep = 1.5"),
        ("--keep", "0", "count >= 1"),
        ("--keep", "-0.5", "selection.keep = -0.5"),
        ("--keep-mass", "0", "selection.keep_mass = 0.0 (from --keep-mass): allowed is a fraction in (0, 1]"),
        ("--keep-mass", "95", "selection.keep_mass = 95.0"),
        ("--keep-mass", "nan", "selection.keep_mass = nan"),
        ("--min-keep", "-1", "selection.min_keep = -1"),
        ("--weights-on-gpu", "1.5", "placement.weights_on_gpu = 1.5"),
        ("--device", "tpu", "runtime.device = 'tpu' (from --device): allowed is 'auto' or 'cpu' or 'cuda'"),
        ("--dtype", "int8", "model.dtype = 'int8'"),
        ("--weights", "some", "model.weights = 'some'"),
        ("--lookahead", "maybe", "attention.lookahead = 'maybe'"),
        ("--schedule", "chaos", "schedule.mode = 'chaos'"),
        ("--set", "sampling.top_p=0", "sampling.top_p = 0"),
        ("--set", "sampling.temperature=-1", "sampling.temperature = -1"),
        ("--set", "cache.sinks=-1", "cache.sinks = -1 (from --set cache.sinks=-1)"),
        ("--set", "placement.host_memory_bytes=0", "placement.host_memory_bytes = 0"),
        ("--seed", "99999999999999999999", "run.seed"),
        ("--set", "sampling.stop=['']", "sampling.stop"),
        ("--set", "runtime.transfer=cuda", "runtime.transfer"),
        ("--set", "sampling.temperature=1.0e-42", "sampling.temperature"),
    ],
)
def test_values_out_of_range(refused: Refused, llama: Path, flag: str, value: str, says: str) -> None:
    message = refused("--model", llama, "--weights", "random", *SMALL, flag, value, says=(says,))
    assert message.count("\n") <= 1


def test_cuda_where_there_is_none(refused: Refused, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("--model", llama, "--device", "cuda", says=("'cuda'", "no CUDA GPU", "'cpu'"))


def test_an_instruction_set_that_is_not_there(refused: Refused, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDGEN_CPU_ISA", "bogus")
    refused("--model", llama, "--weights", "random", *SMALL, says=("HYBRIDGEN_CPU_ISA", "'bogus'", "scalar"))


# Positions


def test_positions_of_a_rotary_model(refused: Refused, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to 1,024 more tokens: one warning; beyond: an error, unless it is asked for."""
    base = ("--model", str(llama), "--weights", "random", "--gen", "2")
    assert run.main([*base, "--seq", str(POSITIONS - 2)]) == 0
    assert "exceed" not in capsys.readouterr().out
    assert run.main([*base, "--seq", str(POSITIONS + 1024 - 2)]) == 0
    assert capsys.readouterr().out.count("exceed") == 1
    refused(
        *(*base, "--seq", str(POSITIONS + 1024 - 1)),
        says=("2049 tokens", "1024 positions", "--seq", "model.extend_positions=true"),
    )
    longer = [*base, "--seq", str(POSITIONS + 1024 - 1), "--set", "model.extend_positions=true"]
    assert run.main(longer) == 0
    assert capsys.readouterr().out.count("exceed") == 1


def test_positions_of_opt(opt: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The table is interpolated: one warning, in the report, and the answer is not judged."""
    report = tmp_path / "r.json"
    argv = ["--model", str(opt), "--seq", str(3 * POSITIONS), "--gen", "2", "--report", str(report)]
    assert run.main(argv) == 0
    out = capsys.readouterr().out
    assert out.count("interpolated; output is meaningless") == 1
    assert "not judged: positions interpolated" in out
    assert "interpolated" in report.read_text()
    assert run.main(["--model", str(opt), "--seq", str(POSITIONS - 20), "--gen", "2"]) == 0
    assert "interpolated" not in capsys.readouterr().out


@pytest.mark.parametrize("gen", [1, 4])
def test_the_answer_check_stays_inside_the_positions(opt: Path, gen: int) -> None:
    """Full attention's own answer has 16 tokens, more than --gen: OPT's table must not run out."""
    assert run.main(["--model", str(opt), "--seq", str(POSITIONS - gen), "--gen", str(gen)]) == 0


def test_no_room_for_a_prompt(refused: Refused, llama: Path) -> None:
    refused("--model", llama, "--gen", POSITIONS, says=(f"--gen {POSITIONS}", f"{POSITIONS} positions"))


def test_a_document_needs_room(refused: Refused, llama: Path) -> None:
    refused("--model", llama, "--seq", "50", "--gen", "2", says=("at least", "--seq gives 50"))


# Memory

NO_DISK = ("--set", "placement.weights_on_disk=0.0")


def test_not_enough_memory_suggests_a_shorter_prompt(refused: Refused, no_network: list[Any], online: None) -> None:
    message = refused(
        *("--model", "llama-3.1-8b", "--seq", "64k", "--dtype", "bfloat16"),
        *("--set", f"placement.host_memory_bytes={22 * 2**30}", *NO_DISK),
        says=("memory plan:", "weights", "KV host tier", "22.00 GiB", "what would fit: --seq "),
    )
    fitting = int(message.split("--seq ")[1].split()[0])
    assert 0 < fitting < 64 * 1024 and fitting % 256 == 0
    assert not no_network, "an impossible plan must be refused before the network is touched"


@pytest.mark.parametrize(
    ("gib", "says"), [(24, "--dtype bfloat16"), (10, "a smaller model: --model "), (0.01, "nothing on this machine")]
)
def test_not_enough_memory_suggests_what_else_would_fit(
    refused: Refused, no_network: list[Any], online: None, gib: float, says: str
) -> None:
    refused(
        *("--model", "llama-3.1-8b", "--seq", "2k", "--dtype", "float32"),
        *("--set", f"placement.host_memory_bytes={int(gib * 2**30)}", *NO_DISK),
        says=("memory plan:", "what would fit", says),
    )
    assert not no_network


@pytest.mark.parametrize("weights", ["auto", "real", "random"])
def test_an_impossible_plan_makes_no_network_call(
    refused: Refused, no_network: list[Any], online: None, weights: str
) -> None:
    for prompt in ((), ("--prompt", "Once upon a time")):
        if weights == "random" and prompt:
            continue  # a random model's tokenizer has to be there: another error
        refused(
            *("--model", "opt-13b", "--weights", weights, "--set", "placement.host_memory_bytes=1000000000", *prompt),
            says=("opt-13b", "does not fit", "memory plan:"),
        )
    assert not no_network


def test_a_suggested_prompt_length_does_fit(refused: Refused, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--model", str(llama), "--weights", "random", "--gen", "2", "--set", "model.extend_positions=true"]
    base += ["--set", "placement.host_memory_bytes=12000000", *NO_DISK]
    message = refused(*base, "--seq", "64k")
    fitting = message.split("--seq ")[1].split()[0]
    assert run.main([*base, "--seq", fitting]) == 0
    capsys.readouterr()
    refused(*base, "--seq", str(int(fitting) + 256), says=("does not fit",))


# Prompts


def test_prompts(refused: Refused, llama: Path, tmp_path: Path) -> None:
    base = ("--model", llama, "--gen", "2")
    refused(*base, "--prompt", "", says=("empty", "--prompt"))
    refused(*base, "--prompt", " \n ", says=("empty",))
    file = tmp_path / "p.txt"
    refused(*base, "--prompt-file", file, says=(str(file), "No such file"))
    refused(*base, "--prompt-file", tmp_path, says=(str(tmp_path), "directory"))
    file.write_bytes(b"\xff\xfe\xfa")
    refused(*base, "--prompt-file", file, says=(str(file), "utf-8"))
    file.write_text("\n")
    refused(*base, "--prompt-file", file, says=("empty", str(file)))
    file.write_text("words")
    refused(*base, "--prompt-file", file, "--prompt", "words", says=("--prompt", "not allowed with"))


def test_an_unreadable_prompt_file(refused: Refused, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so the refusal is made here."""

    read_text = Path.read_text

    def deny(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "secret.txt":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", deny)
    refused("--model", llama, "--prompt-file", "secret.txt", says=("secret.txt", "Permission denied"))


def test_arguments_that_are_no_text_and_no_path(refused: Refused, llama: Path) -> None:
    """Bytes that are no UTF-8 reach Python as lone surrogates; names may be too long for the system."""
    refused("--model", llama, "--gen", "2", "--prompt", "a\udcffb", says=("--prompt",))
    refused("--model", "a" * 5000, says=("a" * 5000,))
    refused("--model", llama, "--prompt-file", "a" * 5000, says=("--prompt-file", "too long"))


def test_a_prompt_needs_a_tokenizer(
    refused: Refused, llama: Path, tmp_path: Path, hub_alias: str, no_network: list[Any]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(llama, bare)
    (bare / "tokenizer.json").unlink()
    for weights in ("random", "auto"):
        refused("--model", bare, "--weights", weights, "--prompt", "Hello", says=(str(bare), "tokenizer"))
    refused(
        *("--model", hub_alias, "--weights", "random", "--prompt", "Hello"),
        says=("opt-tiny", "tokenizer", "local directory"),
    )
    assert not no_network


def test_a_prompt_with_random_weights_and_a_tokenizer(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "r.json"
    argv = ["--model", str(llama), "--weights", "random", "--prompt", "abc", "--gen", "3", "--report", str(report)]
    assert run.main(argv) == 0
    found = json.loads(report.read_text())
    assert found["prompt_tokens"] == [3] and found["text"] is None and found["generated_tokens"] == [3]


# Reports


def test_a_report_needs_its_folder(refused: Refused, llama: Path, tmp_path: Path) -> None:
    argv = ("--model", llama, *SMALL, "--weights", "random", "--report")
    refused(*argv, tmp_path / "no" / "r.json", says=("--report", "no/r.json", "folder"))
    (tmp_path / "r").mkdir()
    refused(*argv, tmp_path / "r", says=("--report", str(tmp_path / "r")))
    assert [file.name for file in tmp_path.iterdir()] == ["r"], "nothing is left behind"


def test_a_trace_needs_its_folder_and_a_file_of_its_own(refused: Refused, llama: Path, tmp_path: Path) -> None:
    argv = ("--model", llama, *SMALL, "--weights", "random", "--trace")
    refused(*argv, tmp_path / "no" / "t.json", says=("--trace", "no/t.json", "folder"))
    refused(*argv, tmp_path, says=("--trace", str(tmp_path), "folder"))
    refused(*argv, tmp_path / "t.json", "--report", tmp_path / "t.json", says=("--trace", "t.json", "report"))
    assert not list(tmp_path.iterdir())


def test_the_streamed_text_is_whole(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes drawn at random end in the middle of characters: what was held back comes at the end."""
    report = tmp_path / "r.json"
    hot = ["--set", "sampling.temperature=5.0", "--report", str(report)]
    halves, texts = 0, set()
    for seed in range(12):
        argv = ["--model", str(llama), "--prompt", "abc", "--gen", "3", "--seed", str(seed), *hot]
        assert run.main(argv) == 0
        (text,) = json.loads(report.read_text())["text"]
        halves += text.endswith("\ufffd")
        texts.add(text)
        assert text in capsys.readouterr().out
    assert halves > 1 and len(texts) > 6, "the same weights and prompt: the seed is that of the draws"


# Checkpoints


def damage(folder: Path, kind: str) -> tuple[str, ...]:
    """Spoil a saved model; what the message must say."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "no weights":
        weights.unlink()
        return ("holds no weights",)
    if kind == "no config":
        config.unlink()
        return ("config.json",)
    if kind == "config is no JSON":
        config.write_text("{")
        return ("config.json", "JSON")
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
        return ("model.safetensors", "truncated")
    if kind == "empty":
        weights.write_bytes(b"")
        return ("model.safetensors", "truncated")
    if kind == "damaged header":
        content = bytearray(weights.read_bytes())
        content[8:24] = b"\x00" * 16
        weights.write_bytes(bytes(content))
        return ("model.safetensors", "header")
    if kind == "unknown architecture":
        config.write_text(config.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
        return ("'MambaForCausalLM' is not supported", "LlamaForCausalLM", "OPTForCausalLM")
    if kind == "another architecture":
        config.write_text(config.read_text().replace("LlamaForCausalLM", "Qwen2ForCausalLM"))
        return ("no tensor", "Qwen2ForCausalLM")
    if kind == "other sizes":
        config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
        return ("gate_proj", "config")
    if kind == "no hidden size":
        config.write_text(config.read_text().replace('"hidden_size"', '"hiden_size"'))
        return ("hidden_size",)
    raise AssertionError(kind)


KINDS = ["no weights", "no config", "config is no JSON", "truncated", "empty", "damaged header"]
KINDS += ["unknown architecture", "another architecture", "other sizes", "no hidden size"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_checkpoints(refused: Refused, llama: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    says = damage(folder, kind)
    refused("--model", folder, *SMALL, says=(*says, str(folder)))


def test_a_half_downloaded_sharded_checkpoint(refused: Refused, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model", max_shard_size="10KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].rename(shards[1].with_suffix(".incomplete"))
    refused("--model", folder, *SMALL, says=(str(folder), shards[1].name, "incomplete", "1 of"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None}, "'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "biases"),
        ({"architectures": None}, "architecture None"),
        ({"architectures": []}, "architecture None"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architecture"),
        ({"dtype": "float8_e4m3fn", "torch_dtype": "float8_e4m3fn"}, None),
    ],
)
def test_configs_that_are_not_supported(
    refused: Refused, llama: Path, tmp_path: Path, change: dict[str, Any], says: str | None
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    argv = ("--model", folder, "--weights", "random", *SMALL)
    if says is None:  # what the checkpoint says does not matter on the CPU, which computes in float32
        assert run.main([str(argument) for argument in argv]) == 0
    else:
        refused(*argv, says=(says, str(folder)))


def test_a_file_that_is_no_model(refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF nothing else")
    refused("--model", file, says=(str(file),))
    other = tmp_path / "model.txt"
    other.write_text("words")
    refused("--model", other, says=(str(other), ".gguf"))
    refused("--model", tmp_path, says=(str(tmp_path), "config.json"))


# The hub


def test_real_weights_and_no_hub(refused: Refused, hub_alias: str, no_network: list[Any], online: None) -> None:
    refused(
        *("--model", hub_alias, "--weights", "real", *SMALL),
        says=("somebody/opt-tiny", "--weights real", "--weights random", "local directory"),
    )
    assert no_network, "this was to be the hub's refusal"


def test_a_prompt_and_no_hub(refused: Refused, hub_alias: str, no_network: list[Any], online: None) -> None:
    refused(
        *("--model", hub_alias, "--prompt", "Hello", "--gen", "2"),
        says=("somebody/opt-tiny", "a prompt was given", "local directory"),
    )


def test_offline_mode_asks_nobody(
    refused: Refused, hub_alias: str, no_network: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("--model", hub_alias, "--weights", "real", *SMALL, says=("somebody/opt-tiny", "HF_HUB_OFFLINE"))
    refused("--model", "nobody/unknown-model", *SMALL, says=("nobody/unknown-model", "HF_HUB_OFFLINE"))
    assert not no_network


@pytest.mark.parametrize("how", ["offline", "unreachable", "hanging"])
def test_without_the_hub_and_a_prompt_random_weights_stand_in(
    hub_alias: str,
    no_network: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    how: str,
) -> None:
    """`--weights auto`: one line that cannot be missed, and the report says so, too."""
    if how == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        request.getfixturevalue("online")
    if how == "hanging":
        monkeypatch.setattr(hub, "_file_sizes", lambda hub_id: time.sleep(600))
        ask = hub._ask
        monkeypatch.setattr(hub, "_ask", lambda hub_id, question, deadline_s: ask(hub_id, question, 0.2))
    report = tmp_path / "r.json"
    assert run.main(["--model", hub_alias, *SMALL, "--report", str(report)]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if "RANDOM WEIGHTS" in line]
    assert len(lines) == 1 and lines[0].startswith("***") and "somebody/opt-tiny" in lines[0]
    assert "--keep 0.1" in out
    found = json.loads(report.read_text())
    assert found["weights"] == "random"
    assert "somebody/opt-tiny" in found["weights_random_because"]
    assert found["text"] is None and found["generated_tokens"] == [2]
    assert found["config"]["selection"] == {"keep": 0.1, "keep_mass": None, "min_keep": 64, "alpha": None}


def test_the_deadline_of_the_hub_is_ten_seconds() -> None:
    """contracts.md: no answer within 10 s in all."""
    assert hub.DEADLINE_S == 10.0


def test_more_threads_than_cores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One core is torch's; the rest may scan."""
    flags = ["--model", str(save_llama(tmp_path)), "--weights", "random", "--set", "runtime.worker_threads=1000"]
    assert run.main([*flags, "--seq", "64", "--gen", "2"]) == 2
    assert "runtime.worker_threads = 1000" in capsys.readouterr().err


def test_synthetic_kv_of_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(save_llama(tmp_path)), "--weights", "random", "--synthetic-kv", "--prompt", "Once"]
    assert run.main([*flags, "--gen", "2"]) == 2
    assert "--synthetic-kv with a prompt" in capsys.readouterr().err
