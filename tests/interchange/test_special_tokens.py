"""The tokens with which texts begin and end come in with a model and go out with it, with a tokenizer or without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm import config as configs
from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.interchange import origin
from swarm.interchange.export import Card, Origin, export_model
from swarm.interchange.families.known import read_config
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source, parameter_shapes
from tests.interchange.small_models import VOCABULARY, save
from tests.support.tokenizers import write_tokenizer


def _write(folder: Path, name: str, *left_out: str, **values: Any) -> None:
    path = folder / name
    found = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in found.items() if key not in left_out}))


def _read(name: str, tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
    save(name, tmp_path)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write(tmp_path, "config.json", *(key for key in special if key not in config), **config)
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_config(tmp_path / "config.json")[1]


@pytest.mark.parametrize(
    ("name", "config", "generation", "bos", "eos", "pad"),
    [
        ("qwen2", {}, None, -1, (), -1),
        ("qwen2", {"bos_token_id": 3, "eos_token_id": [5, 6], "pad_token_id": 0}, None, 3, (5, 6), 0),
        ("qwen2", {"eos_token_id": 5}, {"eos_token_id": [7, 8], "bos_token_id": 4}, 4, (7, 8), -1),
        ("qwen2", {"eos_token_id": 5}, {"eos_token_id": None}, -1, (5,), -1),
        # Without such a key the token is transformers' own default.
        ("llama-2", {}, None, 1, (2,), -1),
        ("llama-2", {"bos_token_id": None, "eos_token_id": None}, None, -1, (), -1),
        # The model has too few tokens for 50256.
        ("gpt2", {}, None, -1, (), -1),
        ("gpt2", {"bos_token_id": 50256, "eos_token_id": 50256}, {"eos_token_id": 50256}, -1, (), -1),
        # The first Llamas say in this way that there is none.
        ("llama-2", {"eos_token_id": [5], "pad_token_id": -1}, None, 1, (5,), -1),
    ],
)
def test_they_are_read_as_transformers_reads_them(
    name: str, config: dict[str, Any], generation: dict[str, Any] | None, bos: int, eos: tuple[int, ...],
    pad: int, tmp_path: Path,
) -> None:  # fmt: skip
    model = _read(name, tmp_path, config, generation)
    assert (model.bos_token_id, model.eos_token_ids, model.pad_token_id) == (bos, eos, pad)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("is_in_config", [True, False])
def test_what_is_no_token_is_refused(is_in_config: bool, key: str, tmp_path: Path) -> None:
    """A wrong token is refused in either file, even if the other file decides."""
    faults = dict.fromkeys(["2", True, 2.5, "x" * 5000], "is .*, and should be a token's number, or a list of such")
    values: list[tuple[object, str]] = [
        *faults.items(),
        ([None], "is .*should"),
        ([[2]], "is .*should"),
        ({}, "is .*should"),
    ]
    beyond = f"names the token .*, and the model has those from 0 to {VOCABULARY - 1}"
    values += [(VOCABULARY, beyond), (-2, beyond), ([5, 10**30], beyond)]
    for value, fault in values:
        config = {key: value} if is_in_config else {key: 3}
        with pytest.raises(ValueError, match=f"config.json: {key} {fault}") as raised:
            _read("qwen2", tmp_path, config, {key: 3} if is_in_config else {key: value})
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("eos", [7, [7, 8]])
def test_they_go_out_again(eos: int | list[int], has_tokenizer: bool, tmp_path: Path) -> None:
    save("llama-3", tmp_path / "in")
    _write(tmp_path / "in", "config.json", bos_token_id=3, eos_token_id=eos, pad_token_id=5)
    (tmp_path / "in" / "generation_config.json").unlink()
    if has_tokenizer:
        write_tokenizer(tmp_path / "in" / "tokenizer.json", ["one", "two"])
    config = import_model(Source(tmp_path / "in"), tmp_path / "run", ImportOptions())
    assert configs.load(tmp_path / "run" / "run.toml") == config
    export_model(origin.from_run_folder(tmp_path / "run"), tmp_path / "out")
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("in", "out"))
    for key, value in {"bos_token_id": 3, "eos_token_id": eos, "pad_token_id": 5}.items():
        assert [getattr(model.config, key) for model in (before, after)] == [value, value]
        assert getattr(after.generation_config, key) == value


@pytest.mark.parametrize("is_named", [False, True])
def test_a_run_from_scratch_gives_those_of_its_tokenizer(is_named: bool, tmp_path: Path) -> None:
    """They are given by their numbers, because transformers ends a text by these."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", ["one", "two"])
    if is_named:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "two"}))
    config = RunConfig(
        model=ModelConfig(num_layers=1, d_model=16, num_heads=2, vocab_size=16),
        stages=StagesConfig(num_stages=1),
        data=DataConfig(sequence_length=8, tokenizer=tokenizer),
    )
    shapes = parameter_shapes(config.model)
    begun = Origin(
        config=config,
        load=lambda names: {name: torch.zeros(shapes[name]) for name in names},
        card=Card(round=0, num_samples=0, losses={}),
        tokenizer=tokenizer,
    )
    export_model(begun, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    end = 2 if is_named else None
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (end, end)
    assert f"`{config.run_id}`" in (tmp_path / "out" / "README.md").read_text()
