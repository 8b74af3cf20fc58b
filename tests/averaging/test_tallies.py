"""What each member has given, as members sign it: false counts are refused, and who does not sign is told."""

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarm.averaging.wire.transport import COMMIT
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.tally import EMPTY, Given
from swarm.types import Block
from tests.averaging import doubles
from tests.averaging.doubles import Network, Peer, until
from tests.averaging.fake_stage import MICROBATCH, make_config
from tests.averaging.test_groups import grouped
from tests.support.virtual_time import in_virtual_time

KEYS = sorted((generate() for _ in range(10)), key=lambda identity: identity.peer_id)
"""Of the peers, in the order of their numbers."""


@pytest.fixture(autouse=True)
def _peers_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubles, "peer_id", lambda number: KEYS[number].peer_id)


@asynccontextmanager
async def signing(config: RunConfig, num_members: int) -> AsyncIterator[Network]:
    async with Network(config) as network:
        network.sign_as = lambda number: KEYS[number].sign_with_point
        for number in range(num_members):
            network.add(number)
        yield network


async def commit(network: Network, peers: Sequence[Peer] = ()) -> None:
    """Let these peers, or all, learn two microbatches each and commit them."""
    peers = peers or list(network.peers.values())
    number = peers[0].stage.round
    for peer in peers:
        peer.stage.learn(100 * number + 2 * peer.number, 100 * number + 2 * peer.number + 1)
    await until(lambda: all(peer.stage.round > number for peer in peers), seconds=60.0)


def signers(peer: Peer) -> set[int]:
    found = peer.stage.tally.signers(peer.averager.context.config.run_id, Block(0))
    return {number for number, key in enumerate(KEYS) if key.peer_id in found}


def given_by(peer: Peer, number: int) -> Given:
    return peer.stage.tally.peers[KEYS[number].peer_id]


def plain(num_members: int) -> RunConfig:
    return make_config("diloco", microbatches=2 * num_members)


@pytest.mark.parametrize(
    ("config", "num_members"),
    [(plain(1), 1), (plain(3), 3), (grouped(3, microbatches=18), 9), (grouped(2, microbatches=18), 9)],
    ids=["alone", "together", "groups", "groups of groups"],
)
@in_virtual_time
async def test_all_members_sign_the_same_sums(config: RunConfig, num_members: int) -> None:
    async with signing(config, num_members) as network:
        for _ in range(3):
            await commit(network)
        peers = list(network.peers.values())
        assert len({peer.stage.tally.digest for peer in peers}) == 1
        for peer in peers:
            assert signers(peer) == set(range(num_members))
            gave = given_by(peers[0], peer.number)
            assert (gave.samples, gave.targets, gave.rounds) == (3 * 2 * MICROBATCH, 3 * 2 * MICROBATCH, 3)
            sent = sum(result.cost.bytes_sent for result in peer.stage.results)
            assert gave.num_bytes <= sent, "handing a result down comes after it is decided"
            if not config.averaging.group_size:
                assert gave.num_bytes == sent


def _one_more_of_another(given: Any) -> None:
    given[0].samples += 1
    given[1].samples -= 1


def _all_of_one(given: Any) -> None:
    given[0].samples = sum(gave.samples for gave in given)
    for gave in given[1:]:
        gave.samples = gave.targets = 0


def _more_targets(given: Any) -> None:
    given[-1].targets += 10_000


def _more_bytes(given: Any) -> None:
    for gave in given:
        gave.bytes += 1


@pytest.mark.parametrize(
    "lie", [_one_more_of_another, _all_of_one, _more_targets, _more_bytes, lambda given: given.pop()]
)
@pytest.mark.parametrize("field", ["given", "handed_down"])
@in_virtual_time
async def test_members_refuse_false_counts_of_a_leader_of_groups(lie: Callable[[Any], Any], field: str) -> None:
    """It says something else to the other members than it holds itself."""
    async with signing(grouped(3, microbatches=18), 9) as network:
        refused, lies = list[str](), True

        def lied_to(peer: Peer) -> None:
            async def average(request: pb.AverageRequest) -> pb.AverageReply:
                if lies and request.member_ids and field == "given":
                    lie(request.given)
                elif lies and request.HasField("handed_down") and field == "handed_down":
                    lie(request.handed_down.given)
                reply = await peer.averager.handlers.participant.average(request)
                refused.extend([reply.refusal.reason] if reply.HasField("refusal") else [])
                return reply

            peer.instead["Average"] = average

        for peer in network.peers.values():
            lied_to(peer)
        for number, peer in enumerate(network.peers.values()):
            peer.stage.learn(2 * number, 2 * number + 1)
        await until(lambda: any("the leader says that" in reason for reason in refused), seconds=60.0)
        lies = False
        await until(lambda: all(peer.stage.round == 1 for peer in network.peers.values()), seconds=120.0)
        for peer in network.peers.values():
            for number in range(9):
                if KEYS[number].peer_id in peer.stage.tally.peers:
                    assert given_by(peer, number)[:2] == (2 * MICROBATCH, 2 * MICROBATCH)


