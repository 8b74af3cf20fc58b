"""A newcomer behind a slow line does not slow a synchronous run: it stays out until its line is better."""

import asyncio
import dataclasses
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm.averaging.agreement.pace import LEAST_REST_SECONDS, Entry
from swarm.config import RunConfig
from swarm.training.round_member import Activity
from swarm.types import Block, PeerRecord, PeerState
from tests.averaging.doubles import QUICK, Network, Peer, record, until
from tests.averaging.fake_stage import MICROBATCH, FakeStage, make_config
from tests.support.virtual_time import in_virtual_time

ROUND_MICROBATCHES = 4
ROUND_SAMPLES = ROUND_MICROBATCHES * MICROBATCH


class SizedStage(FakeStage):
    """A stage of which the test sets the size of the parameters."""

    def __init__(self, lineage: str = "00", *, num_bytes: int = 68) -> None:
        super().__init__(lineage)
        self.num_bytes = num_bytes

    def activity(self) -> Activity:
        return Activity(quiet_seconds=0.0, longest_seconds=0.0, num_bytes=self.num_bytes)


class SlowLine(Network):
    """A stage of two peers, 2 and 3, whose rounds take half a second, and newcomer 1, which is behind a slow line."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config, SizedStage)
        # Nothing here happens faster than within seconds, so that peers need not report as often as elsewhere.
        self.timing = dataclasses.replace(
            QUICK, silence_seconds=60.0, average_seconds=60.0, heartbeat_seconds=0.2, late_seconds=1.2,
            report_seconds=1.2, fresh_seconds=1.6, takeover_seconds=1.6,
        )  # fmt: skip
        self._announced: dict[str, PeerRecord] = {}
        self.line_seconds = 8.0
        """The time that any message with tensors takes to the newcomer or from it."""
        self.before = self._before
        self.members = [self.add(number).stage for number in (2, 3)]

    def directory(self, block: Block) -> list[PeerRecord]:
        rate = 2.0 * ROUND_SAMPLES / len(self.peers)
        for each in super().directory(block):
            said = self._announced.get(each.peer_id)
            if said is None or (said.samples_per_second, said.round, said.lineage) != (rate, each.round, each.lineage):
                self._announced[each.peer_id] = each.model_copy(update={"samples_per_second": rate})
        return list(self._announced.values())

    async def _before(self, name: str, source: int, target: int) -> None:
        if 1 in (source, target) and source != target and name in ("Download", "Exchange"):
            await asyncio.sleep(self.line_seconds)

    async def commit(self, *stages: FakeStage) -> None:
        number = self.members[0].round
        for microbatch in range(number * ROUND_MICROBATCHES, (number + 1) * ROUND_MICROBATCHES):
            stages[microbatch % len(stages)].learn(microbatch)
        await until(lambda: all(stage.round > number for stage in self.members), seconds=60.0)

    def add_newcomer(self) -> tuple[Peer, "asyncio.Task[None]"]:
        newcomer = self.add(1)
        return newcomer, asyncio.create_task(newcomer.averager.join())


@asynccontextmanager
async def slow_line() -> AsyncIterator[SlowLine]:
    async with SlowLine(make_config("synchronous", microbatches=ROUND_MICROBATCHES)) as network:
        await network.commit(*network.members)
        yield network


@in_virtual_time
async def test_a_newcomer_behind_a_slow_line_slows_no_round_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The run pauses while the newcomer downloads. So the newcomer reaches the group's round, but is not a member yet,
    and is not judged yet."""
    caplog.set_level(logging.INFO)
    async with slow_line() as network:
        newcomer, joining = network.add_newcomer()
        await asyncio.sleep(40.0)
        assert newcomer.stage.num_installs >= 1
        began_at = asyncio.get_running_loop().time()
        for _ in range(5):
            await network.commit(*network.members)
        assert asyncio.get_running_loop().time() - began_at < 5.0
        assert {result.members for result in network.members[0].results} == {(record(2).peer_id, record(3).peer_id)}
        assert not joining.done()
        [line] = [line for line in caplog.messages if "Before it takes part" in line]
        assert "an exchange would take 15.1 s, and the others compute a round in 0.5 s" in line
        assert "cannot take part" not in caplog.text
        # The newcomer's line is now better. It does not know that yet, so it observes each round.
        network.line_seconds = 0.1
        for _ in range(10):
            await network.commit(*network.members)
            await asyncio.sleep(0.5)
        [line] = [line for line in caplog.messages if "cannot take part" in line]
        assert re.search(r"an exchange would take 15\.1 s, and a round takes 0\.\d s without", line)
        assert not joining.done()
        joining.cancel()


