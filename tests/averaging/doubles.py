"""Peers and a network with scripted faults, for the tests of averaging."""

import asyncio
import contextvars
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, cast

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.timing import Timing
from swarm.averaging.averager import Averager
from swarm.averaging.wire.context import Context, Tasks
from swarm.averaging.wire.transport import Method, Payload, Reply, Request, Transport
from swarm.compression.codec import Buffer
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.events import Events
from swarm.machine.clock import Clock
from swarm.rpc.transfers import Turns
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.tally import Sign
from swarm.types import Block, PeerRecord, PeerState
from tests.averaging.fake_stage import FakeStage, make_config
from tests.support.virtual_time import LoopClock

QUICK = Timing(
    report_gap_seconds=0.005, heartbeat_seconds=0.05, late_seconds=0.3, report_seconds=0.3, call_seconds=0.2,
    reconnect_seconds=0.1, fresh_seconds=0.4, takeover_seconds=0.4, missed_seconds=2.0, probe_seconds=0.2,
    exclusion_seconds=0.2, max_exclusion_seconds=2.0, look_seconds=0.5, idle_seconds=3.0, begin_seconds=0.5,
    average_seconds=1.0, commit_seconds=1.0, grace_seconds=0.05, barrier_seconds=0.2, awaited_seconds=1.0,
    silence_seconds=0.5, shared_seconds=4.0, retry_seconds=0.02, max_retry_seconds=0.2,
)  # fmt: skip
"""Short timeouts, for peers in one process."""


def peer_id(number: int) -> str:
    """The id of a peer; ids are in the order of the peers' numbers."""
    return f"{number:040x}"


def record(number: int, stage: int = 0, endpoint: str = "memory:1") -> PeerRecord:
    """A serving peer's announcement."""
    return PeerRecord(
        peer_id=peer_id(number), stage=stage, endpoint=endpoint, state=PeerState.SERVING, announced_at=0.0
    )


def make_context(
    own: PeerRecord,
    peers: Callable[[Block], Sequence[PeerRecord]] = lambda block: (),
    *,
    config: RunConfig | None = None,
    timing: Timing = QUICK,
    clock: Clock | None = None,
) -> Context:
    """The context of a peer without a network, on virtual time unless a clock is given."""
    return Context(
        config=config or make_config(),
        own=own,
        peers=peers,
        transport=cast("Transport", None),
        clock=clock or LoopClock(),
        timing=timing,
        events=Events(),
        tasks=Tasks(),
    )


class LaggingClock(LoopClock):
    """The clock of a peer that is held up: its event loop does nothing while time passes."""

    lost_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.lost_seconds


Hook = Callable[[str, int, int], Awaitable[None]]


class Peer:
    """One peer of a network: stage, averager, and the task that runs it."""

    def __init__(self, number: int, stage_number: int, network: "Network", lineage: str) -> None:
        self.number, self.block = number, Block(stage_number)
        self.record = self._announced = record(number, stage_number)
        self.stage = network.make_stage(stage_number, lineage)
        self.stage.carries = not network.config.rounds.synchronous
        self.dead = asyncio.Event()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.clock = LaggingClock()
        context = Context(
            config=network.config,
            own=self.record,
            peers=network.directory,
            transport=MemoryTransport(network, self),
            clock=self.clock,
            timing=network.timing,
            sign=network.sign_as(number),
            turns=Turns(self.clock, is_training=lambda: True) if network.takes_turns else None,
        )
        self.averager = Averager(context, self.stage)
        self.stage.averager = self.averager
        self.instead: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        """By method, a function that answers requests in place of the real handler."""
        self.context = contextvars.copy_context()
        """The context in which its handlers run, whichever peer calls: see tests/support/virtual_time, PROCESS."""
        self.task: asyncio.Task[None] | None = None

    async def handle(self, method: Method[Request, Reply], request: Request) -> Reply:
        """Answer another peer."""
        if method.name in self.instead:
            reply: Reply = await self.instead[method.name](request)
            return reply
        return await self.averager.handlers.handle(method, request)

    @property
    def announcement(self) -> PeerRecord:
        """Its record, which it renews with each round."""
        stage, said = self.stage, self._announced
        # The directory is read so often that copies would be a fifth of a test.
        if (said.round, said.samples, said.lineage) != (stage.round, stage.run_samples, stage.lineage):
            self._announced = said.model_copy(
                update={"round": stage.round, "samples": stage.run_samples, "lineage": stage.lineage}
            )
        return self._announced


