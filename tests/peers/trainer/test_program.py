"""Which text a trainer takes, and what it writes at the end."""

import asyncio
import dataclasses
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from rich.console import Console

from peers.shared import cli
from peers.shared.network import KnownPeers, Membership
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_model import own_config
from peers.trainer import program
from peers.trainer.options import TrainerOptions
from peers.trainer.program import finish, open_later_texts, open_text, paths_of, rerouting_of
from peers.trainer.report import Report
from swarm import config as configs
from swarm.config import Amendment, RunConfig, StagesConfig, Timeline
from swarm.data import tokenizers
from swarm.data.microbatches import Microbatches, Texts
from swarm.data.path_router import PathRouter, hashed
from swarm.errors import CorpusMismatch
from swarm.machine.clock import SystemClock
from swarm.metrics import MetricsLog, Reporter
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.routing.router import Router
from swarm.training.samples import TOKENS
from tests.data.texts import Rows, end_of_preparation
from tests.support import locked
from tests.support.chain import SYNCHRONOUS, eventually
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.text_corpus import text_corpus
from tests.support.tokenizers import write_tokenizer


def test_a_missing_extra_is_told_before_the_run_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "find_entrance", lambda *arguments, **options: pytest.fail("it went on"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *arguments: None)
    with pytest.raises(ValueError, match=r"^--tensorboard needs an extra; .*'\.\[tensorboard\]'$"):
        program.main(["--initial-peers", "x", "--tensorboard", str(tmp_path / "board")])


def _options(*more: str) -> TrainerOptions:
    return cli.parse(TrainerOptions, prog="swarm-trainer", argv=["--initial-peers", "192.0.2.1:5001", *more])


def test_a_trainer_feeds_the_paths_that_are_named_or_all() -> None:
    stages = dataclasses.replace(SYNCHRONOUS.stages, variants=(1, 2, 2))
    config, known = dataclasses.replace(SYNCHRONOUS, stages=stages), KnownPeers(cast(Router, None))
    member = cast(Membership, SimpleNamespace(config=config, clock=ManualClock(), known=known))
    assert paths_of(_options(), member).paths == (0, 1, 2, 3)
    assert paths_of(_options("--paths", "2,0,2"), member).paths == (0, 2)
    with pytest.raises(ValueError, match=r"^--paths 1,4: there is no path 4: this run has the paths 0 to 3$"):
        paths_of(_options("--paths", "4,1"), member)


def test_a_run_that_names_a_file_and_no_digest_does_not_have_it_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("one line, and then another\n" * 100)
    config = dataclasses.replace(
        SYNCHRONOUS, data=dataclasses.replace(SYNCHRONOUS.data, dataset=str(secret), digest="")
    )
    with pytest.raises(ValueError, match="does not say which text it is trained on: name yours with --dataset"):
        open_text(config, ())