@in_virtual_time
async def test_it_takes_part_once_its_line_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.averaging.agreement.pace.REST_FACTOR", 0.5)
    async with slow_line() as network:
        newcomer, joining = network.add_newcomer()
        await asyncio.sleep(40.0)
        assert not joining.done()
        network.line_seconds = 0.0
        await asyncio.wait_for(joining, 100.0)
        await until(lambda: len(newcomer.averager.view().progress) == 3)
        await network.commit(newcomer.stage, *network.members)
        assert len(network.members[0].results[-1].members) == 3


@in_virtual_time
async def test_it_serves_once_nobody_else_holds_the_stage() -> None:
    async with slow_line() as network:
        newcomer, joining = network.add_newcomer()
        await asyncio.sleep(40.0)
        for number in (2, 3):
            network.kill(number)
        await asyncio.wait_for(joining, 60.0)
        assert newcomer.stage.round == 1


# -- the rule --------------------------------------------------------------------------------------------------------


def entry(*, rate: float, setting: str = "synchronous") -> Entry:
    """The entry of a peer with 4 MB of parameters, at a stage with one peer that announces this rate."""
    config = make_config(setting, microbatches=ROUND_MICROBATCHES)
    announced = record(2).model_copy(update={"samples_per_second": rate})
    joining = record(3).model_copy(update={"samples_per_second": 1000.0, "state": PeerState.JOINING})
    judged = Entry(config, lambda stage: [announced, joining], SizedStage(num_bytes=4_000_000))
    judged.begin()
    judged.downloaded(200_000.0, seconds=60.0, now=0.0)
    return judged


def test_an_exchange_that_takes_longer_than_a_round_keeps_a_peer_out() -> None:
    slowness = entry(rate=ROUND_SAMPLES).slowness
    assert slowness is not None
    assert (slowness.exchange_seconds, slowness.round_seconds) == pytest.approx((20.0, 1.0), rel=0.01)


@pytest.mark.parametrize(("rate", "setting"), [(ROUND_SAMPLES / 16, "synchronous"), (ROUND_SAMPLES, "diloco")])
def test_long_rounds_and_diloco_keep_nobody_out(rate: float, setting: str) -> None:
    assert entry(rate=rate, setting=setting).slowness is None


def seen(judged: Entry, *rounds: tuple[float, int]) -> Entry:
    """Let the peer see the group in each of these rounds, at the given time."""
    for now, group_round in rounds:
        judged.saw(group_round, now=now)
    return judged


def test_where_all_lines_are_slow_the_rounds_that_were_seen_count() -> None:
    """The first round that the peer sees had begun before."""
    judged = seen(entry(rate=ROUND_SAMPLES), (0.0, 7), (1.0, 8), (19.0, 9), (37.0, 10))
    assert judged.slowness is None


def test_one_round_that_was_seen_late_is_no_short_round() -> None:
    """The peer learns late that one round is over, and soon afterwards that the next one is over as well."""
    judged = seen(entry(rate=ROUND_SAMPLES), (0.0, 7), (18.0, 8), (36.0, 9), (53.0, 10), (54.0, 11), (72.0, 12))
    assert judged.slowness is None


def test_of_few_rounds_nothing_is_concluded() -> None:
    """The peer stays out for now: these times may have been a pause, or only the end of a round."""
    judged = seen(entry(rate=ROUND_SAMPLES), (0.0, 7), (100.0, 8), (100.5, 9), (100.5, 9))
    assert judged.slowness is not None
    assert not judged.slowness.is_certain
    assert "has gone on 2 times of 3" in judged.slowness.in_words


def test_a_faster_download_lets_a_peer_in() -> None:
    judged = entry(rate=ROUND_SAMPLES)
    assert not judged.should_measure(LEAST_REST_SECONDS)
    assert judged.should_measure(200.0)
    judged.downloaded(12e6, seconds=1.0, now=201.0)
    assert judged.slowness is None
