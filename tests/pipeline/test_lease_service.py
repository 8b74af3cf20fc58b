"""A stage's leader answering trainers: what it grants them, and when it has nothing for them."""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from swarm.errors import IncompatibleVersion, NotAllowed, PeerUnavailable, SwarmError, WrongStage
from swarm.pipeline.lease_service import (
    DOUBT_SECONDS,
    FAILED_SECONDS,
    GAP_SECONDS,
    MAX_COUNT,
    MAX_WAITING,
    LeaseClient,
    LeaseServicer,
)
from swarm.pipeline.leases import GATHER_SECONDS, RoundView
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.rpc.v1.lease_pb2_grpc import LeaseServiceServicer, add_LeaseServiceServicer_to_server
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOLS, Block, PeerRecord, PeerState
from tests.support.chain import SYNCHRONOUS
from tests.support.manual_clock import ManualClock


class Context:
    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:5001"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}


CONTEXT = Context("192.0.2.1")


async def acquire(stage: int, round_number: int, **fields: Any) -> pb.AcquireReply:
    """The answer of a stage's leader whose stage is at a round and lacks all of its microbatches but the last."""
    size = SYNCHRONOUS.microbatches_per_round
    ids = range(round_number * size, (round_number + 1) * size)
    view = RoundView(
        round=round_number, microbatches=ids, committed={ids[-1]}, counted={ids[-1]}, lost=set(),
        highest_microbatch=-1, quiet_seconds=60.0, awaits_reports=False, misses_member=False, complete=False,
    )  # fmt: skip
    leader = Leader(stage, view)
    await leader.gather()
    return await leader.servicer.Acquire(leader.request(count=2, **fields), CONTEXT)


class Leader:
    """A stage's leader, at a round that the test sets."""

    def __init__(self, stage: int, view: RoundView) -> None:
        self.stage = stage
        self.view = view
        self.clock = ManualClock()
        self.changed = asyncio.Event()
        self.servicer = LeaseServicer(
            config=SYNCHRONOUS, block=Block(stage), clock=self.clock, rng=random.Random(0),
            lead=lambda: self.view, changed=self._wait,
        )  # fmt: skip

    async def gather(self) -> None:
        """Lead for long enough to be allowed to grant."""
        for _ in range(2):
            reply = await self.servicer.Acquire(self.request(count=2), CONTEXT)
            assert not reply.microbatches, "it has just taken the lead"
            self.clock.advance(GATHER_SECONDS / 2)

    def request(self, trainer_id: str = "trainer", **fields: Any) -> pb.AcquireRequest:
        address = Address(run_id=SYNCHRONOUS.run_id, protocol_version=PROTOCOLS.newest, stage=self.stage)
        return pb.AcquireRequest(address=address, trainer_id=trainer_id, **fields)

    async def _wait(self, seconds: float) -> None:
        await self.changed.wait()


def _client(
    num_peers: int, ask: Callable[[PeerRecord], pb.AcquireReply], clock: ManualClock | None = None
) -> tuple[Callable[[], Awaitable[pb.AcquireReply | None]], list[PeerRecord]]:
    """A function that asks stage 1 once for a microbatch, as these peers answer, and the records of the peers."""

    class Client(LeaseClient):
        async def _ask(self, record: PeerRecord, request: pb.AcquireRequest, seconds: float) -> pb.AcquireReply:
            return ask(record)

    peers = [
        PeerRecord(peer_id=f"{n}" * 40, announced_at=0.0, stage=1, endpoint="localhost:1", state=PeerState.SERVING)
        for n in range(num_peers)
    ]
    client = Client(
        config=SYNCHRONOUS, trainer_id="trainer", peers=lambda stage: peers, channels=ChannelPool(),
        clock=clock or ManualClock(),
    )  # fmt: skip
    return lambda: client.acquire(Block(1), [0], holding=(), released=(), wait_seconds=0.0), peers


async def test_a_peer_that_serves_another_stage_by_now_is_passed_over() -> None:
    """The peer's old announcement is still there, and names the port where it serves the other stage."""

    def ask(record: PeerRecord) -> pb.AcquireReply:
        if record is peers[0]:
            raise WrongStage("this is stage 2")
        return pb.AcquireReply(round=3, microbatches=[7])

    acquire, peers = _client(2, ask)
    leased = await acquire()
    assert leased is not None
    assert (leased.round, list(leased.microbatches)) == (3, [7])


