"""A checkpoint is whole, to the last bit, or it is refused by name."""

import dataclasses
import json
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from swarm import config as configs
from swarm.checkpoint import file
from swarm.checkpoint.file import FileName
from swarm.config import DataConfig, OptimizerConfig, RunConfig, allowed_changes
from swarm.errors import IntegrityError
from swarm.types import Block
from tests.checkpoint.states import CONFIG, cut, header_of, trained
from tests.support.commits import state_tensors


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The only checkpoint in its folder."""
    config = cut(3)
    weights = trained(config, 1, 4)
    return file.write(tmp_path, header_of(config, 1, weights), state_tensors(weights), owner="test")


def test_what_is_written_is_read(written: Path) -> None:
    config, weights = cut(3), trained(cut(3), 1, 4)
    assert written.name == "stage-1-of-3.round-4.safetensors"
    assert file.names(written.parent) == [FileName(round=4, num_stages=3, stage=1)]
    assert file.read_header(written, config) == header_of(config, 1, weights)
    assert file.parameters(written) == weights.masters.keys()
    loaded, expected = file.load(written, weights.masters), state_tensors(weights)
    assert loaded.keys() == expected.keys()
    assert {name.rsplit("/", 1)[1] for name in loaded if name.startswith("outer/")} == {"exp_avg", "exp_avg_sq", "step"}
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_a_variant_is_in_the_name_and_in_the_header(written: Path) -> None:
    config, weights = cut(3), trained(cut(3), 1, 4)
    header = dataclasses.replace(header_of(config, 1, weights), variant=2)
    path = file.write(written.parent, header, state_tensors(weights), owner="test")
    assert path.name == "stage-1.2-of-3.round-4.safetensors"
    assert [name.block for name in file.names(path.parent)] == [Block(1), Block(1, 2)]
    assert file.read_header(path, config) == header
    with safe_open(written, "pt") as first:
        assert "variant" not in first.metadata(), "as in files of releases whose stages had no variants"
    written.rename(written.with_name("stage-1.0-of-3.round-4.safetensors"))
    assert [name.block for name in file.names(path.parent)] == [Block(1, 2)], "nobody writes such a name"


def test_what_no_release_writes_is_passed_over_or_refused(written: Path) -> None:
    config, weights = cut(3), trained(cut(3), 1, 4)
    header, tensors = header_of(config, 1, weights), state_tensors(weights)
    path = file.write(written.parent, header, {**tensors, "stray": torch.zeros(1)}, owner="test")
    assert file.load(path, weights.masters).keys() == tensors.keys()
    nonsense: list[Any] = [5, [5], {}, "text"]
    for spoilt in nonsense:
        path = file.write(written.parent, dataclasses.replace(header, amendments=spoilt), tensors, owner="test")
        with pytest.raises(IntegrityError, match="its amendments are no list of texts"):
            file.read_header(path, config)


def test_one_that_is_cut_short_is_refused(written: Path) -> None:
    content = written.read_bytes()
    for length in [0, 5, 8, 100, len(content) // 2, len(content) - 1]:
        written.write_bytes(content[:length])
        with pytest.raises(IntegrityError, match=r"stage-1-of-3\.round-4\.safetensors cannot be read"):
            file.read_header(written, cut(3))
    written.write_bytes(content + b"\0")
    with pytest.raises(IntegrityError):
        file.read_header(written, cut(3))


def test_one_that_differs_by_one_bit_is_refused(written: Path) -> None:
    """The byte may be anywhere: in the header's length, in the header, or in the tensors."""
    content = written.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(0)
    positions = [
        *range(8), *chance.sample(range(8, header_bytes), 150), header_bytes - 1,
        *chance.sample(range(header_bytes, len(content)), 60), len(content) - 1,
    ]  # fmt: skip
    for position in positions:
        altered = bytearray(content)
        altered[position] ^= 1 << chance.randrange(8)
        written.write_bytes(altered)
        with pytest.raises(IntegrityError, match=written.name):
            file.read_header(written, cut(3))
    written.write_bytes(content)
    file.read_header(written, cut(3))


def test_one_that_was_renamed_is_refused(written: Path) -> None:
    moved = shutil.copy(written, written.with_name("stage-1-of-3.round-5.safetensors"))
    with pytest.raises(IntegrityError, match=r"round-5\.safetensors was renamed: it is stage-1-of-3\.round-4"):
        file.read_header(Path(moved), cut(3))


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (dataclasses.replace(CONFIG, run="other"), "run is 'checkpoints' in it and 'other' here"),
        (
            dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, d_model=32)),
            "model.d_model is 16 in it and 32 here",
        ),
        (
            dataclasses.replace(CONFIG, data=DataConfig(sequence_length=8, microbatch_size=4)),
            "data.microbatch_size is 2 in it and 4 here",
        ),
    ],
)
def test_one_of_another_run_is_refused(written: Path, config: RunConfig, difference: str) -> None:
    with pytest.raises(IntegrityError, match=f"{written.name} is of another run: {difference}"):
        file.read_header(written, config)


def test_a_resumed_run_may_change_its_cut_its_rates_and_where_its_text_is(written: Path) -> None:
    data = dataclasses.replace(CONFIG.data, dataset="elsewhere", tokenizer="copy.json", tokenizer_identity="bytes")
    changed = dataclasses.replace(cut(2), optimizer=OptimizerConfig(learning_rate=0.5), data=data)
    file.read_header(written, changed)


def test_one_of_an_earlier_release_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's configuration lacks newer fields, such as `data.tokenizer_identity`."""
    config, weights = cut(3), trained(cut(3), 1, 4)

    def earlier(config: RunConfig) -> str:
        values = dataclasses.asdict(config)
        del values["data"]["tokenizer_identity"]
        return json.dumps(values)

    with monkeypatch.context() as patch:
        patch.setattr(configs, "to_json", earlier)
        written = file.write(tmp_path, header_of(config, 1, weights), state_tensors(weights), owner="test")
    now = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer_identity="bytes"))
    assert file.read_header(written, now).config == config
    assert file.difference(written, now) == ""
    assert allowed_changes(file.read_header(written, now).config, now) == {}


def test_a_full_disk_loses_nothing(written: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    before = written.read_bytes()
    weights = trained(cut(3), 1, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write(written.parent, header_of(cut(3), 1, weights), state_tensors(weights), owner="test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in written.parent.iterdir()] == [written.name], "no half of it is left"
    assert written.read_bytes() == before
