"""A member lies about its round. No other member gives up its own state, and rounds go on."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
import torch

from swarm.averaging.agreement.timing import Timing
from swarm.averaging.averager import Averager
from swarm.averaging.wire.transport import AVERAGE
from swarm.config import RunConfig
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId
from tests.averaging.doubles import QUICK, Network, Peer, network_of, peer_id, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.support.virtual_time import in_virtual_time

FAR = 1000
"""The round at which liars say they are."""


def add_liar(network: Network, number: int, *, anchor: float = 7.0) -> Peer:
    """Add a peer that holds a state of its own making, goes nowhere, and serves every peer that asks."""
    before = network.make_stage

    def make_stage(stage_number: int, lineage: str) -> FakeStage:
        stage = before(stage_number, lineage)
        stage.round, stage.run_samples, stage.lineage = FAR, 10 * FAR, "f" * 64
        stage.anchor = torch.full((17,), anchor)
        return stage

    network.make_stage = make_stage
    liar = network.add(number)
    network.make_stage = before
    liar.averager.place.branches.choose = lambda *, is_sound, announced: None  # type: ignore[method-assign]
    return liar


def averager_of(network: Network, number: int) -> Averager:
    return network.peers[peer_id(number)].averager


async def commit(network: Network, *numbers: int) -> None:
    """Let these peers commit one more round."""
    members = [network.peers[peer_id(number)].stage for number in numbers]
    after = members[0].round + 1
    size = network.config.rounds.round_samples // 2
    for index in range(size):
        members[index % len(members)].learn((after - 1) * size + index)
    await until(lambda: all(stage.round == after for stage in members))


@asynccontextmanager
async def group_of(config: RunConfig, *numbers: int, timing: Timing = QUICK) -> AsyncIterator[Network]:
    """Peers that have committed a round together."""
    async with network_of(config, *numbers, timing=timing) as network:
        await until(lambda: len(averager_of(network, numbers[0]).view().progress) == len(numbers))
        await commit(network, *numbers)
        yield network


def refusals(network: Network, *numbers: int) -> list[bool]:
    return [bool(averager_of(network, number).counters().refusals) for number in numbers]


@pytest.mark.parametrize(("liar", "anchor"), [(1, 7.0), (9, float("nan"))], ids=["it would lead", "it would not, NaN"])
@pytest.mark.parametrize(("setting", "quorum"), [("diloco", "available"), ("synchronous", "majority")])
@in_virtual_time
async def test_three_members_stay_where_they_are_and_go_on(
    liar: int, anchor: float, setting: str, quorum: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest = (2, 3, 4)
    async with group_of(make_config(setting, quorum=quorum), *honest) as network:
        add_liar(network, liar, anchor=anchor)
        await until(lambda: all(refusals(network, 2)))
        for _ in range(3):
            await commit(network, *honest)
        stages = [network.peers[peer_id(number)].stage for number in honest]
        assert {stage.round for stage in stages} == {4}
        assert len({stage.digest for stage in stages}) == 1
        assert {stage.num_installs for stage in stages} == {0}
        assert f"{peer_id(liar)} says that it is at round {FAR} of another branch" in caplog.text
        assert "1 of 4 stand behind it" in caplog.text


@in_virtual_time
async def test_of_the_made_up_states_of_a_run_of_two_none_is_taken_that_is_too_far(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is the word of one peer against the word of another, but no peer can have computed so much in this time."""
    async with group_of(make_config("diloco", microbatches=2), 2) as network:
        add_liar(network, 1)
        await until(lambda: all(refusals(network, 2)))
        await commit(network, 2)
        assert network.peers[peer_id(2)].stage.num_installs == 0
        assert "the run cannot have come so far at the pace that was seen here" in caplog.text


@in_virtual_time
async def test_who_was_away_comes_to_where_most_are_and_not_to_the_liar() -> None:
    honest = (2, 3, 4)
    async with group_of(make_config("diloco"), *honest) as network:
        network.freeze(4)
        await commit(network, 2, 3)
        add_liar(network, 1)
        await commit(network, 2, 3)
        network.thaw(4)
        stages = [network.peers[peer_id(number)].stage for number in honest]
        await until(lambda: len({stage.digest for stage in stages}) == 1)
        await commit(network, *honest)
        assert [stage.num_installs for stage in stages] == [0, 0, 1]


