"""What --model may name, and which run begins with it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peers.shared.named_model import open_model
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_model import own_config
from swarm.config import RunConfig
from swarm.data import hub
from swarm.errors import Fatal, IntegrityError, PeerUnavailable
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source
from swarm.interchange.weights import Index
from swarm.model.stages import parameter_shapes
from tests.content.lines import FakeLine
from tests.content.test_weights import cache_of
from tests.interchange.small_models import save
from tests.support.chat_model import save_chat_model
from tests.support.tokenizers import write_tokenizer

WORDS = [f"word{number}" for number in range(90)]


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(" ".join(WORDS) * 2000)
    return str(tmp_path / "text.txt")


def _config(folder: Path | str, text: str, cache: Path, *, stages: int | None = None) -> RunConfig:
    options = PeerOptions(model=str(folder), dataset=(text,), stages=stages)
    config = own_config(options, None, cache, model=open_model(str(folder)))
    assert config is not None
    return config


def test_a_model_s_folder_begins_the_same_run_on_every_machine(tmp_path: Path, text: str) -> None:
    """It does not matter where the folder lies, nor where the cache is."""
    save("llama-3", tmp_path / "one" / "model", max_shard_size="50KB")
    write_tokenizer(tmp_path / "one" / "model" / "tokenizer.json", WORDS)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one = _config(tmp_path / "one" / "model", text, tmp_path / "cache 1", stages=3)
    two = _config(tmp_path / "two" / "model", text, tmp_path / "cache 2", stages=3)
    assert one.digest == two.digest
    assert (one.run, one.stages.num_stages, one.data.tokenizer) == ("model", 3, "served")
    assert (one.model.autocast, one.wire.dtype) == ("auto", "bf16")
    import_model(Source(tmp_path / "one" / "model"), tmp_path / "run", ImportOptions())
    assert _config(tmp_path / "run", text, tmp_path / "cache 1").model == one.model


def test_a_folder_is_read_once_and_again_when_it_has_changed(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save("llama-2", tmp_path / "model")
    before = _config(tmp_path / "model", text, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(Index, "of", None)
        assert _config(tmp_path / "model", text, tmp_path / "cache") == before
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    model.save_pretrained(tmp_path / "model")
    assert _config(tmp_path / "model", text, tmp_path / "cache").model.weights != before.model.weights


def test_a_name_is_looked_for_on_the_hub(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save("gpt2", tmp_path / "snapshot")
    monkeypatch.setattr(hub, "download", lambda name, patterns: tmp_path / "snapshot")
    monkeypatch.chdir(tmp_path)
    assert _config("me/mine", text, tmp_path / "cache").run == "me-mine"
    with pytest.raises(ValueError, match="/there/is/none: there is no such folder"):
        open_model("/there/is/none")


async def test_a_joiner_reads_the_tensors_of_its_stage_alone(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The joiner has the digests from a peer, and the tensors from its own copy."""
    save("llama-2", tmp_path / "model")
    config = _config(tmp_path / "model", text, tmp_path / "cache", stages=3)
    full = cache_of(tmp_path / "cache" / "weights" / config.model.weights, config, FakeLine())
    source, read = Source(tmp_path / "model"), set[str]()
    plain = source.tensors

    def tensors(names: set[str]) -> object:
        read.update(names)
        return plain(names)

    monkeypatch.setattr(source, "tensors", tensors)
    line = FakeLine(first=full.content)
    cache = cache_of(tmp_path / "joiner", config, line, source=source)
    shapes = parameter_shapes(config, 1)
    loaded = (await cache.of(shapes)).load(shapes)
    assert loaded.keys() == read == shapes.keys()
    assert line.num_sent["first"] == 1
    # Without such a peer, all of the model has to be read.
    alone = cache_of(tmp_path / "alone", config, FakeLine(), source=source)
    assert (await alone.of(shapes)).load(shapes).keys() == shapes.keys()
    assert read == set(source.shapes)


async def test_another_model_is_refused(tmp_path: Path, text: str) -> None:
    model = save("llama-2", tmp_path / "model")
    config = _config(tmp_path / "model", text, tmp_path / "cache")
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    model.save_pretrained(tmp_path / "other")
    shapes = parameter_shapes(config, 1)
    with pytest.raises(Fatal, match="is another model than the run begins with"):
        await cache_of(tmp_path / "a", config, FakeLine(), source=Source(tmp_path / "other")).of(shapes)
    full = cache_of(tmp_path / "cache" / "weights" / config.model.weights, config, FakeLine())
    cache = cache_of(tmp_path / "b", config, FakeLine(full=full.content), source=Source(tmp_path / "other"))
    with pytest.raises(IntegrityError, match=r"head.* does not match its digest"):
        (await cache.of(shapes)).load(shapes)
    with pytest.raises(PeerUnavailable):
        await cache_of(tmp_path / "c", dataclasses.replace(config), FakeLine()).of(shapes)


@pytest.mark.parametrize("value", [pytest.param(0.0, marks=pytest.mark.slow), "mean"])
def test_adapters_on_chat_tokens_that_were_never_trained_are_warned_of(
    value: float | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_chat_model(tmp_path / "model") / "model.safetensors"
    messages = [{"role": role, "content": "word1 word2"} for role in ("user", "assistant")]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 200)

    def begin(rank: int) -> str:
        caplog.clear()
        settings = ("data.format=chat", "data.sequence_length=16")
        talks = str(tmp_path / "talks.jsonl")
        options = PeerOptions(model=str(path.parent), lora_rank=rank, dataset=(talks,), set=settings)
        assert own_config(options, None, tmp_path / "cache", model=open_model(str(path.parent))) is not None
        return " ".join(message for message in caplog.messages if "trained" in message)

    assert not begin(rank=2)
    tensors = load_file(path)
    rows = tensors["model.embed_tokens.weight"]
    rows[1] = rows.mean(0) if value == "mean" else value
    save_file(tensors, path)
    warned = begin(rank=2)
    assert "'<|end|>'" in warned
    assert "<|user|>" not in warned
    assert not begin(rank=0)