@pytest.mark.parametrize("refusal", [NotAllowed("a token has expired, or a clock is wrong"), IncompatibleVersion("6")])
async def test_who_alone_refuses_is_passed_over_and_whom_all_refuse_hears_why(refusal: SwarmError) -> None:
    num_refusing = 1

    def ask(record: PeerRecord) -> pb.AcquireReply:
        if record in peers[:num_refusing]:
            raise refusal
        return pb.AcquireReply(round=3, microbatches=[7])

    acquire, peers = _client(2, ask)
    leased = await acquire()
    assert leased is not None
    assert leased.microbatches == [7]
    num_refusing = 2
    with pytest.raises(type(refusal), match=str(refusal)):
        await acquire()


async def test_a_leader_that_failed_is_not_waited_for_again_because_others_do_not_know_yet() -> None:
    def ask(record: PeerRecord) -> pb.AcquireReply:
        asked.append(record)
        if record is first:
            raise PeerUnavailable("cut off")
        return pb.AcquireReply() if record is leader else pb.AcquireReply(leader_peer_id=leader.peer_id)

    clock, asked = ManualClock(), list[PeerRecord]()
    acquire, (first, second, third) = _client(3, ask, clock)
    leader = first

    async def outcome() -> tuple[bool, list[PeerRecord]]:
        asked.clear()
        return await acquire() is not None, asked

    assert await outcome() == (False, [first, second, third])
    assert await outcome() == (False, [second, third]), "they still name the first"
    leader = third
    assert await outcome() == (True, [second, third])
    leader = first
    clock.advance(FAILED_SECONDS)
    assert await outcome() == (False, [third, first, second]), "it may be back"


async def test_a_leader_that_grants_nothing_is_left_once_others_name_another_one() -> None:
    """The first peer still takes itself for the leader. Its group passes it over after a while."""
    clock, leads, asked = ManualClock(), 0, list[int]()

    def ask(record: PeerRecord) -> pb.AcquireReply:
        asked.append(number := peers.index(record))
        if number == 0:
            return pb.AcquireReply(round=3)
        return pb.AcquireReply(round=3, microbatches=[7]) if number == leads else other_leader()

    def other_leader() -> pb.AcquireReply:
        return pb.AcquireReply(leader_peer_id=peers[leads].peer_id)

    acquire, peers = _client(3, ask, clock)
    for _ in range(4):
        assert (reply := await acquire()) is not None
        assert not reply.microbatches
        clock.advance(DOUBT_SECONDS / 2)
    assert asked == [0, 0, 1, 0, 0], "once in a while another peer is asked, which still names the first one"
    leads = 2
    clock.advance(DOUBT_SECONDS)
    assert (reply := await acquire()) is not None
    assert list(reply.microbatches) == [7]
    assert asked[5:] == [1, 2]
    assert await acquire() is not None
    assert asked[7:] == [2], "it stays with the new leader"


async def test_an_answer_that_makes_no_sense_is_none() -> None:
    answers = [pb.AcquireReply(round=1 << 58, microbatches=[1]), pb.AcquireReply(round=3, microbatches=[1])]

    class Servicer(LeaseServiceServicer):
        async def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.AcquireReply:
            return answers.pop(0)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_LeaseServiceServicer_to_server(Servicer(), server)
    port = bind_server(server, "127.0.0.1", 0, None)
    await server.start()
    record = PeerRecord(
        peer_id="0" * 40, announced_at=0.0, stage=0, endpoint=f"127.0.0.1:{port}", state=PeerState.SERVING
    )
    channels = ChannelPool(insecure=True)
    client = LeaseClient(
        config=SYNCHRONOUS, trainer_id="trainer", peers=lambda stage: [record], channels=channels, clock=ManualClock()
    )
    leased = [await client.acquire(Block(0), [0], holding=(), released=(), wait_seconds=0.0) for _ in range(2)]
    assert leased[0] is None
    assert leased[1] is not None
    assert leased[1].round == 3
    await channels.close()
    await server.stop(None)


def _complete() -> RoundView:
    """A round that has all its microbatches, so that there is nothing to grant."""
    size = SYNCHRONOUS.microbatches_per_round
    return RoundView(
        round=0, microbatches=range(size), committed=set(range(size)), counted=set(range(size)), lost=set(),
        highest_microbatch=size - 1, quiet_seconds=0.0, awaits_reports=False, misses_member=False, complete=True,
    )  # fmt: skip