class Network:
    """Peers in one process, and the faults between them.

    Attributes:
        before: awaited before a call reaches its handler, and before the next piece of a download is sent. It may kill,
            delay or raise.
        after: awaited after the handler has answered, before the caller gets the answer.
        tamper: sees each piece of a download that a peer sends, and may change it.
        sign_as: gives what signs with the key of a new peer; None for a peer without a key.
        takes_turns: whether a new peer serves downloads one after the other.
        delivers_late: whether a call still reaches its handler, once `before` returns, after its living caller has
            given up.
    """

    def __init__(self, config: RunConfig, stage_type: type[FakeStage] = FakeStage) -> None:
        self.config = config
        self.delivers_late = False
        self.takes_turns = False
        self.late: set[asyncio.Future[Any]] = set()
        self.peers: dict[str, Peer] = {}
        self.timing = QUICK
        self.calls: list[tuple[str, int, int]] = []
        self.cut: set[frozenset[int]] = set()
        self.make_stage: Callable[[int, str], FakeStage] = lambda stage_number, lineage: stage_type(lineage)
        self.sign_as: Callable[[int], Sign | None] = lambda number: None
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self.tamper: Callable[[int, pb.DownloadReply], None] = lambda target, reply: None

    def directory(self, block: Block) -> list[PeerRecord]:
        """All peers that were ever announced, including dead ones, as in a DHT."""
        return [peer.announcement for peer in self.peers.values() if peer.block == block]

    def add(self, number: int, stage_number: int = 0, *, lineage: str = "00") -> Peer:
        """Add a new peer, which is running."""
        peer = self.peers[peer_id(number)] = Peer(number, stage_number, self, lineage)
        peer.task = asyncio.create_task(peer.averager.run())
        return peer

    def kill(self, number: int) -> None:
        """End a peer as kill -9 does: without a farewell, and every call to it fails."""
        peer = self.peers[peer_id(number)]
        peer.dead.set()
        assert peer.task is not None
        peer.task.cancel()

    def freeze(self, number: int) -> None:
        """Stop a peer as SIGSTOP does, as far as the network sees: nothing comes in or goes out."""
        self.peers[peer_id(number)].thawed.clear()

    def thaw(self, number: int) -> None:
        """Let a frozen peer go on, as SIGCONT does."""
        self.peers[peer_id(number)].thawed.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End all peers. If one of them ended with an error, raise the error."""
        for peer in self.peers.values():
            assert peer.task is not None
            peer.task.cancel()
        for delivery in self.late:
            delivery.cancel()
        for peer in self.peers.values():
            assert peer.task is not None
            with suppress(asyncio.CancelledError):
                await peer.task


class MemoryTransport(Transport):
    """One peer's calls to the others."""

    def __init__(self, network: Network, own: Peer) -> None:
        self._network = network
        self._own = own

    async def call(
        self, peer: PeerRecord, method: Method[Request, Reply], request: Request, *, timeout_seconds: float
    ) -> Reply:
        target = self._target(peer)
        copy = type(request).FromString(request.SerializeToString())  # type: ignore[attr-defined]  # a message
        return await self._reach(target, method.name, lambda: target.handle(method, copy), timeout_seconds)

    async def exchange(
        self, peer: PeerRecord, opening: pb.ExchangeOpen, part: Buffer, *, reply_bytes: int, timeout_seconds: float,
        silence_seconds: float | None = None,
    ) -> Payload:  # fmt: skip
        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(part)

        target = self._target(peer)
        seconds = math.inf if silence_seconds is None else silence_seconds
        reduced = await self._reach(
            target,
            "Exchange",
            lambda: target.averager.handlers.serve(opening, pieces()),
            min(seconds, timeout_seconds),
        )
        assert len(reduced.encoded) == reply_bytes
        told = pb.Reduced(deviations=messages.pack_deviations(reduced.deviations))
        deviations = messages.unpack_deviations(pb.Reduced.FromString(told.SerializeToString()).deviations)
        return Payload(encoded=bytes(reduced.encoded), squared_norm=reduced.squared_norm, deviations=deviations)

    async def shared(
        self, peer: PeerRecord, request: pb.SharedRequest, *, reply_bytes: int, timeout_seconds: float
    ) -> Buffer:
        target = self._target(peer)
        encoded = await self._reach(target, "Shared", lambda: target.averager.handlers.shared(request), timeout_seconds)
        assert len(encoded) == reply_bytes
        return bytes(encoded)

    async def ping(self, peer: PeerRecord, *, timeout_seconds: float) -> None:
        async def answer() -> None:
            pass

        await self._reach(self._target(peer), "Ping", answer, timeout_seconds)

    def is_connected(self, peer: PeerRecord) -> bool:
        return not self._target(peer).dead.is_set()

    async def download(
        self, peer: PeerRecord, request: pb.DownloadRequest, *, silence_seconds: float
    ) -> AsyncIterator[pb.DownloadReply]:
        target = self._target(peer)
        replies = target.averager.handlers.download(pb.DownloadRequest.FromString(request.SerializeToString()))

        async def next_piece() -> pb.DownloadReply | None:
            async for reply in replies:
                return pb.DownloadReply.FromString(reply.SerializeToString())
            return None

        while (piece := await self._reach(target, "Download", next_piece, silence_seconds)) is not None:
            self._network.tamper(target.number, piece)
            yield piece

    def _target(self, peer: PeerRecord) -> Peer:
        return self._network.peers[peer.peer_id]

    async def _reach(
        self, target: Peer, name: str, work: Callable[[], Coroutine[Any, Any, Reply]], seconds: float
    ) -> Reply:
        async def deliver() -> Reply:
            await self._own.thawed.wait()
            self._network.calls.append((name, self._own.number, target.number))
            await self._network.before(name, self._own.number, target.number)
            if target.dead.is_set() or frozenset((self._own.number, target.number)) in self._network.cut:
                raise PeerUnavailable(f"{target.number} is unreachable", is_unreachable=True)
            await target.thawed.wait()
            reply = await asyncio.get_running_loop().create_task(work(), context=target.context)
            await self._network.after(name, self._own.number, target.number)
            await target.thawed.wait()
            await self._own.thawed.wait()
            return reply

        async def die() -> None:
            await target.dead.wait()

        delivery, death = asyncio.ensure_future(deliver()), asyncio.ensure_future(die())
        try:
            await asyncio.wait([delivery, death], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if delivery.done():
                return delivery.result()
            if target.dead.is_set():
                raise PeerUnavailable(f"{target.number} died", is_unreachable=True)
            raise DeadlineExceeded(f"{name} to {target.number}")
        finally:
            if self._network.delivers_late and not self._own.dead.is_set() and not delivery.done():
                self._network.late.add(delivery)
                # The error counts as retrieved.
                delivery.add_done_callback(lambda done: done.cancelled() or done.exception())
            else:
                delivery.cancel()
            death.cancel()
            del delivery, death  # These tasks hold the errors that they raise, which hold this frame.


async def _nothing(name: str, source: int, target: int) -> None:
    pass


@asynccontextmanager
async def network_of(
    config: RunConfig, *numbers: int, timing: Timing = QUICK, stage_type: type[FakeStage] = FakeStage
) -> AsyncIterator[Network]:
    """A running network of one stage with these peers."""
    async with Network(config, stage_type) as network:
        network.timing = timing
        for number in numbers:
            network.add(number)
        yield network


async def until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    """Wait for a condition, and fail if it is not true in time. In virtual time it is checked less and less often."""
    look_seconds = min(0.1, max(0.005, seconds / 2000))
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - many peers decide it, so there is no single event to wait for
            await asyncio.sleep(look_seconds)


def stages(network: Network, *numbers: int) -> list[FakeStage]:
    """The stages of some peers."""
    return [peer.stage for peer in network.peers.values() if peer.number in numbers]


def all_past(members: list[FakeStage], round_number: int) -> bool:
    """Whether all peers have committed a round."""
    return all(stage.round > round_number for stage in members)


def broken(network: Network, number: int, method: str, fault: str) -> None:
    """From now on let a member fail in one kind of call, while it reports as if nothing were wrong."""
    peer = network.peers[peer_id(number)]

    async def fail(request: Any) -> Any:
        match fault:
            case "error":  # After a MemoryError, for example, the servicer answers with an error.
                raise PeerUnavailable("internal error: MemoryError")
            case "refusal":
                refusal = pb.Refusal(reason="not with me", promised=request.ballot, round=request.round)
                return pb.AverageReply(refusal=refusal)
            case _:
                reply = await peer.averager.handlers.handle(Method[Any, Any](method), request)
                await asyncio.sleep(60)
                return reply

    peer.instead[method] = fail
