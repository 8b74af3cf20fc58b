"""What a trainer does between its steps, with a chain of real stages."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from rich.console import Console

from peers.trainer import session as sessions
from peers.trainer.options import TrainerOptions
from peers.trainer.report import Report
from peers.trainer.session import Session
from swarm.config import Timeline
from swarm.data.corpora import Corpus
from swarm.data.microbatches import HeldOut, HeldOutLoss, Microbatches, Texts
from swarm.data.tokenizers import ByteTokenizer
from swarm.errors import Fatal
from swarm.generation.engine import collect
from swarm.generation.sampling import Sampling
from swarm.hop import continuation
from swarm.machine.clock import SystemClock
from swarm.machine.words import printable
from swarm.metrics import MetricsLog, read
from swarm.pipeline.lease_service import LeaseClient
from swarm.pipeline.leased_work import LeasedWork
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.pipeline.train_loop import TrainLoop
from swarm.pipeline.trainer_paths import TrainerPaths
from swarm.stage import call
from swarm.stage.generation import SessionLimits
from swarm.training.samples import TOKENS
from swarm.types import Block
from tests.support.chain import SYNCHRONOUS, Chain, eventually, running_chain, tokens


class _HeldOut:
    def held_out(self, num_samples: int) -> list[dict[str, torch.Tensor]]:
        return [{TOKENS: tokens(SYNCHRONOUS, 99 + index)} for index in range(num_samples)]

    def held_out_by_source(self, num_samples: int) -> list[HeldOut]:
        batches = self.held_out(num_samples)
        books, code = batches[:1], batches[1:]
        return [HeldOut(name="books", batches=books, share=30.0), HeldOut(name="code", batches=code, share=10.0)]


def _session(chain: Chain, metrics: MetricsLog, folder: Path, *, steps: int = 1) -> Session:
    """A session as the program wires it, without what only training needs."""
    config = chain.config
    texts = Texts(cast(Microbatches, _HeldOut()), config.data)
    paths = TrainerPaths(config, SystemClock(), lambda block: [peer.record for peer in chain.at(block.stage)])
    watcher = RoundWatcher(
        run_id=config.run_id, blocks=paths.followed, synchronous=True, channels=chain.peers[0].channels,
        peers=lambda block: [peer.record for peer in chain.at(block.stage)],
    )  # fmt: skip
    report = Report(
        Timeline(config),
        steps=steps,
        output=folder,
        metrics=metrics,
        console=Console(quiet=True),
        clock=SystemClock(),
        remedy=lambda block: f"start one at {block}",
    )
    work = LeasedWork(
        config=config, paths=paths, leases=cast(LeaseClient, None), clock=SystemClock(), max_in_flight=1,
        on_waiting=report.waiting,
    )  # fmt: skip
    hops = {Block(0): chain.trainer}
    loop = TrainLoop(
        config=config, paths=paths, texts=texts, hops=hops, work=work, watcher=watcher, clock=SystemClock(),
        on_waiting=report.waiting,
    )  # fmt: skip
    options = TrainerOptions(initial_peers=("x",), evaluation_samples=2, sample_tokens=2)
    return Session(options, paths, texts, Timeline(config), hops, watcher, loop, report)


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_who_evaluates_says_that_a_stage_is_empty_and_goes_on_when_a_peer_comes(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call, "PROGRESS_SECONDS", 0.02)
    caplog.set_level(logging.WARNING)
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path)
            expected = await session.evaluate()
            assert not caplog.messages
            records = [peer.record for peer in chain.peers]
            chain.update([record for record in records if record.stage != stage])
            waiting = asyncio.ensure_future(session.evaluate())
            await eventually(lambda: bool(caplog.messages))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            (line,) = caplog.messages
            assert line == f"waiting: stage {stage} has no peer: start one at {stage}"
            chain.update(records)
            assert await waiting == expected
            assert caplog.messages == [line]


@pytest.mark.parametrize("stage", [0, 1])
async def test_of_peers_that_are_there_and_fail_it_is_not_said_that_there_are_none(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call, "PROGRESS_SECONDS", 0.02)
    caplog.set_level(logging.WARNING)
    async with running_chain(SYNCHRONOUS, num_peers=[2, 2, 1]) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path)
            for peer in chain.at(stage):
                await peer.server.stop(0)
            waiting = asyncio.ensure_future(session.evaluate())
            await eventually(lambda: bool(caplog.messages))
            await asyncio.sleep(0.2)
            waiting.cancel()
            await asyncio.wait([waiting])
    (line,) = caplog.messages
    assert line.startswith(f"waiting: both peers of stage {stage} failed just now (")
    assert ", tried again in " in line
    assert all(peer.record.endpoint in line for peer in chain.at(stage))
    assert "start one" not in line


@pytest.mark.parametrize(("evaluate_every", "expects_loss"), [(10, True), (0, False)])
async def test_the_held_out_loss_before_the_first_step_is_told_and_written_down(
    evaluate_every: int, expects_loss: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    evaluated = list[float]()

    async def no_step(*_: object) -> None:
        """Training begins when the loss is known."""
        assert ("validation" in caplog.text) == expects_loss
        evaluated.append(session.report.figures.validation_loss or 0.0)

    caplog.set_level(logging.INFO)
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path)
            session.options = dataclasses.replace(session.options, evaluate_every=evaluate_every, sample_tokens=0)
            monkeypatch.setattr(session.loop, "run", no_step)
            await session.train()
    found = session.report.figures.first_validation_loss
    assert evaluated == [found or 0.0]
    assert (found is not None) == expects_loss
    rows = [row["val/loss"] for row in read(tmp_path / "metrics.jsonl") if "val/loss" in row]
    assert rows == pytest.approx([session.report.figures.validation_loss] * (2 if expects_loss else 1))


async def test_who_only_evaluates_writes_down_the_present_round_s_loss_and_feeds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path, steps=0)
            expected = await session.evaluate()
            await session.only_evaluate()
            assert expected is not None
            assert chain.counts("forwards") == [0, 0, 0]
    books, code = expected.by_source["books"], expected.by_source["code"]
    assert books != code
    assert expected.mean == pytest.approx(0.75 * books + 0.25 * code)
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line == {"step": 0, "val/loss": expected.mean, "val/loss/books": books, "val/loss/code": code}
    session.report.goodbye(interrupted=False)
    assert capsys.readouterr().out.splitlines() == [
        f"step 0: validation loss {expected.mean:.4f}; figures in {tmp_path}",
        f"  books  {books:.4f}",
        f"  code   {code:.4f}",
    ]
    ((name, write),) = session.report.files(cast(Corpus, None), interrupted=False).items()
    write(tmp_path / name)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {
        "step": 0,
        "validation_loss": expected.mean,
        "validation_losses": expected.by_source,
    }
    assert session.sample


async def test_who_only_evaluates_and_cannot_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def held_out_loss(*_: object, **__: object) -> float:
        raise Fatal("no chain")

    monkeypatch.setattr(sessions, "held_out_loss", held_out_loss)
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path, steps=0)
            with pytest.raises(Fatal, match="could not be evaluated"):
                await session.only_evaluate()
    session.report.goodbye(interrupted=True)
    assert session.report.files(cast(Corpus, None), interrupted=True) == {}
    assert (tmp_path / "metrics.jsonl").read_text() == ""


async def test_an_evaluation_that_takes_long_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def held_out_loss(*_: object, evaluated: Callable[[int, int], None], **__: object) -> HeldOutLoss:
        session.waits.look(10.0)
        evaluated(3, 12)
        session.waits.look(16.0)
        return HeldOutLoss(mean=1.0, by_source={})

    monkeypatch.setattr(sessions, "held_out_loss", held_out_loss)
    caplog.set_level(logging.INFO)
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path)
            await session.evaluate()
    expected = "waiting for the loss on held-out text: 3 of 12 parts are done, 18 s left, 6 s so far"
    assert caplog.messages[-1] == expected


def _text_of(sample: str) -> str:
    return sample.partition("--- the swarm goes on ---\n")[2].removesuffix("\n---")


async def test_a_sample_is_as_long_as_it_was_asked_for_and_what_the_swarm_writes_for_anybody(tmp_path: Path) -> None:
    """If a sequence reaches its greatest length, a new one begins with its second half."""
    half = SYNCHRONOUS.data.sequence_length // 2
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            session = _session(chain, metrics, tmp_path)
            session.options = dataclasses.replace(session.options, sample_tokens=half + 3)
            sample = await session.write_sample()
        engine = SwarmEngine(chain.trainer, SYNCHRONOUS)
        tokens = (await session.text()).held_out(1)[0][TOKENS][0, :-1].tolist()[-half:]
        sampling = Sampling(temperature=sessions.TEMPERATURE, seed=SYNCHRONOUS.data.seed)
        for count in (half, 3):
            tokens += await collect(engine, tokens[-half:], sampling, count)
    expected = ByteTokenizer().decode(tokens[half:])
    assert _text_of(sample) == printable(expected, keep="\n\t")


async def test_without_a_sample_a_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(continuation, "PATIENCE_SECONDS", 0.1)
    async with running_chain(SYNCHRONOUS, session_limits=SessionLimits(max_sessions=0)) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            assert await _session(chain, metrics, tmp_path).write_sample() == ""
    assert caplog.messages[-1] == "no sample of text: this peer takes no sessions"


async def test_what_strangers_have_the_swarm_write_is_no_command_to_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def collect(_: object, prompt: list[int], *__: object) -> list[int]:
        return list(b"a\x1b[2J\tb\nc")

    monkeypatch.setattr(sessions, "collect", collect)
    async with running_chain(SYNCHRONOUS) as chain:
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics:
            sample = await _session(chain, metrics, tmp_path).write_sample()
    assert _text_of(sample) == "a [2J\tb\nc"
