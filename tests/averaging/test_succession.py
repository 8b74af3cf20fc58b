"""A leader that answers every report and ends no round is passed over, and one that is only slow is not."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swarm.averaging.agreement.reports import PassedOver
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId
from tests.averaging.doubles import QUICK, Network, Peer, network_of, peer_id, until
from tests.averaging.fake_stage import make_config
from tests.support.virtual_time import in_virtual_time

TIMING = dataclasses.replace(QUICK, max_closing_seconds=4.0)
SETTINGS = ["synchronous", "diloco"]
MICROBATCHES = 6


@asynccontextmanager
async def group_of(setting: str, *numbers: int, stages: int = 1) -> AsyncIterator[Network]:
    """Peers that have committed a round under the one with the lowest number."""
    async with network_of(make_config(setting, microbatches=MICROBATCHES, stages=stages), timing=TIMING) as network:
        for stage in range(stages):
            for number in numbers:
                network.add(number + 10 * stage, stage)
        await until(lambda: all(len(p.averager.view().progress) == len(numbers) for p in leaders(network, numbers[0])))
        learn(network, 0)
        await until(lambda: all(peer.stage.round == 1 for peer in network.peers.values()))
        yield network


def leaders(network: Network, lowest: int) -> list[Peer]:
    return [peer for peer in network.peers.values() if peer.number % 10 == lowest]


def learn(network: Network, round_number: int, *, without: int = -1, last: int = MICROBATCHES) -> None:
    """Share a round out among the members of each stage."""
    for stage in {peer.record.stage for peer in network.peers.values()}:
        members = [peer for peer in network.peers.values() if peer.record.stage == stage and peer.number != without]
        for index in range(last):
            members[index % len(members)].stage.learn(round_number * MICROBATCHES + index)


def spoil(network: Network, number: int, how: str) -> None:
    """Let a leader do less than it should from now on, while it answers whatever it is asked."""
    leader = network.peers[peer_id(number)].averager

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def lose(name: str, source: int, _: int) -> None:
        if (name, source) == ("Average", number):
            await never()

    match how:
        case "begins nothing":
            leader.watch.may_begin = lambda: False  # type: ignore[method-assign]
        case "begins only":
            network.before = lose
        case "commits nothing":
            leader.lead_loop.round.barrier.wait_for = never  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("setting", "how"),
    [
        ("synchronous", "begins nothing"),
        ("synchronous", "commits nothing"),
        *((each, "begins only") for each in SETTINGS),
    ],
)
@in_virtual_time
async def test_a_stage_goes_on_without_a_leader_that_ends_no_round(
    setting: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with group_of(setting, 1, 2, 3) as network:
        spoil(network, 1, how)
        others = [network.peers[peer_id(number)] for number in (2, 3)]
        for round_number in (1, 2, 3):
            learn(network, round_number, without=1)
            await until(lambda after=round_number + 1: all(p.stage.round == after for p in others), 120.0)  # type: ignore[misc]
        assert others[0].stage.digest == others[1].stage.digest
        assert {peer.averager.view().leader_id for peer in others} == {peer_id(2)}
        assert caplog.text.count(f"{peer_id(1)} does not lead any more") in (2, 3)


@in_virtual_time
async def test_a_stage_behind_the_barrier_goes_on_and_the_other_stage_with_it() -> None:
    async with group_of("synchronous", 1, 2, 3, stages=2) as network:
        spoil(network, 1, "commits nothing")
        learn(network, 1, without=1)
        honest = [peer for peer in network.peers.values() if peer.number != 1]
        await until(lambda: all(peer.stage.round == 2 for peer in honest), 200.0)
        assert len({peer.stage.digest for peer in honest if peer.record.stage == 0}) == 1
        # The other stage's leader only waited.
        assert network.peers[peer_id(12)].averager.view().leader_id == peer_id(11)


@pytest.mark.parametrize("setting", SETTINGS)
@in_virtual_time
async def test_a_leader_that_waits_for_the_rest_of_the_round_stays(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with group_of(setting, 1, 2, 3) as network:
        learn(network, 1, last=MICROBATCHES - 1)
        await asyncio.sleep(4 * TIMING.idle_seconds)
        learn(network, 1)
        await until(lambda: all(peer.stage.round == 2 for peer in network.peers.values()))
        assert "stands still" not in caplog.text


@pytest.mark.parametrize("name", ["Begin", "Average", "Report", "Commit"])
@in_virtual_time
async def test_a_leader_on_a_slow_line_stays(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its round takes longer than a leader may be idle."""
    async with group_of("synchronous", 1, 2, 3) as network:

        async def delay(called: str, source: int, target: int) -> None:
            if called == name and 1 in (source, target):
                await asyncio.sleep({"Report": 0.25, "Commit": 0.9}.get(name, 0.4))

        network.before = delay
        for round_number in (1, 2, 3):
            learn(network, round_number)
            await until(lambda after=round_number + 1: all(p.stage.round == after for p in network.peers.values()), 60)  # type: ignore[misc]
        assert "lead any more" not in caplog.text