@pytest.mark.parametrize("num_rounds", [1, 40])
@in_virtual_time
async def test_in_a_run_of_two_who_was_away_for_long_comes_back(num_rounds: int) -> None:
    """Only the other peer can say what it did meanwhile."""
    async with group_of(make_config("diloco", microbatches=2), 1, 2) as network:
        network.freeze(2)
        for _ in range(num_rounds):
            await asyncio.sleep(0.3)
            await commit(network, 1)
        network.thaw(2)
        stages = [network.peers[peer_id(number)].stage for number in (1, 2)]
        await until(lambda: len({stage.digest for stage in stages}) == 1)
        await commit(network, 1, 2)
        assert [stage.num_installs for stage in stages] == [0, 1]


@in_virtual_time
async def test_a_liar_that_is_gone_holds_nobody_up() -> None:
    async with group_of(make_config("diloco"), 2, 3) as network:
        add_liar(network, 1)
        await until(lambda: network.peers[peer_id(2)].averager.place.branches.is_elsewhere(PeerId(peer_id(1))))
        network.kill(1)
        for _ in range(2):
            await commit(network, 2, 3)


@in_virtual_time
async def test_beside_a_liar_who_misses_a_commit_is_back_at_once() -> None:
    honest, timing = (2, 3, 4), dataclasses.replace(QUICK, max_retry_seconds=1e6)
    async with group_of(make_config("diloco"), *honest, timing=timing) as network:
        add_liar(network, 1)
        await until(lambda: all(refusals(network, *honest)))
        # From now on no peer looks around again because of the liar.
        await asyncio.sleep(3 * QUICK.heartbeat_seconds)
        network.freeze(4)
        await commit(network, 2, 3)
        network.thaw(4)
        await until(lambda: network.peers[peer_id(4)].stage.round == 2)


def _ballot(attempt: int, number: int) -> pb.Ballot:
    return pb.Ballot(attempt=attempt, leader_id=peer_id(number))


def _accuses(blamed: str, noticed_by: str) -> pb.AverageReply:
    return pb.AverageReply(failure=pb.Failure(blamed_id=blamed, noticed_by_id=noticed_by, reason="nothing came"))


def _refuses(promised: pb.Ballot) -> pb.Refusal:
    return pb.Refusal(reason="it does not want to", promised=promised, round=1)


ANSWERS: Mapping[str, Sequence[object]] = {
    "Average": [
        pb.AverageReply(),
        pb.AverageReply(refusal=_refuses(_ballot(1000, 3))),
        _accuses(peer_id(2), noticed_by=peer_id(3)),
        _accuses(peer_id(3), noticed_by=peer_id(3)),
        _accuses(peer_id(1), noticed_by=peer_id(2)),
        _accuses(peer_id(1), noticed_by=peer_id(1)),
        _accuses("nobody", noticed_by="nobody else"),
    ],
    "Begin": [
        pb.BeginReply(closing=pb.Closing()),
        pb.BeginReply(refusal=_refuses(_ballot(1000, 3))),
        pb.BeginReply(refusal=_refuses(_ballot(2**48 - 1, 3))),
    ],
}
"""By method, what the peer with the highest id answers whenever a round is to end."""


@pytest.mark.parametrize(
    ("method", "answer"), [pytest.param(name, number) for name, row in ANSWERS.items() for number in range(len(row))]
)
@in_virtual_time
async def test_one_that_makes_every_attempt_fail_is_left_out(method: str, answer: int) -> None:
    timing = dataclasses.replace(QUICK, max_closing_seconds=4.0)
    async with group_of(make_config("diloco", microbatches=4), 1, 2, 3, timing=timing) as network:
        liar = network.peers[peer_id(3)]

        async def lie(request: object) -> object:
            if method == "Average":
                # It takes part in the exchange, so the others have nothing to complain of.
                await liar.averager.handlers.handle(AVERAGE, cast("pb.AverageRequest", request))
            return ANSWERS[method][answer]

        liar.instead[method] = lie
        began_at = asyncio.get_running_loop().time()
        for _ in range(3):
            await commit(network, 1, 2)
        # One that pretends to close is given half of the time at each further attempt.
        assert asyncio.get_running_loop().time() - began_at < (1 + 1 / 2 + 1 / 4) * timing.max_closing_seconds + 2.0
        assert network.peers[peer_id(1)].stage.digest == network.peers[peer_id(2)].stage.digest
