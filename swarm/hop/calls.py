"""One attempt of a hop over one stream to one peer: a microbatch, an evaluation, or a round's weights kept for it.

The hop chooses the peer, and asks another one if the attempt fails. Every wait has a deadline.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm.errors import Overloaded, PeerUnavailable
from swarm.hop.answers import HopListener, HopReply, Tensors, obstacle_of, pack_route, unpack_route, well_formed
from swarm.hop.retries import HopLimits, Retries
from swarm.machine.clock import Clock
from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.rpc.ask import Stream, address_of
from swarm.rpc.bounds import require_bounds
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import CHUNK_BYTES, NewBytes, Piece, TensorReader, TensorSpec, frames, parsed, require_in_range
from swarm.training import samples
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerId, PeerRecord

OpenStub = Callable[[PeerRecord], Any]
"""Gives a service's stub for a peer. It counts as Any: generated types expect all requests when a call begins."""


_TOGETHER = 8
"""The arrivals that make one measurement of a line."""
_KEPT = 8
"""The measurements of which the fastest counts: what the line carries when nothing else holds up what is sent."""


class Line:
    """Sends tensors to the next stage, knows whether any are on their way, and measures how fast they arrive.

    The fastest of the last measurements counts, as in BBR (Cardwell et al., "BBR: Congestion-Based Congestion Control",
    2016): a busy process at the other end only makes a line look slower.
    """

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._num_sending = 0
        self._num_on_way = 0
        self._since = 0.0
        self._num_arrived = self._num_arrived_bytes = 0
        self._on_way_seconds = 0.0
        self._measured: deque[float] = deque(maxlen=_KEPT)

    @property
    def bytes_per_second(self) -> float:
        """The tensors of microbatches that have arrived, by the time in which any were on their way; 0 before that."""
        if self._measured:
            return max(self._measured)
        return self._num_arrived_bytes / self._on_way_seconds if self._on_way_seconds else 0.0

    def leaves(self, now: float) -> None:
        """Note that a microbatch's tensors are on their way."""
        self._since = self._since if self._num_on_way else now
        self._num_on_way += 1

    def arrives(self, num_bytes: int, now: float) -> None:
        """Note that they have arrived, or that they will not: then they are 0 bytes."""
        self._on_way_seconds, self._since = self._on_way_seconds + now - self._since, now
        self._num_on_way -= 1
        self._num_arrived_bytes += num_bytes
        self._num_arrived += num_bytes > 0
        if self._num_arrived == _TOGETHER and self._on_way_seconds:
            self._measured.append(self._num_arrived_bytes / self._on_way_seconds)
            self._num_arrived, self._num_arrived_bytes, self._on_way_seconds = 0, 0, 0.0

    @property
    def is_busy(self) -> bool:
        return self._num_sending > 0

    async def send(self, call: Stream, request: Any, tensors: Tensors) -> None:
        """Write tensors in several messages. The first has the fields of `request`."""
        self._num_sending += 1
        try:
            for message in frames(request, tensors, whole=call.is_local):
                await call.write(message, self._silence_seconds)
        finally:
            self._num_sending -= 1


class _Way:
    """How long tensors take to a peer: from the first byte to the peer's next message.

    The peer sends that message as soon as it has all tensors, before it computes. The time of writing would say less,
    because the system's buffers take megabytes at once.
    """

    def __init__(self, clock: Clock, line: Line) -> None:
        self._clock, self._line = clock, line
        self._asked_at = clock.monotonic()
        self._sent_at: float | None = None
        self.seconds: float | None = None
        """None until the peer's next message has come, and if no tensors are sent."""
        self.round_trip_seconds: float | None = None
        """Of the request that comes before the tensors; None if there was none."""
        self.num_bytes = 0

    def asks(self) -> None:
        self._asked_at = self._clock.monotonic()

    def answered(self) -> None:
        self.round_trip_seconds = self._clock.monotonic() - self._asked_at

    def begin(self, tensors: Tensors) -> None:
        self._sent_at = self._clock.monotonic()
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._line.leaves(self._sent_at)

    def heard(self) -> None:
        if self._sent_at is not None and self.seconds is None:
            now = self._clock.monotonic()
            self.seconds = now - self._sent_at
            self._line.arrives(self.num_bytes, now)

    def close(self) -> None:
        """Note that the call is over: what has not arrived yet will not arrive."""
        if self._sent_at is not None and self.seconds is None:
            self._line.arrives(0, self._clock.monotonic())


