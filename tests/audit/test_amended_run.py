"""A run that is amended while it trains, with a joiner and a kill at the round of the change: real peers against one
process that changes at the same step, and an audit of what they did."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from peers.shared import network
from swarm.audit import history
from swarm.audit.audit import audit
from swarm.config import Amendment, DataConfig, OptimizerConfig, RunConfig, StagesConfig, Timeline
from swarm.config.schedule import learning_rate
from swarm.credentials.identity import generate
from swarm.data.microbatches import Microbatches
from swarm.dht import keys
from swarm.dht.records import seal
from swarm.events import Commit
from swarm.types import AmendmentsRecord, Block
from tests.audit.honest import Lines, edit
from tests.support import locked
from tests.support.chain import DILOCO, SYNCHRONOUS, eventually
from tests.support.locked import OWNER
from tests.support.rounding import RoundingModel
from tests.support.text_corpus import text_corpus
from tests.support.whole_swarm import CLOCK, WholeSwarm, whole_swarm

STEPS = 6
SETTINGS = (
    (2, "optimizer.learning_rate=3e-3"), (3, "averaging.codec=fp16"), (3, "wire.dtype=bf16"),
    (4, "data.weights=[1, 5]"), (5, f"data.digest={64 * 'b'}"),
)  # fmt: skip
"""The round from which each amendment is in force."""
SIZES = {"synchronous": ((4, 8), (5, 32)), "diloco": ((4, 32),)}
"""Others: from which round a round has how many samples."""


def _locked(config: RunConfig) -> RunConfig:
    optimizer = OptimizerConfig(
        name="adamw", learning_rate=0.01, warmup_samples=0, weight_decay=0.0, clip_norm=0.5, schedule="constant"
    )
    return dataclasses.replace(
        config, stages=StagesConfig(num_stages=2), optimizer=optimizer, owner=OWNER.authority.fingerprint,
        data=dataclasses.replace(config.data, dataset=("a", "b")),
    )  # fmt: skip


def _data(config: RunConfig) -> Microbatches:
    """Two texts without a token in common, which depend on the digest."""
    rng, length = np.random.default_rng(len(config.data.digest)), 300 * config.data.sequence_length + 1
    texts = [(rng.integers(first, first + 32, size=length, dtype=np.uint16), length - 33) for first in (0, 32)]
    return Microbatches(text_corpus(*texts, vocab_size=64), config.data)


def _later(config: RunConfig) -> Callable[[DataConfig], Microbatches]:
    return lambda data: _data(dataclasses.replace(config, data=data))


def _amended(config: RunConfig) -> Timeline:
    timeline = Timeline(config)
    sizes = [(number, f"rounds.round_samples={samples}") for number, samples in SIZES[config.rounds.setting]]
    for number, setting in sorted([*SETTINGS, *sizes]):
        timeline.add([*timeline.texts, Amendment.sign(OWNER, timeline, number, [setting]).text])
    return timeline


def _reference(timeline: Timeline, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the parameters of one process, which takes its rate from the timeline."""
    config = timeline.config
    model, given, end = RoundingModel(config), config.optimizer, 0
    parameters: dict[str, torch.Tensor] = {}
    for stage in model.stages:
        parameters |= stage.named_parameters()
    adamw = torch.optim.AdamW(
        parameters.values(), betas=(given.beta1, given.beta2), eps=given.epsilon, weight_decay=0.0
    )  # fmt: skip
    losses = []
    for step in range(steps):
        model.config = now = timeline.at(step)
        first, end = end, end + now.microbatches_per_round
        batch = torch.cat([torch.from_numpy(_data(now).tokens(i)).long() for i in range(first, end)])
        loss = model.loss(batch, None)
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(parameters.values(), given.clip_norm)
        adamw.param_groups[0]["lr"] = learning_rate(now.gradient_step, first * config.data.microbatch_size)
        adamw.step()
        adamw.zero_grad()
    return losses, parameters


def _say(swarm: WholeSwarm, timeline: Timeline) -> Awaitable[bool]:
    """Announce amendments, as `swarm-keys amend` does."""
    owner = locked.issue().admit(generate())
    record = AmendmentsRecord(peer_id=owner.peer_id, announced_at=CLOCK.time(), amendments=timeline.texts)
    key, until = keys.of_amendments(timeline.config.run_id), CLOCK.time() + 100.0
    return swarm.store.store(key, owner.peer_id, seal(owner, key, record, until), until)