@pytest.mark.parametrize("option", ["--dataset", "--validation"])
def test_a_class_that_the_run_names_is_not_imported_unless_our_user_names_it(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a text " * 9000)
    (tmp_path / "their_rows.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"
        "class Rows:\n    def __iter__(self):\n        return iter(['some text of theirs ' * 9000])\n"
    )
    monkeypatch.delitem(sys.modules, "their_rows", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    name, text = "class:their_rows:Rows", str(tmp_path / "text.txt")
    texts = {"dataset": name} if option == "--dataset" else {"dataset": text, "validation": name}
    config = configs.load_preset("tiny")
    data = dataclasses.replace(config.data, digest="ab" * 32, **texts)  # type: ignore[arg-type]
    config = dataclasses.replace(config, data=data)
    told = f"if you trust that code, add {option} {name}"
    with pytest.raises(ValueError, match=f"^this run would have this machine import and run '{name}'.*: {told}$"):
        open_text(config, (text,) if option == "--validation" else ())
    assert not (tmp_path / "imported").exists()
    given = {"datasets": (name,)} if option == "--dataset" else {"datasets": (text,), "validation": name}
    with pytest.raises(CorpusMismatch, match="is different text here"):
        open_text(config, **given)
    assert (tmp_path / "imported").exists()


def _run_with_a_tokenizer(folder: Path) -> RunConfig:
    """A run whose first peer had its text and its tokenizer in a folder of its own, as it is published."""
    (folder / "text.txt").write_text("the bees trained all day. " * 6000)
    tokenizer = write_tokenizer(folder / "first" / "tokenizer.json", ["the", "bees", "trained"])
    options = PeerOptions(preset="tiny", dataset=(str(folder / "text.txt"),), tokenizer=tokenizer)
    config = own_config(options, None, folder / "cache")
    assert config is not None
    return config


def test_the_tokenizer_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = _run_with_a_tokenizer(tmp_path)
    copy = (tmp_path / "first").rename(tmp_path / "second") / "tokenizer.json"
    with pytest.raises(ValueError, match="the run's tokenizer is not on this machine: name a copy with --tokenizer"):
        open_text(config, ())
    data = open_text(config, (), str(copy))
    assert data.corpus.digest == config.data.digest
    assert data.held_out(1)[0][TOKENS].max() == 3


def test_a_text_for_validation_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in (("text.txt", "the bees trained all day. " * 6000), ("own.txt", "the bees slept. " * 90)):
        (tmp_path / name).write_text(text)
    options = PeerOptions(preset="tiny", dataset=(str(tmp_path / "text.txt"),), validation=str(tmp_path / "own.txt"))
    config = own_config(options, None, tmp_path / "cache")
    assert config is not None
    copy = (tmp_path / "own.txt").rename(tmp_path / "copy.txt")
    with pytest.raises(ValueError, match=r"^data\.validation '[^']*own\.txt' does not exist"):
        open_text(config, ())
    assert open_text(config, (), validation=str(copy)).corpus.digest == config.data.digest
    whole = dataclasses.replace(config, data=dataclasses.replace(config.data, validation="", digest=""))
    with pytest.raises(ValueError, match="the run holds out a part of its own: leave it out"):
        open_text(whole, (str(tmp_path / "text.txt"),), validation=str(copy))


def test_a_trainer_of_some_paths_reads_and_checks_their_texts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [tmp_path / f"{kind}.txt" for kind in ("bees", "ants", "wasps")]
    for text in texts:
        text.write_text(f"the {text.stem} trained all day. " * 6000)
    settings = (f"data.paths={[*map(str, texts)]}", "stages.num_stages=1", "stages.variants=[3]")
    config = own_config(
        PeerOptions(preset="tiny", set=(*settings, "rounds.round_samples=96")), None, tmp_path / "first"
    )
    assert config is not None
    whole = open_text(config, ())
    texts[0].unlink()
    with pytest.raises(ValueError, match=r"bees\.txt' does not exist"):
        open_text(config, ())
    some = open_text(config, (), paths=(1, 2))
    assert [some.tokens(index).tolist() for index in (1, 2, 4)] == [whole.tokens(index).tolist() for index in (1, 2, 4)]
    copies = (str(texts[2].rename(tmp_path / "copy.txt")), str(texts[1]))
    elsewhere = open_text(config, copies, paths=(1, 2))
    assert elsewhere.tokens(5).tolist() == whole.tokens(5).tolist()
    with pytest.raises(
        ValueError, match=r"names 2 datasets, and the run has ants\.txt for these paths: name all of them"
    ):
        open_text(config, copies, paths=(1,))
    texts[1].write_text("other ants. " * 6000)
    with pytest.raises(CorpusMismatch, match=r"'[^']*ants\.txt' is different text here"):
        open_text(config, (), paths=(1,))


def test_a_router_that_is_not_for_the_run_is_one_line(tmp_path: Path) -> None:
    PathRouter(weights_PF=torch.zeros(2, len(hashed([0]))), biases_P=torch.zeros(2), tokenizer="bytes").write(tmp_path)
    options = TrainerOptions(initial_peers=("x",), router=tmp_path, reroute_every=32)
    config = configs.load_preset("tiny")
    with pytest.raises(ValueError, match="the router chooses among 2 paths, and the run has 1"):
        rerouting_of(options, config)
    paths = dataclasses.replace(config, stages=StagesConfig(num_stages=3, variants=(1, 2, 1)))
    assert rerouting_of(options, paths) is not None
    every = paths.data.sequence_length
    with pytest.raises(ValueError, match=f"--reroute-every {every}: samples of this run have {every} tokens"):
        rerouting_of(dataclasses.replace(options, reroute_every=every), paths)
    with pytest.raises(ValueError, match="--router DIR and --reroute-every N go together"):
        TrainerOptions(initial_peers=("x",), router=tmp_path)


def test_a_run_on_a_dataset_that_streams_is_begun_and_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Rows([{"text": f"story {number:03} " * 99} for number in range(500)]).install(monkeypatch)
    options = PeerOptions(preset="tiny", dataset=("hf:stories",), set=("data.part_rows=60",))
    config = own_config(options, None, tmp_path / "first")
    assert config is not None
    data = open_text(config, ())
    told = set[str]()
    for index in range(2 * data.num_windows // config.data.microbatch_size + 1):
        told |= set(bytes(data.tokens(index).ravel().tolist()).decode().split())
    end_of_preparation()
    assert {"000", "001", "060", "061", "120"} & told == {"001", "060", "061", "120"}, "the first row is held out"
    with pytest.raises(ValueError, match=r"^--set: data\.part_rows is for Hugging Face datasets"):
        own_config(dataclasses.replace(options, dataset=(str(tmp_path),)), None, tmp_path / "first")


def test_another_tokenizer_is_told_by_its_digest_and_not_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is not prepared with it either, and need not be there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = _run_with_a_tokenizer(tmp_path)
    (tmp_path / "text.txt").unlink()
    larger = write_tokenizer(tmp_path / "larger.json", [f"word{number}" for number in range(1000)])
    ours, theirs = tokenizers.load(larger).identity[:12], config.data.tokenizer_identity[:12]
    told = f"is another tokenizer here ({ours}) than in the run ({theirs}); leave --tokenizer out"
    with pytest.raises(CorpusMismatch, match=re.escape(told)) as caught:
        open_text(config, (), larger)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        CorpusMismatch, match=re.escape(f"is another tokenizer here (bytes) than in the run ({theirs})")
    ):
        open_text(config, (), "bytes")


class _Reporter:
    """A stand-in for one that has something to say at its end."""

    def close(self, timeout_seconds: float) -> bool:
        sys.stdout.write("to upload it: wandb sync x\n")
        return True


@pytest.mark.parametrize(
    ("stuck", "told", "exit_code"),
    [((), 0, 0), ((), 130, 130), (("summary.json",), 0, 1), (("loss.png", "sample.txt"), 0, 1)],
)
async def test_a_file_that_cannot_be_written_at_the_end_costs_nothing_else(
    stuck: tuple[str, ...], told: int, exit_code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    corpus = text_corpus((np.arange(9, dtype=np.uint16) % 3, 6), vocab_size=3)
    for name in stuck:
        (tmp_path / name).mkdir()
    sample = "" if told else "it\x1bgoes\ton"
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        report = Report(
            Timeline(SYNCHRONOUS), steps=1, output=tmp_path, metrics=metrics, console=Console(quiet=True),
            clock=ManualClock(), remedy=str,
        )  # fmt: skip
        reporters = [cast(Reporter, _Reporter())]
        assert await finish(report, tmp_path, corpus, sample, reporters, exit_code=told) == exit_code
    assert caplog.messages == [f"{tmp_path / name} is not written: Is a directory" for name in stuck]
    _, *said = capsys.readouterr().out.splitlines()
    assert said == [*(["it goes\ton"] if sample else []), "to upload it: wandb sync x"]
    expected = {"metrics.jsonl", "loss.png"} | (set() if told else {"summary.json", "sample.txt"})
    assert {name for name in os.listdir(tmp_path) if name not in stuck} == expected - set(stuck)


async def test_a_trainer_that_lacks_the_next_text_says_so_before_its_round(caplog: pytest.LogCaptureFixture) -> None:
    clock, config = SystemClock(), dataclasses.replace(SYNCHRONOUS, owner=locked.OWNER.authority.fingerprint)
    member = Membership.enter(config, MemoryStore(clock), locked.TRAINER, clock, insecure=False)
    for number, digest in ((2, "a"), (5, "b")):
        settings = [f"data.digest={64 * digest}", "data.dataset=book.txt"]
        amendment = Amendment.sign(locked.OWNER, member.timeline, number, settings)
        member.timeline.add([*member.timeline.texts, amendment.text])

    def open_text(_: configs.DataConfig) -> Microbatches:
        raise ValueError("no such file")

    texts = Texts(cast(Microbatches, None), config.data, open_text)
    watcher = cast(RoundWatcher, SimpleNamespace(known_round=3))
    opening = asyncio.create_task(open_later_texts(member, texts, watcher))
    await eventually(lambda: "ends then" in caplog.text)
    opening.cancel()
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    lacks = (
        "the run goes on with another text, book.txt, which is not here: no such file; unless it is there at round 5"
    )
    assert said.startswith(lacks)