@in_virtual_time
async def test_a_member_that_adds_to_its_own_sums_signs_alone() -> None:
    async with signing(plain(4), 4) as network:
        await commit(network)
        liar, *honest = reversed(network.peers.values())
        own = given_by(liar, 3)
        peers = {**liar.stage.tally.peers, KEYS[3].peer_id: own._replace(samples=own.samples + 1000)}
        liar.stage.tally = dataclasses.replace(liar.stage.tally, peers=peers)
        await commit(network)
        assert {peer.stage.tally.digest for peer in honest} == {honest[0].stage.tally.digest}
        for peer in honest:
            assert signers(peer) == {0, 1, 2}
            assert set(peer.stage.tally.members) - peer.stage.tally.signers(network.config.run_id, Block(0)) == {
                KEYS[3].peer_id
            }
            assert given_by(peer, 3).samples == 2 * 2 * MICROBATCH


@in_virtual_time
async def test_counts_that_no_round_can_hold_are_left_out_of_the_tally() -> None:
    async with signing(plain(3), 3) as network:
        liar = network.peers[KEYS[2].peer_id]

        async def begin(request: pb.BeginRequest) -> pb.BeginReply:
            reply = await liar.averager.handlers.participant.begin(request)
            reply.num_samples = reply.round_samples = 10_000
            return reply

        liar.instead["Begin"] = begin
        honest = [peer for peer in network.peers.values() if peer is not liar]
        for peer in honest:
            peer.stage.learn(*range(10 * peer.number, 10 * peer.number + 3))
        await until(lambda: all(peer.stage.round == 1 for peer in honest), seconds=60.0)
        assert all(KEYS[2].peer_id not in peer.stage.tally.peers for peer in honest)


@pytest.mark.parametrize(
    "lie",
    [
        None,
        lambda told: told["peers"][KEYS[0].peer_id].__setitem__(0, 1),
        lambda told: told.update(since=math.inf),
        lambda told: told.update(parent="\ud800"),
    ],
    ids=["true", "false", "infinite", "no characters"],
)
@in_virtual_time
async def test_a_newcomer_takes_only_what_most_members_have_signed(lie: Callable[[Any], Any] | None) -> None:
    async with signing(plain(3), 3) as network:
        for _ in range(2):
            await commit(network)

        def tamper(target: int, reply: pb.DownloadReply) -> None:
            if reply.HasField("header") and lie is not None:
                told = json.loads(reply.header.tally)
                lie(told)
                reply.header.tally = json.dumps(told)

        network.tamper = tamper
        joiner = network.add(3)
        await joiner.averager.join()
        await until(lambda: joiner.stage.round == 2)
        given = network.peers[KEYS[0].peer_id].stage.tally
        assert joiner.stage.tally == (given if lie is None else EMPTY)


@in_virtual_time
async def test_a_leader_cannot_make_signatures_long() -> None:
    """They stay with the round's outcome, which goes to all that ask for it: no newcomer would get it."""
    async with signing(plain(2), 2) as network:
        member = network.peers[KEYS[1].peer_id]

        async def commit_more(request: pb.CommitRequest) -> pb.CommitReply:
            request.signatures[0].complaints = 1_000_000 * "x"
            return await member.averager.handlers.handle(COMMIT, request)

        member.instead["Commit"] = commit_more
        await commit(network)
        [outcome] = member.averager.place.outcomes.values()
        assert not any(each.complaints for each in outcome.prepared.signatures)


@pytest.mark.parametrize("is_honest", [True, False], ids=["true", "false"])
@in_virtual_time
async def test_who_applies_a_missed_round_adds_only_what_most_members_have_signed(*, is_honest: bool) -> None:
    async with signing(plain(3), 3) as network:
        await commit(network)
        has_header, is_committed = asyncio.Event(), asyncio.Event()

        async def before(name: str, source: int, target: int) -> None:
            if name == "Download" and source == 3 and has_header.is_set():
                await is_committed.wait()

        def tamper(target: int, reply: pb.DownloadReply) -> None:
            if reply.HasField("header"):
                has_header.set()
            elif reply.HasField("result") and not is_honest:
                reply.result.outcome.prepared.given[0].samples += 1

        network.before, network.tamper = before, tamper
        members = list(network.peers.values())
        joiner = network.add(3)
        joining = asyncio.create_task(joiner.averager.join())
        await has_header.wait()
        await commit(network, members)
        is_committed.set()
        await joining
        await until(lambda: joiner.stage.round == 2)
        assert (joiner.stage.num_installs, len(joiner.stage.results)) == (1, 1)
        assert joiner.stage.tally.digest == (members[0].stage.tally if is_honest else EMPTY).digest
