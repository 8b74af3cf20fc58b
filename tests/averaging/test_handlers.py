"""What a peer answers to others that lead or claim to lead, and what happens to it if memory runs out."""

import asyncio
from typing import Any, cast

import pytest

from swarm.averaging.agreement import messages
from swarm.averaging.wire.transport import ABORT, AVERAGE, BEGIN, Method
from swarm.errors import MalformedMessage, PeerUnavailable
from swarm.events import Abort, Event
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.rpc.v1 import averaging_pb2 as pb
from tests.averaging.doubles import QUICK, Peer, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.support.virtual_time import in_virtual_time


def _is_out_of_memory(errors: ExceptionGroup[Exception]) -> bool:
    _, others = errors.split(is_out_of_memory)
    return others is None


@pytest.mark.parametrize("number", [1, 3], ids=["the leader", "a member"])
@pytest.mark.parametrize("method", ["Begin", "Average"])
@in_virtual_time
async def test_a_member_without_memory_to_average_ends_and_the_others_go_on(
    method: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the member would go on serving although every round leaves it out."""
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        poor, others = network.peers[peer_id(number)], stages(network, *({1, 2, 3} - {number}))

        async def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        async def answer(request: Any) -> Any:
            try:
                return await poor.averager.handlers.handle(Method[Any, Any](method), request)
            except RuntimeError:  # The servicer answers so.
                raise PeerUnavailable("internal error: RuntimeError") from None

        if method == "Begin":
            monkeypatch.setattr(poor.stage, "freeze", fail)
        else:
            monkeypatch.setattr(poor.averager.shared, "offer", fail)
        poor.instead[method] = answer
        for index, stage in enumerate([*others, *stages(network, number)]):
            stage.learn(2 * index, 2 * index + 1)
        await until(lambda: poor.task is not None and poor.task.done())
        with pytest.raises(ExceptionGroup, check=_is_out_of_memory):
            await cast("asyncio.Task[None]", poor.task)
        poor.task = asyncio.create_task(asyncio.sleep(0))  # The network would wait for it, and raise this again.
        network.kill(number)
        await until(lambda: all(stage.round >= 1 for stage in others))


def call_of(peer: Peer, method: Method[Any, Any], leader: int, **fields: Any) -> Any:
    """The call of a peer that claims to be the leader, for the first attempt."""
    ballot = {"ballot": pb.Ballot(attempt=1, leader_id=peer_id(leader)), "peer_id": peer_id(leader)}
    types = {"Begin": pb.BeginRequest, "Average": pb.AverageRequest, "Abort": pb.AbortRequest}
    return types[method.name](address=peer.averager.context.address, **(ballot | fields))


@in_virtual_time
async def test_of_a_leaders_reason_only_a_line_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with network_of(make_config(), 1, 9) as network:
        peer, written = network.peers[peer_id(1)], list[Event]()
        network.freeze(9)
        await asyncio.sleep(0.01)
        monkeypatch.setattr(peer.averager.context.events, "write", written.append)
        standing = messages.pack_standing(peer.averager.place.standing)
        await peer.averager.handlers.handle(BEGIN, call_of(peer, BEGIN, 9, standing=standing))
        await peer.averager.handlers.handle(ABORT, call_of(peer, ABORT, 9, reason="\x1b" + "x" * 100_000))
        [abort] = [event for event in written if isinstance(event, Abort)]
        assert abort.reason == " " + "x" * (messages.LONGEST_MEMBER_REASON - 1)


@in_virtual_time
async def test_an_abort_is_carried_out_though_its_leader_dies_over_it() -> None:
    """Otherwise the stage would stay closed, because no other peer knows of the attempt."""
    async with network_of(make_config(), 1, 9) as network:
        peer = network.peers[peer_id(1)]
        network.freeze(9)
        release, reopen = asyncio.Event(), peer.stage.reopen

        async def slowly(round_number: int) -> None:
            await release.wait()
            await reopen(round_number)

        peer.stage.reopen = slowly  # type: ignore[method-assign]
        await asyncio.sleep(0.01)
        standing = messages.pack_standing(peer.averager.place.standing)
        await peer.averager.handlers.handle(BEGIN, call_of(peer, BEGIN, 9, standing=standing))
        assert peer.stage.closed
        aborting = asyncio.create_task(peer.averager.handlers.handle(ABORT, call_of(peer, ABORT, 9)))
        await asyncio.sleep(0.01)
        aborting.cancel()
        await asyncio.wait([aborting])
        release.set()
        await until(lambda: not peer.stage.closed, seconds=QUICK.heartbeat_seconds / 2)


@pytest.mark.parametrize("method", [BEGIN, AVERAGE, ABORT], ids=lambda method: method.name)
@in_virtual_time
async def test_nobody_leads_in_the_name_of_another_one(method: Method[Any, Any]) -> None:
    """Otherwise a member could end its leader's attempt, or close the contributions of others for a leader that does
    not lead."""
    async with network_of(make_config(), 1, 9) as network:
        peer = network.peers[peer_id(1)]
        await asyncio.sleep(0.01)
        standing = messages.pack_standing(peer.averager.place.standing)
        if method is not BEGIN:
            await peer.averager.handlers.handle(BEGIN, call_of(peer, BEGIN, 9, standing=standing))
        fields = {"standing": standing} if method is BEGIN else {}
        with pytest.raises(MalformedMessage, match="attempt 1 is not that of the caller"):
            await peer.averager.handlers.handle(method, call_of(peer, method, 9, peer_id=peer_id(2), **fields))
        assert peer.stage.closed == (method is not BEGIN)


@in_virtual_time
async def test_who_is_closed_for_a_leader_that_nobody_knows_opens_again() -> None:
    async with network_of(make_config(), 1) as network:
        peer = network.peers[peer_id(1)]
        await asyncio.sleep(0.01)
        standing = messages.pack_standing(peer.averager.place.standing)
        await peer.averager.handlers.handle(BEGIN, call_of(peer, BEGIN, 9, standing=standing))
        assert peer.stage.closed
        await until(lambda: not peer.stage.closed)
