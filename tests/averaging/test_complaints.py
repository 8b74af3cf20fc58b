"""What members hold against others is signed with each round, and outlives all of their memories."""

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import pytest

from swarm.honesty.suspects import FORGIVEN_AFTER, NAMED_AFTER
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.complaints import Complaints, Named
from swarm.training.tally import Tally
from swarm.types import Block
from tests.averaging import doubles, test_out_of_line
from tests.averaging.doubles import Network, Peer, until
from tests.averaging.test_out_of_line import LIAR, LIES, commit, group, lines, stage
from tests.averaging.test_tallies import KEYS
from tests.support.virtual_time import in_virtual_time

LIES_AGAINST = Named(0, "it is said to lie")


@pytest.fixture(autouse=True)
def _peers_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doubles, test_out_of_line):
        monkeypatch.setattr(module, "peer_id", lambda number: KEYS[number].peer_id)


@asynccontextmanager
async def signing(num_members: int) -> AsyncIterator[Network]:
    async with group("diloco", num_members, sign_as=lambda number: KEYS[number].sign_with_point) as network:
        yield network


@asynccontextmanager
async def with_a_named_liar() -> AsyncIterator[Network]:
    async with signing(6) as network:
        stage(network, LIAR).lie = LIES["sign flipped"]
        stage(network, LIAR).carries = False
        for _ in range(NAMED_AFTER + 1):
            await commit(network)
        yield network


def complaints(network: Network, number: int) -> dict[str, Complaints]:
    tally = stage(network, number).tally
    return tally.complaints(tally.signers(network.config.run_id, Block(0)))


def _named(network: Network, number: int) -> dict[str, Named]:
    tally = stage(network, number).tally
    return tally.named(tally.signatures.values(), network.config.run_id, Block(0))


def named(lines: Collection[str]) -> set[int]:
    return {number for number, key in enumerate(KEYS) if any(line.startswith(f"{key.peer_id} lies") for line in lines)}


@in_virtual_time
async def test_members_sign_what_they_found_and_whom_they_name() -> None:
    async with with_a_named_liar() as network:
        liar = KEYS[LIAR].peer_id
        for number in range(6):
            if number != LIAR:
                told = complaints(network, number)
                assert told.keys() == {key.peer_id for key in KEYS[:6]} - {liar}
                for each in told.values():
                    assert each.named.keys() == {liar}
                    assert {word.peer_id for word in each.words} == {liar}
                    assert max(word.round for word in each.words) == NAMED_AFTER
                at_this_one = _named(network, number)
                assert at_this_one.keys() == {liar}
                assert at_this_one[liar].round == NAMED_AFTER


def _made_up(text: str) -> str:
    tally = json.loads(text)
    for row in tally["signatures"].values():
        row[2] = Complaints(named={KEYS[0].peer_id: LIES_AGAINST}).to_text()
    return json.dumps(tally)


def _by_strangers(text: str) -> str:
    """Signed rightly, by members that never were."""
    tally = dataclasses.replace(Tally.read(text), members=tuple(key.peer_id for key in KEYS[7:10]))
    said = Complaints(named={KEYS[0].peer_id: LIES_AGAINST}).to_text()
    signatures = [tally.sign(key.sign_with_point, "", Block(0), said) for key in KEYS[7:10]]
    return tally.settled(signatures, "", Block(0)).to_text()


@pytest.mark.parametrize(
    ("change", "expected"), [(lambda text: text, {LIAR}), (_made_up, set()), (_by_strangers, set())],
    ids=["true", "changed", "strangers"],
)  # fmt: skip
@in_virtual_time
async def test_a_newcomer_names_whom_most_members_name(change: Callable[[str], str], expected: set[int]) -> None:
    async with with_a_named_liar() as network:

        def tamper(target: int, reply: pb.DownloadReply) -> None:
            if reply.HasField("header"):
                reply.header.tally = change(reply.header.tally)

        network.tamper = tamper
        joiner = network.add(6)
        await joiner.averager.join()
        await until(lambda: joiner.stage.round == NAMED_AFTER + 1)
        assert named(lines(network, 6)) == expected
        # Once it takes part it hears the others itself.
        stage(network, LIAR).lie = None
        await commit(network)
        assert named(lines(network, 6)) == {LIAR}


async def _restart_all(network: Network) -> None:
    """End all peers, and start them again with the state that they had, and no memory of others."""
    peers = list(network.peers.values())
    for peer in peers:
        network.kill(peer.number)
    for peer in peers:
        network.make_stage = lambda number, lineage, peer=peer: peer.stage  # type: ignore[misc]
        network.add(peer.number)
    await until(lambda: len(_first(network).averager.view().progress) == len(peers))


def _first(network: Network) -> Peer:
    return network.peers[KEYS[0].peer_id]


@in_virtual_time
async def test_who_is_named_stays_so_when_all_peers_start_again_and_until_it_is_forgiven() -> None:
    async with with_a_named_liar() as network:
        before = lines(network, 0)
        stage(network, LIAR).lie = None
        await _restart_all(network)
        assert [lines(network, number) for number in range(6)] == [before] * 6
        for _ in range(2):
            await commit(network)
            assert {frozenset(each.named) for each in complaints(network, 0).values()} == {
                frozenset({KEYS[LIAR].peer_id})
            }
        for each in network.peers.values():
            # As after that many rounds without another lie.
            suspects = each.averager.own_round.exchanges.suspects
            suspects.judge(NAMED_AFTER + FORGIVEN_AFTER, {}, {"": slice(0, 1)})
        await commit(network)
        assert complaints(network, 0) == {}
        assert lines(network, 0) == []


@pytest.mark.parametrize(("num_accusers", "are_believed"), [(1, False), (2, False), (3, True)])
@in_virtual_time
async def test_few_members_name_nobody_at_the_others(num_accusers: int, *, are_believed: bool) -> None:
    async with signing(5) as network:
        for number in range(1, 1 + num_accusers):
            suspects = network.peers[KEYS[number].peer_id].averager.own_round.exchanges.suspects
            suspects.take_over({KEYS[4].peer_id: LIES_AGAINST._replace(line=f"{KEYS[4].peer_id} lies")})
        await commit(network)
        assert named(lines(network, 0)) == ({4} if are_believed else set())
        assert len(complaints(network, 0)) == num_accusers


@in_virtual_time
async def test_complaints_that_are_too_long_are_not_passed_on() -> None:
    async with signing(3) as network:
        long = network.peers[KEYS[1].peer_id]

        async def average(request: pb.AverageRequest) -> pb.AverageReply:
            reply = await long.averager.handlers.participant.average(request)
            reply.prepared.signatures[0].complaints = "x" * 100_000
            return reply

        long.instead["Average"] = average
        await commit(network)
        signers = stage(network, 0).tally.signers(network.config.run_id, Block(0))
        assert signers == {KEYS[0].peer_id, KEYS[2].peer_id}
