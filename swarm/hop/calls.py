"""One attempt of a hop over one stream to one peer: a microbatch, an evaluation, or a round's weights kept for it.

The hop chooses the peer, and asks another one if the attempt fails. Every wait has a deadline.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from swarm.errors import Overloaded, PeerUnavailable
from swarm.hop.answers import HopListener, HopReply, Tensors, obstacle_of, pack_route, unpack_route, well_formed
from swarm.hop.retries import HopContext, Retries
from swarm.machine.clock import Clock
from swarm.routing.throughput import Line, Observation
from swarm.rpc.ask import Stream
from swarm.rpc.bounds import CHUNK_BYTES, require_bounds
from swarm.rpc.channels import Patience
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import (
    GRADIENT,
    HIDDEN,
    NewBytes,
    Piece,
    TensorReader,
    TensorSpec,
    frames,
    parsed,
    require_in_range,
    stage_stub,
)
from swarm.training import samples
from swarm.training.samples import Microbatch
from swarm.types import LARGEST_COUNT, LARGEST_STAGE, LONGEST_REASON, PeerId, PeerRecord

EncodingsIn = Callable[[int], Mapping[str, str]]
"""The encodings of a round's activations and gradients, by their names."""
MOST_CREDITS = 4096
"""The most peers whose credit is remembered. Of further ones some are forgotten: without one a peer is asked first."""


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
        self._answers_since: float | None = None
        self.answer_seconds = 0.0
        """From the first message of the answer's tensors to the last one."""

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

    def answers(self) -> None:
        now = self._clock.monotonic()
        self._answers_since = self._answers_since or now
        self.answer_seconds = now - self._answers_since

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
        self, context: HopContext, *, memory: NewBytes, encodings_in: EncodingsIn, wants_statements: bool
    ) -> None:
        """`memory` makes the memory of the tensors that are answered."""
        self._context = context
        self._block, self._clock, self._limits = context.block, context.clock, context.limits
        self._memory, self._encodings_in, self._wants_statements = memory, encodings_in, wants_statements
        self.line = Line()
        self._num_sending = 0
        self._credits: set[PeerId] = set()
        """Peers whose last answer granted room for one more microbatch, which may be sent without asking."""
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()
        """Over a slow line a peer is handed one microbatch after the other: side by side, all of them would be late."""

    async def train(
        self, record: PeerRecord, microbatch: Microbatch, tensors: Tensors, listener: HopListener, retries: Retries
    ) -> HopReply:
        """Let a peer, and all stages after it, compute one microbatch. Raises any SwarmError that `translate` gives.
        Cancellation closes the stream, which makes the peer roll back."""
        peer_id = PeerId(record.peer_id)
        specs = dict[str, TensorSpec]()
        if HIDDEN in tensors and microbatch.answers_gradient(self._block.stage):
            encoding = self._encodings_in(microbatch.round)[GRADIENT]
            specs[GRADIENT] = TensorSpec(shape=tuple(tensors[HIDDEN].shape), encoding=encoding)
        reader = TensorReader(specs, self._memory)
        retries.offered(peer_id)
        patience = self._patience(record, tensors, specs)
        with contextlib.closing(_Way(self._clock, self.line)) as way:
            # The peer expects the opening as soon as there is a stream, so the turn comes first.
            async with self._turn(peer_id, patience) as turn, Stream(self._stub(record, patience).Train()) as call:
                opening = self._opening(peer_id, microbatch, retries, patience)
                await self._hand_over(call, opening, tensors, way, retries, patience)
                await turn.aclose()
                retries.route.handed_over(peer_id)
                listener.routed(retries.route.peers)
                done = await self._follow(call, peer_id, microbatch, reader, way, listener, retries, patience)
                _require_targets(done.num_targets, tensors)
                self._learn(record, microbatch, done, way)
                return HopReply(
                    loss=done.loss, tensors=reader.tensors, num_busy=retries.num_busy, _call=call,
                    route={**unpack_route(done.route, after=self._block.stage), self._block: peer_id},
                    num_reroutes=min(LARGEST_COUNT, done.num_reroutes + retries.num_failures),
                    anchor_round=done.anchor_round if done.HasField("anchor_round") else None,
                )  # fmt: skip

    def _patience(self, record: PeerRecord, there: Tensors, back: Mapping[str, TensorSpec]) -> Patience:
        """What a call with these tensors is given."""
        num_bytes = sum(tensor.nbytes for tensor in there.values()), sum(spec.num_bytes for spec in back.values())
        return self._context.patience(record, max(num_bytes))

    def _silence_seconds(self, patience: Patience) -> float:
        return self._limits.silence_seconds + patience.more_seconds

    def _stub(self, record: PeerRecord, patience: Patience) -> Any:
        """StageService's stub. It counts as Any: generated types expect all requests when a call begins."""
        context = self._context
        return context.own(record) or stage_stub(context.channels.channel(record, bulk=patience.is_needed))

    @contextlib.asynccontextmanager
    async def _turn(self, peer_id: PeerId, patience: Patience) -> AsyncIterator[contextlib.AsyncExitStack]:
        """Wait for the turn to hand a peer something over a slow line. It ends with the block, or once the stack that
        is given is closed."""
        async with contextlib.AsyncExitStack() as turn:
            if patience.is_needed:
                await turn.enter_async_context(self._turns.setdefault(peer_id, asyncio.Lock()))
                if peer_id in self._context.router.banned(self._block):
                    raise PeerUnavailable("it failed the microbatch before this one", is_unreachable=True)
            yield turn

    def _opening(self, peer_id: PeerId, microbatch: Microbatch, retries: Retries, patience: Patience) -> pb.Open:
        is_known = peer_id == retries.route.own
        is_eager = not is_known and peer_id in self._credits
        if is_eager:
            self._credits.remove(peer_id)
        return pb.Open(
            address=self._context.address(), microbatch=microbatch.index, round=microbatch.round,
            num_samples=microbatch.num_samples, hints=pack_route(retries.route.peers),
            accumulate_only_at=microbatch.accumulate_only_at,
            rerouted_backward=retries.route.forward_passed and not is_known, eager=is_eager,
            has_others=retries.has_others, way_seconds=microbatch.way_seconds,
            small_messages=patience.is_needed, wants_statement=self._wants_statements,
        )  # fmt: skip

    async def _hand_over(
        self, call: Stream, opening: pb.Open, tensors: Tensors, way: _Way, retries: Retries, patience: Patience
    ) -> None:
        """Ask the peer whether it has room, and send what it needs; with a credit, do both at once."""
        if opening.eager:
            way.begin(tensors)
            await self._send(call, pb.TrainRequest(open=opening), tensors, opening.round, patience)
            _admitted(_reply(await call.read(self._silence_seconds(patience)))[0])
            way.heard()
            retries.accepted()
            return
        way.asks()
        seconds = self._limits.open_seconds + patience.more_seconds
        await call.write(pb.TrainRequest(open=opening), seconds)
        accepted = _admitted(_reply(await call.read(seconds))[0])
        way.answered()
        retries.accepted()
        if not accepted.has_tensors:
            way.begin(tensors)
            await self._send(call, pb.TrainRequest(), tensors, opening.round, patience)

    @property
    def is_sending(self) -> bool:
        return self._num_sending > 0

    async def _send(self, call: Stream, request: Any, tensors: Tensors, round_number: int, patience: Patience) -> None:
        """Write a round's tensors in several messages. The first has the fields of `request`."""
        encodings = self._encodings_in(round_number)
        self._num_sending += 1
        try:
            for message in frames(request, tensors, encodings, whole=call.is_local, chunk_bytes=patience.chunk_bytes):
                await call.write(message, self._silence_seconds(patience))
        finally:
            self._num_sending -= 1

    async def _follow(
        self, call: Stream, peer_id: PeerId, microbatch: Microbatch, reader: TensorReader, way: _Way,
        listener: HopListener, retries: Retries, patience: Patience,
    ) -> pb.Done:  # fmt: skip
        stalled_since = self._clock.monotonic()
        while True:
            reply, pieces = _reply(await call.read(self._silence_seconds(patience)))
            way.heard()
            if pieces:
                way.answers()
            with well_formed():
                for piece in pieces:
                    reader.feed(piece)
            if reply.HasField("done"):
                await _require_complete(reader)
                return reply.done
            if reply.HasField("progress"):
                progress, own = reply.progress, self._block.stage
                if progress.stage != own:
                    stalled_since = self._clock.monotonic()
                else:
                    waited_seconds = self._clock.monotonic() - stalled_since
                    retries.require_no_stall(peer_id, microbatch.num_samples, waited_seconds)
                listener.progress(progress.stage, obstacle=obstacle_of(progress))
                if retries.route.progressed(peer_id, progress.stage, unpack_route(progress.route, after=own)):
                    listener.routed(retries.route.peers)
            elif not pieces:
                _admitted(reply)
                raise PeerUnavailable("it was accepted twice")

    def _learn(self, record: PeerRecord, microbatch: Microbatch, done: pb.Done, way: _Way) -> None:
        peer_id = PeerId(record.peer_id)
        if way.seconds is not None:
            self._context.channels.transferred(record, max(way.seconds, way.answer_seconds))
        if done.credits:
            self._credits.add(peer_id)
            if len(self._credits) > MOST_CREDITS:
                self._credits.pop()
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
        self._context.router.succeeded(self._block, peer_id, reply)

    async def evaluate(
        self, record: PeerRecord, tensors: Tensors, held: Sequence[pb.HeldRound], listener: HopListener, *, path: int
    ) -> float:
        """Ask one peer, as Hop.evaluate does. Raises any SwarmError that `translate` gives."""
        num_samples, num_tokens = tensors["tokens"].shape
        request = pb.EvaluateOpen(
            address=self._context.address(path), round=held[0].round, num_samples=num_samples,
            sequence_length=num_tokens - 1, later=held[1:],
        )  # fmt: skip
        patience = self._patience(record, tensors, {})
        async with Stream(self._stub(record, patience).Evaluate()) as call:
            await self._send(call, pb.EvaluateRequest(open=request), tensors, request.round, patience)
            await call.done_writing()
            while not (reply := await call.read(self._silence_seconds(patience))).HasField("evaluated"):
                if reply.HasField("progress"):
                    listener.progress(reply.progress.stage, obstacle=obstacle_of(reply.progress))
            call.cancel()
            _require_targets(reply.evaluated.num_targets, tensors)
            return float(reply.evaluated.loss)

    async def hold(self, record: PeerRecord, newest_round: int, listener: HopListener, *, path: int) -> Hold:
        """Open a hold, as Hop.hold does, at one peer, which asks one of the next stage, and so on to the last. Raises
        what `translate` gives. Cancellation ends the stream."""
        request = pb.HoldRequest(address=self._context.address(path), newest_round=newest_round)
        async with Stream(self._stub(record, Patience()).Hold(request)) as stream:
            # The peer gives signs of life while it asks the later stages.
            while not (reply := await stream.read(self._limits.silence_seconds)).HasField("held"):
                if reply.HasField("progress"):
                    listener.progress(reply.progress.stage, obstacle=obstacle_of(reply.progress))
            with well_formed():
                require_bounds(reply.held, finite=True)
        # The answer may name peers of other stages. That does no harm, because they are only hints.
        own = pb.HeldRound(peer_id=record.peer_id, round=reply.held.round)
        return Hold(stream, [own, *reply.held.later[: LARGEST_STAGE - self._block.stage]])


def _admitted(reply: pb.TrainReply) -> pb.Accepted:
    if reply.HasField("busy"):
        raise Overloaded(reply.busy.reason[:LONGEST_REASON], retry_after_seconds=reply.busy.retry_after_seconds)
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
            encoding = reader.expected[name].encoding
            if tensor.nbytes <= CHUNK_BYTES:
                require_in_range(name, tensor, encoding)
            else:
                await asyncio.to_thread(require_in_range, name, tensor, encoding)
