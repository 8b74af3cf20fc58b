"""swarm-generate: what it writes and refuses."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from peers.generate import program
from peers.generate.options import PROG
from peers.model import program as model
from peers.shared import stopping
from peers.shared.devices import computing_in
from peers.shared.process import EXIT_USAGE
from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.config import LoraConfig, StagesConfig
from swarm.interchange import run_folder
from swarm.interchange.origin import from_model_folder, transformer
from swarm.interchange.source import parameter_shapes
from swarm.model import compiled
from tests.checkpoint.states import CONFIG, cut, write_cut
from tests.interchange.small_models import save
from tests.support.tokenizers import write_tokenizer


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert program.main(arguments) == 0
    return capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that the program ends with."""
    assert stopping.run_program(PROG, lambda: program.main(arguments)) == EXIT_USAGE
    *_, last = capsys.readouterr().err.splitlines()
    return last


def test_a_model_s_folder_and_its_run_folder_write_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama-3", tmp_path / "in")
    assert model.main(["import", str(tmp_path / "in"), "--output", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    options = ("--prompt", "def f", "--max-tokens", "20", "--seed", "4")
    texts = [_run(capsys, "--model", str(tmp_path / folder), *options) for folder in ("in", "run")]
    assert texts[0] == texts[1]
    assert texts[0].startswith("def f")
    assert texts[0] != _run(capsys, "--model", str(tmp_path / "in"), *options[:-1], "5")


def test_a_model_is_compiled_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is really compiled here."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(compiled, "compiles", lambda wanted, *_: wanted == "on")
    compiled_layers = list[nn.Module]()
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled_layers.append(self))
    theirs = save("llama-3", tmp_path)
    options = ("--model", str(tmp_path), "--prompt", "def f", "--max-tokens", "20", "--temperature", "0")
    expected = _run(capsys, *options)
    assert not compiled_layers
    assert program.main((*options, "--compile", "on")) == 0
    said = capsys.readouterr()
    assert said.out == expected
    assert "compiling the model's layers, which takes a minute the first time" in said.err
    assert len(compiled_layers) == theirs.config.num_hidden_layers


WORDS = [f"word{number}" for number in range(250)]


def _save_with_words(folder: Path, name: str) -> None:
    save(name, folder)
    write_tokenizer(folder / "tokenizer.json", WORDS)


def test_a_text_ends_before_a_stop_and_with_the_model_s_end_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save_with_words(tmp_path, "llama-2")
    options = ("--model", str(tmp_path), "--prompt", "word7", "--max-tokens", "12", "--seed", "1")
    whole = _run(capsys, *options).split()
    assert len(set(whole)) > 5
    assert _run(capsys, *options, "--stop", f" {whole[4]}").split() == whole[: whole.index(whole[4])]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{WORDS.index(whole[3]) + 1}, 0]}}')
    assert _run(capsys, *options).split() == whole[: whole.index(whole[3])]


@pytest.mark.parametrize(("name", "dtype", "held"), [("llama-3", "bf16", torch.bfloat16)])
def test_matrices_may_have_sixteen_bits(
    name: str, dtype: Literal["bf16", "fp16"], held: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save_with_words(tmp_path, name)
    found, cpu = from_model_folder(tmp_path), torch.device("cpu")
    plain, narrow = (transformer(found, computing_in(found.config, each, cpu), cpu) for each in ("fp32", dtype))
    assert {value.dtype for value in plain.parameters()} == {torch.float32}
    for parameter in narrow.parameters():
        assert parameter.dtype is (held if parameter.ndim > 1 else torch.float32)
    tokens = torch.arange(8)[None]
    with torch.inference_mode():
        expected = plain(tokens)
        torch.testing.assert_close(narrow(tokens), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    options = ("--prompt", "a", "--max-tokens", "5", "--device", "cpu", "--model", str(tmp_path))
    assert _run(capsys, *options, "--dtype", dtype).split()


def test_checkpoints_write_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=256))
    write_cut(tmp_path, cut(2, config), num_rounds=1)
    # The model's sequences are of eight tokens.
    assert _run(capsys, "--checkpoint", str(tmp_path), "--prompt", "a").startswith("a")
    # The type of its matrices here does not change the run's id.
    assert program.main(["--checkpoint", str(tmp_path), "--prompt", "a", "--dtype", "bf16"]) == 0
    assert f" by {cut(2, config).run_id}@1," in capsys.readouterr().err
    (tmp_path / "adapters").mkdir()
    config = dataclasses.replace(config, lora=LoraConfig(rank=2))
    write_cut(tmp_path / "adapters", cut(2, config), num_rounds=3)
    assert _run(capsys, "--checkpoint", str(tmp_path / "adapters"), "--prompt", "a").startswith("a")
    refused = _refused(capsys, "--checkpoint", str(tmp_path), "--prompt", "123456789")
    assert "--prompt has 9 tokens, and the model takes 8 with what follows" in refused


def test_a_run_on_bytes_ends_its_texts_where_the_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does so from its folder, a run folder, checkpoints and an export of these, though no tokenizer travels
    along."""
    theirs = save("llama-2", tmp_path / "in")
    greedy = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    tokens = theirs.generate(torch.tensor([[97]]), eos_token_id=None, **greedy)[0, 1:].tolist()
    end = next(token for number, token in enumerate(tokens[3:], start=3) if token not in tokens[:number])
    theirs.generation_config.eos_token_id = theirs.config.eos_token_id = end
    theirs.save_pretrained(tmp_path / "in")
    assert model.main(["import", str(tmp_path / "in"), "--output", str(tmp_path / "run")]) == 0
    found = run_folder.load_config(tmp_path / "run").begun()
    whole = dataclasses.replace(found, stages=StagesConfig(num_stages=1))
    header = Header(config=whole, stage=0, round=1, run_samples=16, lineage="", highest_microbatch=7, state_digest="")
    weights = run_folder.open_weights(tmp_path / "run", found).load(set(parameter_shapes(found.model)))
    (tmp_path / "checkpoints").mkdir()
    file.write(tmp_path / "checkpoints", header, {f"anchor/{name}": w for name, w in weights.items()}, owner="test")
    assert model.main(["export", "--checkpoint", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    options = ("--prompt", "a", "--temperature", "0", "--max-tokens", "12")
    places = [("--model", "in"), ("--model", "run"), ("--checkpoint", "checkpoints"), ("--model", "out")]
    texts = [_run(capsys, option, str(tmp_path / folder), *options) for option, folder in places]
    written = bytes(token for token in [97, *tokens[: tokens.index(end)]] if token < 256).decode(errors="replace")
    assert [text.rstrip("\n") for text in texts] == [written.rstrip("\n")] * 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generate(torch.tensor([[97]]), **greedy)[0, 1:].tolist() == tokens[: tokens.index(end) + 1]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "give one of INVITE, --lan, --initial-peers ADDRESS, --checkpoint DIR and --model DIR_OR_NAME"),
        (["--model", "m"], "give one of --prompt TEXT, --chat and --serve HOST:PORT"),
        (["--model", "m", "--serve", "host:99999"], "--serve takes HOST:PORT or PORT, not 'host:99999'"),
        (["swarm://x", "--prompt", "a", "--dtype", "bf16"], "--device, --dtype and --compile need --checkpoint DIR or"),
    ],
)
def test_bad_command_lines_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert fault in said
    assert said.count("\n") == 1
