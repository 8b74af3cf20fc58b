import asyncio
import dataclasses
from typing import Any

import pytest

from swarm.averaging.wire.transport import ABORT, Broadcast
from swarm.errors import DeadlineExceeded, PeerUnavailable, SwarmError
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId, PeerRecord
from tests.averaging.doubles import QUICK, peer_id, record
from tests.support.virtual_time import in_virtual_time, virtual_loop

TIMING = dataclasses.replace(QUICK, heartbeat_seconds=0.02, fresh_seconds=0.1, grace_seconds=0.05)


def members(count: int) -> dict[PeerId, PeerRecord]:
    return {PeerId(peer_id(number)): record(number) for number in range(count)}


class Network:
    """Member n answers after `delays[n]` seconds; a negative delay is an error at once."""

    def __init__(self, *delays: float) -> None:
        self.delays = {peer_id(number): delay for number, delay in enumerate(delays)}
        self.silent: set[str] = set()

    async def call(self, peer: PeerRecord, method: Any, request: Any, *, timeout_seconds: float) -> Any:
        delay = self.delays[peer.peer_id]
        if delay < 0:
            raise PeerUnavailable("gone")
        if delay >= timeout_seconds:
            await asyncio.sleep(timeout_seconds)
            raise DeadlineExceeded("slow")
        await asyncio.sleep(delay)
        return pb.AbortReply()

    async def replies(self, **options: Any) -> dict[PeerId, Any]:
        """The outcomes of a call to all members."""
        broadcast = Broadcast(call=self.call, is_silent=lambda peer: peer in self.silent, timing=TIMING)
        everybody = members(len(self.delays))
        return await broadcast(everybody, ABORT, dict.fromkeys(everybody, pb.AbortRequest()), 1.0, **options)

    async def all(self, **options: Any) -> list[Any]:
        """The outcomes of a call to all members, by member; None for no answer."""
        replies = await self.replies(**options)
        return [replies.get(peer) for peer in members(len(self.delays))]


@in_virtual_time
async def test_answers_and_errors_come_back_by_member() -> None:
    replies = await Network(0.0, -1.0, 2.0).all()
    assert isinstance(replies[0], pb.AbortReply)
    assert isinstance(replies[1], PeerUnavailable)
    assert isinstance(replies[2], DeadlineExceeded)


@in_virtual_time
async def test_a_silent_member_is_not_waited_for_and_a_busy_one_is() -> None:
    network = Network(0.0, 0.9, 0.3)
    network.silent = {peer_id(1)}
    started_at = virtual_loop().time()
    _, silent, busy = await network.all()
    assert isinstance(silent, PeerUnavailable)
    assert isinstance(busy, pb.AbortReply)
    assert virtual_loop().time() - started_at < 0.8


@in_virtual_time
async def test_who_was_frozen_itself_listens_again_before_it_calls_others_silent() -> None:
    network = Network(0.0, 0.35)
    network.silent = {peer_id(1)}

    async def freeze() -> None:
        await asyncio.sleep(0.05)
        virtual_loop().advance(0.25)  # SIGSTOP does this.

    _, replies = await asyncio.gather(freeze(), network.all())
    assert isinstance(replies[1], pb.AbortReply), "0.1 s of listening were not over when it answered"


@pytest.mark.parametrize("first", [-1.0, 0.0])
@in_virtual_time
async def test_once_hope_is_gone_the_others_get_a_moment(first: float) -> None:
    def hoped_for(reply: pb.AbortReply | SwarmError) -> bool:
        return False

    started_at = virtual_loop().time()
    replies = await Network(first, 0.02, 0.9).all(until=hoped_for)
    assert replies[1] is not None
    assert replies[2] is None
    assert virtual_loop().time() - started_at < 0.6