@pytest.mark.slow
async def test_a_run_goes_on_without_a_peer_whose_token_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shut out at once, though the amendment's round never comes. Another peer is killed, and one joins."""
    monkeypatch.setattr(network, "AMENDMENTS_SECONDS", 0.1)
    config, theirs = _locked(SYNCHRONOUS), locked.issue()
    timeline = Timeline(config)
    timeline.add([Amendment.sign(OWNER, timeline, 900, [f"revoked=['{theirs.token_id}']"]).text])
    async with whole_swarm(config, tmp_path / "events", num_peers=(1, 2), token=locked.issue()) as swarm:
        shut_out, killed = await swarm.start(0, token=theirs), swarm.peers[2]
        training = asyncio.create_task(swarm.train(STEPS, data=_data(config)))
        block = shut_out.servers[Block(0)]
        await eventually(lambda: block.stage.round >= 2)
        assert await _say(swarm, timeline)
        honest = [peer for peer in swarm.peers if peer is not shut_out]
        await eventually(lambda: all(next(iter(each.servers.values())).member.timeline.texts for each in honest))
        await killed.kill()
        joiner = await swarm.start(1)
        steps = await training
        last = block.stage.round
    assert [step.totals.loss for step in steps] == pytest.approx(_reference(Timeline(config), STEPS)[0], abs=1e-4)
    assert joiner.servers[Block(1)].member.timeline.texts == timeline.texts
    assert last < STEPS
    assert shut_out.peer_id not in {peer for event in _commits(swarm) if event.round > last for peer in event.members}
    assert audit(swarm.logs).proven


def _commits(swarm: WholeSwarm) -> Iterator[Commit]:
    for log in swarm.logs:
        yield from (line.event for line in history.read(log) if isinstance(line.event, Commit))


@pytest.mark.parametrize(
    "config", [pytest.param(SYNCHRONOUS, id="synchronous"), pytest.param(DILOCO, id="diloco", marks=pytest.mark.slow)]
)
async def test_a_run_that_is_amended_trains_as_one_process_that_changes_at_the_same_step(
    config: RunConfig, tmp_path: Path
) -> None:
    config = _locked(config)
    timeline = _amended(config)
    async with whole_swarm(config, tmp_path / "events", num_peers=(2, 2)) as swarm:
        victim, changing = swarm.peers[1], SETTINGS[0][0]
        training = asyncio.create_task(
            swarm.train(STEPS, data=_data(config), amendments=timeline.texts, later=_later(config))
        )
        # One peer hears of the amendments, with DiLoCo one of each stage, and the others have them from it.
        for peer in swarm.peers[2:3] if config.rounds.synchronous else swarm.peers[::2]:
            peer.servers[Block(peer.stage)].member.timeline.add(timeline.texts)
        await eventually(lambda: victim.servers[Block(0)].stage.round >= changing)
        await victim.kill()
        joiner = await swarm.start(0)
        steps = await training
        living = [peer for peer in swarm.peers if peer is not victim]
        members = [served.member for peer in living for served in peer.servers.values()]
        await eventually(lambda: all(member.progress().round >= STEPS for member in members))
        trained = {
            name: master.detach().clone()
            for peer in living
            for served in peer.servers.values()
            for name, master in served.stage.context.backend.weights.masters.items()
        }
    assert [member.timeline.texts for member in members] == [timeline.texts] * len(members)
    for number in range(SETTINGS[1][0], STEPS):
        events = [event for event in _commits(swarm) if event.round == number]
        assert {event.amended for event in events} == {timeline.digest_at(number)}
        # Rounds end early where samples were lost with a peer.
        size = timeline.at(number).rounds.round_samples
        assert all(event.samples == size for event in events if config.rounds.synchronous)
        assert config.rounds.synchronous or all(event.samples >= size for event in events if event.round > 4)
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert (report.findings.duplicates, report.findings.missing, report.findings.digests_differing) == (0, 0, 0)
    if config.rounds.synchronous:
        assert joiner.servers[Block(0)].member.reports[-1].round == STEPS - 1
        losses, parameters = _reference(timeline, STEPS)
        assert [step.totals.loss for step in steps] == pytest.approx(losses, abs=1e-4)
        for name, parameter in parameters.items():
            torch.testing.assert_close(trained[name], parameter.detach(), rtol=0.0, atol=1e-4)
        rates = [step.report.learning_rate for step in steps if step.report is not None]
        assert rates == [pytest.approx(0.01)] * 2 + [pytest.approx(3e-3)] * (STEPS - 2)

        def otherwise(lines: Lines) -> None:
            next(line for line in lines if line["event"] == "commit")["amended"] = timeline.last

        edit(next(path for path in swarm.logs if "peer-1" in path.name), otherwise)
        assert not audit(swarm.logs).proven