class Hold:
    """A round that peers hold until `close`, and which peer holds it, from this stage to the last one."""

    def __init__(self, stream: Stream, held: Sequence[pb.HeldRound]) -> None:
        self.held = tuple(held)
        self._stream = stream

    def close(self) -> None:
        self._stream.cancel()


class Calls:
    """Calls to peers of one block, each over a stream of its own."""

    def __init__(
        self, *, run_id: str, block: Block, reply_specs: Mapping[str, TensorSpec], stub: OpenStub, router: Router,
        clock: Clock, limits: HopLimits, line: Line, memory: NewBytes,
    ) -> None:  # fmt: skip
        """`memory` makes the memory of the tensors that are answered."""
        self._run_id, self._block = run_id, block
        self._reply_specs = reply_specs
        self._stub = stub
        self._router = router
        self._clock = clock
        self._limits = limits
        self._line = line
        self._memory = memory
        self._credits: set[PeerId] = set()
        """Peers whose last answer granted room for one more microbatch, which may be sent without asking."""

    async def train(
        self, record: PeerRecord, microbatch: Microbatch, tensors: Tensors, listener: HopListener, retries: Retries
    ) -> HopReply:
        """Let a peer, and all stages after it, compute one microbatch. Raises any SwarmError that `translate` gives.
        Cancellation closes the stream, which makes the peer roll back."""
        peer_id = PeerId(record.peer_id)
        specs = self._reply_specs if microbatch.answers_gradient(self._block.stage) else {}
        reader = TensorReader(specs, self._memory)
        retries.offered(peer_id)
        with contextlib.closing(_Way(self._clock, self._line)) as way:
            async with Stream(self._stub(record).Train()) as call:
                await self._hand_over(call, self._opening(peer_id, microbatch, retries), tensors, way, retries)
                retries.route.handed_over(peer_id)
                listener.routed(retries.route.peers)
                done = await self._follow(call, peer_id, microbatch, reader, way, listener, retries)
                _require_targets(done.num_targets, tensors)
                self._learn(peer_id, microbatch, done, way)
                return HopReply(
                    loss=done.loss, tensors=reader.tensors,
                    route={**unpack_route(done.route), self._block: peer_id},
                    num_reroutes=done.num_reroutes + retries.num_failures, num_busy=retries.num_busy, _call=call,
                )  # fmt: skip

    def _opening(self, peer_id: PeerId, microbatch: Microbatch, retries: Retries) -> pb.Open:
        is_known = peer_id == retries.route.own
        is_eager = not is_known and peer_id in self._credits
        if is_eager:
            self._credits.remove(peer_id)
        return pb.Open(
            address=address_of(self._run_id, self._block), microbatch=microbatch.index, round=microbatch.round,
            num_samples=microbatch.num_samples, hints=pack_route(retries.route.peers),
            accumulate_only_at=microbatch.accumulate_only_at,
            rerouted_backward=retries.route.forward_passed and not is_known, eager=is_eager,
            has_others=retries.has_others, way_seconds=microbatch.way_seconds,
        )  # fmt: skip

    async def _hand_over(self, call: Stream, opening: pb.Open, tensors: Tensors, way: _Way, retries: Retries) -> None:
        """Ask the peer whether it has room, and send what it needs; with a credit, do both at once."""
        if opening.eager:
            way.begin(tensors)
            await self._line.send(call, pb.TrainRequest(open=opening), tensors)
            _admitted(_reply(await call.read(self._limits.silence_seconds))[0])
            way.heard()
            retries.accepted()
            return
        way.asks()
        await call.write(pb.TrainRequest(open=opening), self._limits.open_seconds)
        accepted = _admitted(_reply(await call.read(self._limits.open_seconds))[0])
        way.answered()
        retries.accepted()
        if not accepted.has_tensors:
            way.begin(tensors)
            await self._line.send(call, pb.TrainRequest(), tensors)

    async def _follow(
        self, call: Stream, peer_id: PeerId, microbatch: Microbatch, reader: TensorReader, way: _Way,
        listener: HopListener, retries: Retries,
    ) -> pb.Done:  # fmt: skip
        stalled_since = self._clock.monotonic()
        while True:
            reply, pieces = _reply(await call.read(self._limits.silence_seconds))
            way.heard()
            with well_formed():
                for piece in pieces:
                    reader.feed(piece)
            if reply.HasField("done"):
                await _require_complete(reader)
                return reply.done
            if reply.HasField("progress"):
                progress = reply.progress
                if progress.stage != self._block.stage:
                    stalled_since = self._clock.monotonic()
                else:
                    waited_seconds = self._clock.monotonic() - stalled_since
                    retries.require_no_stall(peer_id, microbatch.num_samples, waited_seconds)
                listener.progress(progress.stage, obstacle=obstacle_of(progress))
                if retries.route.progressed(peer_id, progress.stage, unpack_route(progress.route)):
                    listener.routed(retries.route.peers)
            elif not pieces:
                _admitted(reply)
                raise PeerUnavailable("it was accepted twice")

    def _learn(self, peer_id: PeerId, microbatch: Microbatch, done: pb.Done, way: _Way) -> None:
        if done.credits:
            self._credits.add(peer_id)
        else:
            self._credits.discard(peer_id)
        reply = Observation(
            num_samples=microbatch.num_samples,
            # A replay takes less time at a peer than other microbatches do.
            busy_seconds=None if microbatch.is_replay else done.busy_seconds,
            link_seconds=way.seconds,
            round_trip_seconds=way.round_trip_seconds,
            num_bytes=way.num_bytes,
            queue_length=done.queue_length,
        )
        self._router.succeeded(self._block, peer_id, reply)

    async def evaluate(
        self, record: PeerRecord, tensors: Tensors, held: Sequence[pb.HeldRound], listener: HopListener, *, path: int
    ) -> float:
        """Ask one peer, as Hop.evaluate does. Raises any SwarmError that `translate` gives."""
        num_samples, num_tokens = tensors["tokens"].shape
        request = pb.EvaluateOpen(
            address=address_of(self._run_id, self._block, path), round=held[0].round, num_samples=num_samples,
            sequence_length=num_tokens - 1, later=held[1:],
        )  # fmt: skip
        async with Stream(self._stub(record).Evaluate()) as call:
            await self._line.send(call, pb.EvaluateRequest(open=request), tensors)
            await call.done_writing()
            while not (reply := await call.read(self._limits.silence_seconds)).HasField("evaluated"):
                if reply.HasField("progress"):
                    listener.progress(reply.progress.stage, obstacle=obstacle_of(reply.progress))
            call.cancel()
            _require_targets(reply.evaluated.num_targets, tensors)
            return float(reply.evaluated.loss)

    async def hold(self, record: PeerRecord, newest_round: int, listener: HopListener, *, path: int) -> Hold:
        """Open a hold, as Hop.hold does, at one peer, which asks one of the next stage, and so on to the last. Raises
        what `translate` gives. Cancellation ends the stream."""
        request = pb.HoldRequest(address=address_of(self._run_id, self._block, path), newest_round=newest_round)
        async with Stream(self._stub(record).Hold(request)) as stream:
            # The peer gives signs of life while it asks the later stages.
            while not (reply := await stream.read(self._limits.silence_seconds)).HasField("held"):
                if reply.HasField("progress"):
                    listener.progress(reply.progress.stage, obstacle=obstacle_of(reply.progress))
            with well_formed():
                require_bounds(reply.held, finite=True)
        # The answer may name peers of other stages. That does no harm, because they are only hints.
        own = pb.HeldRound(peer_id=record.peer_id, round=reply.held.round)
        return Hold(stream, [own, *reply.held.later])


def _admitted(reply: pb.TrainReply) -> pb.Accepted:
    if reply.HasField("busy"):
        raise Overloaded(reply.busy.reason, retry_after_seconds=reply.busy.retry_after_seconds)
    if not reply.HasField("accepted"):
        raise PeerUnavailable("an answer that neither accepts nor refuses")
    return reply.accepted


def _require_targets(num_targets: int, tensors: Tensors) -> None:
    """Raise PeerUnavailable if the peer averaged its loss over another number of targets than were sent."""
    if num_targets != (expected := samples.amount(tensors).targets):
        raise PeerUnavailable(f"it counts {num_targets} targets, and there are {expected}")


def _reply(data: Any) -> tuple[pb.TrainReply, list[Piece]]:
    with well_formed():
        return parsed(pb.TrainReply, data)


async def _require_complete(reader: TensorReader) -> None:
    if not reader.complete:
        raise PeerUnavailable("the reply ended before its tensors")
    with well_formed():
        for name, tensor in reader.tensors.items():
            if tensor.nbytes <= CHUNK_BYTES:
                require_in_range(name, tensor)
            else:
                await asyncio.to_thread(require_in_range, name, tensor)