@in_virtual_time
async def test_a_leader_that_waits_for_a_slow_member_or_another_stage_stays(caplog: pytest.LogCaptureFixture) -> None:
    async with group_of("synchronous", 1, 2, 3, stages=2) as network:
        ready = [peer for peer in network.peers.values() if peer.record.stage == 0]
        for index in range(MICROBATCHES):
            ready[index % 3].stage.learn(MICROBATCHES + index)
        await asyncio.sleep(4 * TIMING.idle_seconds)
        assert "stands still" not in caplog.text
        learn(network, 1)
        await until(lambda: all(peer.stage.round == 2 for peer in network.peers.values()))
        assert {peer.averager.view().leader_id for peer in ready} == {peer_id(1)}


def led_by(leader_id: str) -> pb.Outcome:
    return pb.Outcome(prepared=pb.Prepared(ballot=pb.Ballot(attempt=1, leader_id=leader_id)))


def test_nobody_is_passed_over_on_the_word_of_few() -> None:
    one, two, three, four = (PeerId(peer_id(number)) for number in (1, 2, 3, 4))
    own = PassedOver(two)
    own.committed(led_by(one))
    own.hear(three, [one])
    own.hear(four, [one])
    assert not own.judge({one, three, four}), "a round was committed here under that leader"
    own.see(one)
    assert own.judge({one, three, four}) == {one}

    new = PassedOver(two)
    new.committed(led_by(four))
    new.hear(three, [one])
    assert not new.judge({one, three, four})
    new.hear(four, [one])
    assert new.judge({one, three, four}) == {one}

    for is_new in (True, False):
        of_two = PassedOver(two)
        if not is_new:
            of_two.committed(led_by(two))
        of_two.hear(one, [two])
        assert of_two.judge({one}) == ({two} if is_new else set()), "one word against another"
        of_two.see(one)
        assert of_two.judge({one}) == {one}, "the word of a peer under which a round stood still does not count"
        assert of_two.peers == {one}


def test_where_everybody_failed_the_first_leads_again() -> None:
    """Otherwise each would take itself for the only one that may lead."""
    ids = [PeerId(peer_id(number)) for number in (1, 2, 3)]
    views = [PassedOver(own_id) for own_id in ids]
    for leader_id in ids:
        for view, own_id in zip(views, ids, strict=True):
            view.committed(led_by(ids[0]))
            if own_id != leader_id:
                view.see(leader_id)
        told = [(own_id, list(view.told)) for view, own_id in zip(views, ids, strict=True)]
        for view, own_id in zip(views, ids, strict=True):
            for peer, idle in told:
                if peer != own_id:
                    view.hear(peer, idle)
            view.judge(set(ids) - {own_id})
    assert [view.peers for view in views] == [set(), set(), set()]
