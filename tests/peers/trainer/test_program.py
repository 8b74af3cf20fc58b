"""What a trainer does between its steps and at the end, with a chain of real stages."""

import asyncio
import dataclasses
import logging
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_config import own_config
from peers.trainer import program as trainer
from peers.trainer.options import TrainerOptions
from peers.trainer.program import Session, finish, open_corpus
from peers.trainer.report import Report
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.data import tokenizers
from swarm.data.corpora import Corpus
from swarm.data.microbatches import Microbatches
from swarm.dht.directory import Directory
from swarm.errors import CorpusMismatch
from swarm.machine.clock import SystemClock
from swarm.metrics.log import MetricsLog
from swarm.metrics.wandb_run import WandbRun
from swarm.pipeline.lease_service import LeaseClient
from swarm.pipeline.leased_work import LeasedWork
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.train_loop import TrainLoop
from swarm.stage import servicer
from tests.support.chain import SYNCHRONOUS, Chain, eventually, running_chain, tokens
from tests.support.tokenizers import write_tokenizer


class _HeldOut:
    """A few held-out microbatches."""

    def held_out(self, num_samples: int) -> list[npt.NDArray[np.int32]]:
        return [tokens(SYNCHRONOUS, 99 + index).numpy() for index in range(num_samples)]


def _session(chain: Chain, metrics: MetricsLog, folder: Path) -> Session:
    """As the program wires it, but for what only training needs."""
    config, data = chain.config, cast(Microbatches, _HeldOut())
    watcher = RoundWatcher(
        run_id=config.run_id, num_stages=3, synchronous=True, channels=chain.peers[0].channels,
        peers=lambda stage: [peer.record for peer in chain.at(stage)],
    )  # fmt: skip
    report = Report(
        config, steps=1, output=folder, metrics=metrics, console=Console(quiet=True), why_silent=watcher.why_silent
    )
    work = LeasedWork(
        config=config, leases=cast(LeaseClient, None), clock=SystemClock(), max_in_flight=1, on_waiting=report.waiting
    )
    loop = TrainLoop(
        config=config, data=data, hop=chain.trainer, work=work, watcher=watcher, clock=SystemClock(),
        on_waiting=report.waiting,
    )  # fmt: skip
    options = TrainerOptions(initial_peers=("x",), evaluation_samples=2, sample_tokens=2)
    return Session(
        options, config, data, chain.trainer, watcher, cast(Directory, None), generate(), loop, report
    )  # fmt: skip


@pytest.mark.parametrize("work", [Session.evaluate, Session.write_sample])
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_who_evaluates_says_that_a_stage_is_empty_and_goes_on_when_a_peer_comes(
    work: Callable[[Session], Awaitable[Any]], stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(servicer, "PROGRESS_SECONDS", 0.02)
    caplog.set_level(logging.WARNING)
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path)
            expected = await work(session)
            assert not caplog.messages
            records = [peer.record for peer in chain.peers]
            chain.update([record for record in records if record.stage != stage])
            waiting = asyncio.ensure_future(work(session))
            await eventually(lambda: bool(caplog.messages))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            (line,) = caplog.messages
            assert re.match(f"waiting: stage {stage} has no peer; start one with swarm-peer --stage {stage}", line)
            chain.update(records)
            assert await waiting == expected
            assert caplog.messages == [line]


def test_a_run_that_names_a_file_and_no_digest_does_not_have_it_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("one line, and then another\n" * 100)
    config = dataclasses.replace(
        SYNCHRONOUS, data=dataclasses.replace(SYNCHRONOUS.data, dataset=str(secret), digest="")
    )
    with pytest.raises(ValueError, match="does not say which text it is trained on: name yours with --dataset"):
        open_corpus(config, None)


def _run_with_a_tokenizer(folder: Path) -> RunConfig:
    """A run whose first peer had its text and its tokenizer in a folder of its own, as it is published."""
    (folder / "text.txt").write_text("the bees trained all day. " * 6000)
    tokenizer = write_tokenizer(folder / "first" / "tokenizer.json", ["the", "bees", "trained"])
    options = PeerOptions(preset="tiny", dataset=str(folder / "text.txt"), tokenizer=tokenizer)
    config = own_config(options, None, folder / "cache")
    assert config is not None
    return config


def test_the_tokenizer_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = _run_with_a_tokenizer(tmp_path)
    copy = (tmp_path / "first").rename(tmp_path / "second") / "tokenizer.json"
    with pytest.raises(ValueError, match=r"cannot read data.tokenizer .*No such file.*; give --tokenizer"):
        open_corpus(config, None)
    corpus, data = open_corpus(config, None, str(copy))
    assert corpus.digest == config.data.digest
    assert data.held_out(1)[0].max() == 3


def test_another_tokenizer_is_told_by_its_digest_and_not_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the text prepared with it: it need not be there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = _run_with_a_tokenizer(tmp_path)
    (tmp_path / "text.txt").unlink()
    larger = write_tokenizer(tmp_path / "larger.json", [f"word{number}" for number in range(1000)])
    ours, theirs = tokenizers.load(larger).identity[:12], config.data.tokenizer_identity[:12]
    told = f"is another tokenizer here ({ours}) than in the run ({theirs}); copy the run's"
    with pytest.raises(CorpusMismatch, match=re.escape(told)) as caught:
        open_corpus(config, None, larger)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        CorpusMismatch, match=re.escape(f"is another tokenizer here (bytes) than in the run ({theirs})")
    ):
        open_corpus(config, None, "bytes")


async def test_what_strangers_have_the_swarm_write_is_no_command_to_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate_text(*_: object, **__: object) -> list[int]:
        return list(b"a\x1b[2J\tb\nc")

    monkeypatch.setattr(trainer, "generate_text", generate_text)
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            sample = await _session(chain, metrics, tmp_path).write_sample()
    assert sample.endswith("--- the swarm goes on ---\na [2J\tb\nc\n---")


class _Wandb:
    """Has something to upload."""

    def finish(self, *, timeout_seconds: float) -> str:
        return "wandb sync x"


@pytest.mark.parametrize(
    ("stuck", "interrupted", "exit_code"),
    [((), False, 0), ((), True, 130), (("summary.json",), False, 1), (("loss.png", "sample.txt"), False, 1)],
)
async def test_a_file_that_cannot_be_written_at_the_end_costs_nothing_else(
    stuck: tuple[str, ...], interrupted: bool, exit_code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    corpus = Corpus(
        tokens=np.arange(9, dtype=np.uint16) % 3, num_training_tokens=6, vocab_size=3, digest="", tokenizer_identity=""
    )
    for name in stuck:
        (tmp_path / name).mkdir()
    sample = "" if interrupted else "it goes on"
    with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
        report = Report(SYNCHRONOUS, steps=1, output=tmp_path, metrics=metrics, console=Console(quiet=True))
        wandb_run = cast(WandbRun, _Wandb())
        assert await finish(report, tmp_path, corpus, sample, wandb_run, interrupted=interrupted) == exit_code
    assert caplog.messages == [f"{tmp_path / name} is not written: Is a directory" for name in stuck]
    _, *told = capsys.readouterr().out.splitlines()
    assert told == [*([sample] if sample else []), "To upload this run to Weights & Biases: wandb sync x"]
    expected = {"metrics.jsonl", "loss.png"} | (set() if interrupted else {"summary.json", "sample.txt"})
    assert {name for name in os.listdir(tmp_path) if name not in stuck} == expected - set(stuck)
