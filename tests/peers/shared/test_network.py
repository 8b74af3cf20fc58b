"""How a program finds the others when it starts."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import cast

import pytest

from peers.shared import network
from peers.shared.network import AMENDMENTS_SECONDS, KnownPeers, Membership
from swarm.config import Amendment, Timeline, load_preset
from swarm.credentials.identity import generate
from swarm.credentials.token import Token
from swarm.dht.directory import Directory
from swarm.errors import NotAllowed, PeerUnavailable
from swarm.machine.clock import Clock, SystemClock
from swarm.routing.router import Router
from swarm.types import AmendmentsRecord, Block, PeerId, PeerRecord, PeerState
from tests.support import locked
from tests.support.chain import eventually
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore


class _Directory:
    """A directory without peers, which cannot be read the first `num_faults` times."""

    def __init__(self, num_faults: int) -> None:
        self.num_faults = num_faults

    async def sample(self, block: Block) -> Sequence[PeerRecord]:
        self.num_faults -= 1
        if self.num_faults >= 0:
            raise PeerUnavailable("no other node of the DHT answers")
        return []


class _Forgetful:
    """A directory that has a peer at each stage from the fifth reading on. That is while `look` reads the stages."""

    def __init__(self) -> None:
        self.num_readings = 0

    async def sample(self, block: Block) -> Sequence[PeerRecord]:
        self.num_readings += 1
        there = PeerRecord(
            peer_id="ab"[block.stage] * 40,
            announced_at=0.0,
            stage=block.stage,
            endpoint="192.0.2.1:1",
            state=PeerState.SERVING,
        )
        return [there] if self.num_readings > 5 else []


@pytest.mark.parametrize("returns", [True, False])
async def test_whoever_is_back_where_it_was_waits_for_those_who_remember_it(
    returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer began the run, and its command line names no other peer. After a while it stops waiting, because the
    others may be gone, too."""
    monkeypatch.setattr(network, "LOOK_SECONDS", 0.01)
    clock = SystemClock()
    known = KnownPeers(Router(clock, random.Random(0)))
    await known.look_first(cast(Directory, _Forgetful()), [Block(0), Block(1)], clock, returns=returns)
    for stage in (0, 1):
        assert [record.stage for record in known.others(Block(stage))] == ([stage] if returns else [])
    monkeypatch.setattr(network, "RETURN_SECONDS", 0.1)
    await known.look_first(cast(Directory, _Directory(0)), [Block(0), Block(1)], clock, returns=True)
    assert known.others(Block(1)) == []


def test_whom_a_process_leaves_alone_it_says_in_its_announcement() -> None:
    clock = ManualClock()
    known = KnownPeers(Router(clock, random.Random(0)))
    records = [
        PeerRecord(peer_id=f"{number:040x}", announced_at=0.0, stage=1, endpoint="192.0.2.1:1", state=PeerState.SERVING)
        for number in range(8)
    ]
    known.update(Block(1), records)
    assert known.bans([Block(1)], clock) == ()
    known.router.busy(Block(1), PeerId(records[7].peer_id), 100.0, "work waits here already")
    for record in records[:6]:
        known.router.failed(Block(1), PeerId(record.peer_id), reason="no answer")
        clock.advance(0.5)
    bans = known.bans([Block(1), Block(1, 1)], clock)
    assert [ban.peer_id for ban in bans] == [record.peer_id for record in records[5:1:-1]], "those that last longest"
    assert {ban.reason for ban in bans} == {"no answer"}
    assert bans[0].until == pytest.approx(clock.time() + 4.5)
    record = records[0].model_copy(update={"bans": bans})
    assert PeerRecord.model_validate_json(record.model_dump_json()) == record


def test_a_process_hands_microbatches_to_itself_only_where_it_is_to() -> None:
    known = KnownPeers(Router(ManualClock(), random.Random(0)), own_id="aa" * 20)
    records = {
        block: PeerRecord(
            peer_id="aa" * 20, announced_at=0.0, stage=block.stage, endpoint="192.0.2.1:1", state=PeerState.SERVING
        )
        for block in (Block(1), Block(2))
    }

    def chosen() -> list[PeerRecord | None]:
        for block, record in records.items():
            known.update(block, [record])
        return [known.router.choose(block, 1) for block in records]

    assert chosen() == [None, None]
    known.hop_within({Block(2)})
    assert chosen() == [None, records[Block(2)]]
    assert known.others(Block(2)) == []
    known.hop_within(())
    assert chosen() == [None, None]


RUN = dataclasses.replace(load_preset("tiny"), owner=locked.OWNER.authority.fingerprint)


def _enter(store: MemoryStore, token: Token, clock: Clock) -> Membership:
    return Membership.enter(RUN, store, token.admit(generate()), clock, insecure=False)


async def _tell(store: MemoryStore, clock: Clock, *settings: str) -> None:
    """Announce an amendment, as a peer that has heard of it does."""
    teller, amendment = (
        _enter(store, locked.PEER_TOKEN, clock),
        Amendment.sign(locked.OWNER, Timeline(RUN), 5, settings),
    )
    record = AmendmentsRecord(peer_id=teller.peer_id, announced_at=clock.time(), amendments=(amendment.text,))
    await teller.directory.announce(record, 100)


async def test_a_process_hears_of_amendments_and_shuts_out_whose_token_is_revoked() -> None:
    clock, token = ManualClock(locked.NOW.timestamp()), locked.issue()
    store = MemoryStore(clock)
    member, theirs = _enter(store, locked.PEER_TOKEN, clock), token.admit(generate())
    assert member.identity.authority is not None
    following = asyncio.create_task(member.follow_amendments())
    member.identity.authority.member(theirs.certificate_pem, clock.time())
    await _tell(store, clock, f"revoked=['{token.token_id}']")
    await eventually(lambda: bool(member.timeline.amendments), meanwhile=lambda: clock.advance(AMENDMENTS_SECONDS / 2))
    with pytest.raises(NotAllowed, match="has revoked the token"):
        member.identity.authority.member(theirs.certificate_pem, clock.time())
    following.cancel()


async def test_whose_token_is_revoked_does_not_enter() -> None:
    clock, token = ManualClock(locked.NOW.timestamp()), locked.issue()
    store = MemoryStore(clock)
    await _enter(store, token, clock).require_own_token()
    await _tell(store, clock, f"revoked=['{token.token_id}']")
    await _enter(store, locked.PEER_TOKEN, clock).require_own_token()
    with pytest.raises(NotAllowed, match=r"^the run's owner has revoked the token 'test' of "):
        await _enter(store, token, clock).require_own_token()