async def test_who_waits_is_answered_when_something_changes() -> None:
    size, complete = SYNCHRONOUS.microbatches_per_round, _complete()
    leader = Leader(0, complete)
    await leader.gather()
    waiting = asyncio.create_task(leader.servicer.Acquire(leader.request(count=2, wait_seconds=5.0), CONTEXT))
    await asyncio.sleep(0)
    leader.clock.advance(GAP_SECONDS)
    await asyncio.sleep(0)
    assert not waiting.done(), "nothing has happened"
    leader.view = dataclasses.replace(
        complete, round=1, microbatches=range(size, 2 * size), committed=set(), complete=False
    )
    leader.changed.set()
    async with asyncio.timeout(5):
        # The answer comes at once, because the last try was long ago.
        reply = await waiting
    assert (list(reply.microbatches), reply.round) == ([size, size + 1], 1)


async def test_no_more_than_a_few_requests_of_one_caller_wait() -> None:
    """Each request that waits is tried several times a second."""
    nothing_to_do = RoundView(
        round=0, microbatches=range(8), committed=set(), counted=set(), lost=set(), highest_microbatch=-1,
        quiet_seconds=0.0, awaits_reports=True, misses_member=False, complete=True,
    )  # fmt: skip
    leader = Leader(0, nothing_to_do)

    def ask(number: int, context: Context) -> asyncio.Task[pb.AcquireReply]:
        request = leader.request(f"made up {number}", count=1, wait_seconds=5.0)
        return asyncio.create_task(leader.servicer.Acquire(request, context))

    many, other = [ask(n, CONTEXT) for n in range(MAX_WAITING + 10)], ask(0, Context("192.0.2.2"))
    await asyncio.sleep(0)
    assert [task.done() for task in many] == MAX_WAITING * [False] + 10 * [True]
    assert not other.done()
    for task in (*many, other):
        task.cancel()
    await asyncio.wait((*many, other))
    again = ask(0, CONTEXT)
    await asyncio.sleep(0)
    assert not again.done(), "there is room again"
    again.cancel()
    await asyncio.wait([again])


async def test_a_stage_has_what_it_lacks_replayed() -> None:
    reply = await acquire(1, 3, newest_round=3, newest_is_granted=True, newest_is_complete=True)
    first = 3 * SYNCHRONOUS.microbatches_per_round
    assert (list(reply.microbatches), reply.accumulate_only_at) == ([first, first + 1], 1)


async def test_a_trainer_is_told_what_another_one_ran_meanwhile() -> None:
    last = SYNCHRONOUS.microbatches_per_round - 1
    assert list((await acquire(0, 0, holding=[0, last])).counted) == [last]


async def test_what_stage_0_has_not_begun_is_not_lost() -> None:
    """A stage may be a round ahead of stage 0, when stage 0 repeats a round: no trainer could run what that stage waits
    for."""
    reply = await acquire(1, 4, newest_round=3)
    assert (list(reply.microbatches), reply.round) == ([], 4)


class Refused(Exception):
    """What a call was refused for."""


class RefusingContext(Context):
    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: object = ()) -> None:
        raise Refused(details)


@pytest.mark.parametrize(("variant", "paths", "is_right"), [
    (0, [0, 1, 0], True), (1, [3, 2], True), (0, [], True),
    (0, [0, 2], False), (1, [0], False), (0, [4], False), (0, [1 << 31], False), (0, [0] * (MAX_COUNT + 1), False),
])  # fmt: skip
async def test_paths_that_do_not_lead_through_the_block_are_refused(
    variant: int, paths: list[int], is_right: bool
) -> None:
    stages = dataclasses.replace(SYNCHRONOUS.stages, variants=(2, 2, 1))
    config = dataclasses.replace(SYNCHRONOUS, stages=stages)
    view = dataclasses.replace(_complete(), committed=set(), counted=set(), highest_microbatch=-1, complete=False)
    clock = ManualClock()
    servicer = LeaseServicer(
        config=config, block=Block(0, variant), clock=clock, rng=random.Random(0),
        lead=lambda: view, changed=clock.sleep,
    )  # fmt: skip
    address = Address(run_id=config.run_id, protocol_version=PROTOCOLS.newest, variant=variant)
    request = pb.AcquireRequest(address=address, trainer_id="trainer", count=len(paths) or 2, paths=paths)
    context = RefusingContext("192.0.2.1")
    if not is_right:
        with pytest.raises(Refused, match=r"at most 1024 paths, which lead through stage 0"):
            await servicer.Acquire(request, context)
        return
    await servicer.Acquire(request, context)
    for _ in range(2):
        clock.advance(GATHER_SECONDS / 2)
        reply = await servicer.Acquire(request, context)
    wanted = paths or config.paths_through(Block(0, variant))
    assert reply.microbatches
    assert {config.path_of(index) for index in reply.microbatches} <= {*wanted}
