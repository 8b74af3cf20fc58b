"""The hop: one microbatch handed to the next stage, and re-routed when that fails.

Trainers and stage peers use the same code: a trainer is simply "stage -1". Here is the one place that
retries. A microbatch keeps its id through every retry, so that a peer that knows it never counts it twice;
the peers that worked on it before are asked first. Never looks into the tensors.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from swarm.errors import (
    DeadlineExceeded,
    IncompatibleVersion,
    MalformedMessage,
    NotAllowed,
    NotReady,
    Overloaded,
    PeerUnavailable,
    RetriesExhausted,
    RoundMismatch,
    StaleMicrobatch,
    SwarmError,
    TryAnotherPeer,
    TryLater,
    WrongRun,
    WrongStage,
)
from swarm.events.kinds import Events, NoEvents
from swarm.events.kinds import Hop as HopEvent
from swarm.machine.clock import Clock
from swarm.routing.credits import Credits
from swarm.routing.router import Router
from swarm.rpc.bounds import require_bounds
from swarm.rpc.channels import ChannelPool
from swarm.rpc.stream import Stream
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.rpc.wire import TensorReader, TensorSpec, filled, require_in_range
from swarm.training.microbatch import Microbatch
from swarm.types import PROTOCOL_VERSION, PeerId, PeerRecord

logger = logging.getLogger(__name__)

_NOBODY_SECONDS = 1.0
"""A stage whose every peer is banned for longer than this is reported as empty."""

SHORTEST_WAIT_SECONDS = 0.005
"""Until a peer is looked for again when nobody can be asked, at least."""
STALL_FACTOR = 4.0
"""A peer may be what is waited for so many times longer than it was expected to take, waiting in its queue included."""
MOST_DOUBLINGS = 3
"""Of that time, in a microbatch that has stalled as often."""
PAUSE_SECONDS = 1.0
"""For how long a microbatch leaves a peer alone that failed it."""
MOST_SENT_ON = 4
"""Peers that may leave a microbatch to others, since something waits there already; the next one takes it, if it has a
slot. Each is a round trip; after four of them most of what there is to gain is gained (docs/simulation.md)."""
PEERS_TO_SEND_ON = 4
"""One for so many peers of the stage: of a few every sender hears often enough to know better."""

_Answer = TypeVar("_Answer")

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class HopLimits:
    """How patient a hop is."""

    open_seconds: float = 10.0
    """Longest wait for a peer's first answer, when no tensor is sent before it."""
    silence_seconds: float = 15.0
    """Longest wait for any sign of life from a peer that accepted; one comes every 3 s."""
    stall_seconds: float = 120.0
    """Longest time that the next peer may itself be what is waited for, if it is not known to need longer."""
    retry_seconds: float = 0.25
    """Longest wait before asking again when no peer can be asked."""
    max_failures: int = 12
    """Failed peers after which a microbatch is given up. Busy answers and empty stages do not count, nor who joins,
    moves, leaves, or lacks a round's weights."""


class HopListener:
    """Hears how a microbatch fares downstream. The default ignores everything."""

    def progress(self, stage: int, *, no_peer: bool) -> None:
        """`stage` is the deepest one that is being waited for; `no_peer`: nobody serves it."""

    def routed(self, route: Mapping[int, PeerId]) -> None:
        """The route downstream changed."""


@dataclass(eq=False)
class HopReply:
    """A microbatch's answer. Its stream stays open until `ack` or `close`."""

    loss: float
    num_tokens: int
    tensors: Tensors
    route: Mapping[int, PeerId]
    num_reroutes: int
    num_busy: int
    """How often a peer of this hop had no room; one that merely left it to others is not counted."""
    _call: Stream = field(repr=False)

    async def ack(self) -> None:
        """Tell the peer that its answer counts. A lost ack ends in "missing" at that peer, never in "double"."""
        try:
            await self._call.finish(pb.TrainRequest(ack=pb.Ack()), 5.0)
        except PeerUnavailable as error:
            logger.debug("an ack was lost: %s", error)
        finally:
            self._call.cancel()

    def close(self) -> None:
        """Give the answer up: the peer will roll back what it accumulated."""
        self._call.cancel()


@dataclass(eq=False)
class _Retries:
    """What is remembered of one microbatch from attempt to attempt."""

    excluded: dict[PeerId, float] = field(default_factory=dict)
    """Peers not to ask before a time."""
    route: dict[int, PeerId] = field(default_factory=dict)
    forward_passed: bool = False
    num_failures: int = 0
    num_stalls: int = 0
    num_not_ready: int = 0
    num_refusals: int = 0
    """Peers that called what was sent malformed."""
    num_busy: int = 0
    has_others: bool = False
    """Whether the peer that is asked was told that there are others to ask."""
    num_sent_on: int = 0
    """Times that one thereupon was busy."""
    is_refused: bool = False
    """Whether nobody has taken it since somebody was busy."""


class Hop:
    """Hands microbatches to the peers of one stage."""

    def __init__(
        self, *, run_id: str, stage: int, reply_specs: Mapping[str, TensorSpec], router: Router,
        channels: ChannelPool, clock: Clock, limits: HopLimits | None = None, events: Events | None = None,
    ) -> None:  # fmt: skip
        self.stage = stage
        self._run_id = run_id
        self._reply_specs = reply_specs
        self._router = router
        self._channels = channels
        self._clock = clock
        self._limits = limits or HopLimits()
        self._events = events or NoEvents()
        self._credits = Credits()
        self._num_sending = 0
        self._num_refused = 0

    @property
    def is_held_up(self) -> bool:
        """Whether one more microbatch would wait here for those before it: for the line, or for a place downstream."""
        return self._num_sending > 0 or self._num_refused > 0

    async def train(
        self, microbatch: Microbatch, tensors: Tensors, listener: HopListener, hints: Mapping[int, PeerId]
    ) -> HopReply:
        """Have the stage, and all after it, compute one microbatch.

        Args:
            hints: peers that worked on the microbatch before, by stage.

        Raises:
            Fatal: a peer refused the request itself, or too many peers failed.
        Cancellation closes the stream, which makes the peer roll back.
        """
        retries = _Retries(route=dict(hints))

        async def once(record: PeerRecord) -> HopReply:
            self._events.write(
                HopEvent(
                    microbatch=microbatch.index, round=microbatch.round, stage=self.stage, peer=record.peer_id,
                    attempt=retries.num_failures + retries.num_busy + retries.num_sent_on + 1,
                )
            )  # fmt: skip
            return await self._train_once(record, microbatch, tensors, listener, retries)

        return await self._until_answered(once, microbatch.num_samples, listener, retries)

    async def evaluate(
        self, tensors: Tensors, *, round_number: int, logits: TensorSpec | None = None,
        listener: HopListener | None = None,
    ) -> float | torch.Tensor:  # fmt: skip
        """Forward only, on the anchor of a round: the mean loss, or the last position's logits if asked for.

        Args:
            tensors: `tokens` (B, T + 1), the last column being only a target, and what else the stage takes.

        Raises:
            StaleMicrobatch: the swarm has moved on, and keeps that round's anchor no more.
            Fatal: a peer refused the request itself, or too many peers failed.
        """
        heard_by = listener or HopListener()

        async def once(record: PeerRecord) -> float | torch.Tensor:
            try:
                return await self._evaluate_once(record, tensors, round_number, logits, heard_by)
            except RoundMismatch as error:
                if error.peer_round > round_number:
                    raise StaleMicrobatch(f"round {round_number} is not kept any more: {error}") from None
                raise

        return await self._until_answered(once, tensors["tokens"].shape[0], heard_by, _Retries())

    # -- choosing and retrying -----------------------------------------------------------------------------------

    async def _until_answered(
        self,
        once: Callable[[PeerRecord], Awaitable[_Answer]],
        num_samples: int,
        listener: HopListener,
        retries: _Retries,
    ) -> _Answer:
        num_cancels = _num_cancels()
        try:
            while True:
                if _num_cancels() > num_cancels:
                    # gRPC may answer a cancellation that comes as a connection breaks with why it broke.
                    raise asyncio.CancelledError
                record = self._choose(num_samples, retries)
                if record is None:
                    await self._wait_for_somebody(listener, retries)
                    continue
                try:
                    return await once(record)
                except (TryAnotherPeer, TryLater, MalformedMessage) as error:
                    self._note(record, error, retries)
        finally:
            self._set_refused(retries, False)

    def _set_refused(self, retries: _Retries, is_refused: bool) -> None:
        self._num_refused += is_refused - retries.is_refused
        retries.is_refused = is_refused

    async def _wait_for_somebody(self, listener: HopListener, retries: _Retries) -> None:
        """Wait until a peer can be asked, or for a moment: new ones may come at any time."""
        available_seconds = self._router.next_available_seconds(self.stage)
        no_peer = available_seconds is None or available_seconds > _NOBODY_SECONDS
        listener.progress(self.stage, no_peer=no_peer)
        seconds = self._limits.retry_seconds
        if retries.excluded:
            first = min(retries.excluded.values()) - self._clock.monotonic()
            seconds = min(seconds, max(first, SHORTEST_WAIT_SECONDS))
        await self._clock.sleep(seconds)

    def _choose(self, num_samples: int, retries: _Retries) -> PeerRecord | None:
        now = self._clock.monotonic()
        retries.excluded = {peer: until for peer, until in retries.excluded.items() if until > now}
        hinted = retries.route.get(self.stage)
        prefer = [] if hinted is None else [hinted]
        return self._router.choose(self.stage, num_samples, exclude=retries.excluded.keys(), prefer=prefer)

    def _note(self, record: PeerRecord, error: SwarmError, retries: _Retries) -> None:
        """What follows from an attempt that came to nothing.

        Raises:
            MalformedMessage: a second peer says so as well, or there is no other to ask.
            RetriesExhausted: too many peers have failed.
        """
        peer_id = PeerId(record.peer_id)
        if isinstance(error, Overloaded):
            self._busy(peer_id, error.retry_after_seconds, retries)
            return
        if isinstance(error, MalformedMessage):
            # One peer's word: it may be its own weights that are broken. Another one is to say so as well.
            retries.num_refusals += 1
            if retries.num_refusals > 1 or not self._router.others(peer_id):
                raise error
        self._failed(peer_id, record.name, error, retries)

    def _busy(self, peer_id: PeerId, retry_after_seconds: float, retries: _Retries) -> None:
        if retries.has_others:
            retries.num_sent_on += 1
        else:
            retries.num_busy += 1
            self._set_refused(retries, True)
        self._router.busy(peer_id, retry_after_seconds)
        retries.excluded[peer_id] = self._clock.monotonic() + retry_after_seconds

    def _failed(self, peer_id: PeerId, name: str, error: SwarmError, retries: _Retries) -> None:
        logger.info("stage %d: %s failed: %s", self.stage, name or peer_id[:8], error)
        if isinstance(error, PeerUnavailable):
            self._router.failed(peer_id, is_gone=error.is_gone, is_unreachable=error.is_unreachable)
        elif isinstance(error, NotAllowed | IncompatibleVersion | MalformedMessage):
            # Its clock may be wrong, so that it takes a token for an expired one; another release may have its port.
            self._router.failed(peer_id)
        self._credits.drop(peer_id)
        # Slow, leaving or between rounds: not dead, so not banned, but somebody else comes first.
        now = self._clock.monotonic()
        is_slow = isinstance(error, DeadlineExceeded) and self._has_other(peer_id, retries, now + PAUSE_SECONDS)
        retries.excluded[peer_id] = now + (self._limits.stall_seconds if is_slow else PAUSE_SECONDS)
        retries.route.pop(self.stage, None)
        # Who joins, moves, leaves or lacks a round's weights says nothing about the others.
        retries.num_failures += not isinstance(error, NotReady | WrongStage | WrongRun)
        if isinstance(error, NotReady):
            retries.num_not_ready += 1
            if retries.num_not_ready == self._limits.max_failures:
                # It may be that nobody ever can: whoever looks into the log is to find why.
                logger.warning("stage %d: nobody can take a microbatch, and it is tried on: %s", self.stage, error)
        if retries.num_failures >= self._limits.max_failures:
            raise RetriesExhausted(
                f"stage {self.stage}: {retries.num_failures} peers failed in a row; the last: {error}"
            )

    def _has_other(self, peer_id: PeerId, retries: _Retries, before: float) -> bool:
        """Whether another peer can be asked soon."""
        return any(retries.excluded.get(other, before) <= before for other in self._router.others(peer_id))

    def _stall_seconds(self, peer_id: PeerId, microbatch: Microbatch, retries: _Retries) -> float:
        """How long a peer may itself be what is waited for: a slow one with a full queue is not stalled.

        After a stall of the microbatch twice as long: of a peer that has not answered yet nothing may be known.
        """
        expected = self._router.expected_seconds(peer_id, microbatch.num_samples) or 0.0
        return max(self._limits.stall_seconds, STALL_FACTOR * expected) * 2.0 ** min(retries.num_stalls, MOST_DOUBLINGS)

    # -- one attempt -----------------------------------------------------------------------------------------------

    async def _train_once(
        self, record: PeerRecord, microbatch: Microbatch, tensors: Tensors, listener: HopListener, retries: _Retries
    ) -> HopReply:
        peer_id = PeerId(record.peer_id)
        reader = TensorReader(self._reply_specs if microbatch.answers_gradient(self.stage) else {})
        is_new_to_it = retries.route.get(self.stage) != peer_id
        retries.has_others = is_new_to_it and retries.num_sent_on < most_sent_on(self._router.num_peers(self.stage))
        opening = pb.Open(
            address=self._address(), microbatch=microbatch.index, round=microbatch.round,
            num_samples=microbatch.num_samples, hints=route_entries(retries.route),
            accumulate_only_at=microbatch.accumulate_only_at,
            rerouted_backward=retries.forward_passed and is_new_to_it,
            # Who worked on it before may need nothing sent.
            eager=is_new_to_it and self._credits.take(peer_id),
            has_others=retries.has_others,
            way_seconds=microbatch.way_seconds,
        )  # fmt: skip
        async with Stream(self._stub(record).Train()) as call:
            if not opening.eager:
                await call.write(pb.TrainRequest(open=opening), self._limits.open_seconds)
                accepted = self._admitted(await call.read(self._limits.open_seconds))
                tensors = {} if accepted.has_tensors else tensors
                self._set_refused(retries, False)
            sending_at, arrived_at = self._clock.monotonic(), math.inf
            if tensors:
                await self._send(call, pb.TrainRequest(open=opening if opening.eager else None), tensors)
            if opening.eager:
                self._admitted(await call.read(self._limits.silence_seconds))
                arrived_at = self._clock.monotonic()
                self._set_refused(retries, False)
            retries.route = {**retries.route, self.stage: peer_id}
            listener.routed(retries.route)
            stalled_since = self._clock.monotonic()
            while True:
                reply = await call.read(self._limits.silence_seconds)
                # The peer says something as soon as it has all tensors, before it computes. When they were written
                # tells less: buffers take megabytes.
                arrived_at = min(arrived_at, self._clock.monotonic())
                for chunk in reply.chunks:
                    self._feed(reader, chunk)
                if reply.HasField("done"):
                    break
                if reply.HasField("progress"):
                    progress = reply.progress
                    if progress.stage != self.stage:
                        stalled_since = self._clock.monotonic()
                    elif (seconds := self._clock.monotonic() - stalled_since) > self._limits.stall_seconds and (
                        seconds > self._stall_seconds(peer_id, microbatch, retries)
                    ):
                        retries.num_stalls += 1
                        raise DeadlineExceeded(f"no result after {seconds:.0f} s")
                    downstream = {entry.stage: PeerId(entry.peer_id) for entry in progress.route}
                    retries.forward_passed |= progress.stage != self.stage or bool(downstream)
                    listener.progress(progress.stage, no_peer=progress.no_peer)
                    if downstream and retries.route != (route := {**downstream, self.stage: peer_id}):
                        retries.route = route
                        listener.routed(route)
                elif not reply.chunks:
                    self._admitted(reply)
                    raise PeerUnavailable("it was accepted twice")
            done: pb.Done = reply.done
            if not reader.complete:
                raise PeerUnavailable("the reply ended before its tensors")
            with _well_formed():
                require_bounds(done, finite=True)
            self._require_in_range(reader.tensors)
            self._credits.granted(peer_id, done.credits)
            self._router.succeeded(
                peer_id, num_samples=microbatch.num_samples,
                # A replay takes less of a peer than what it will mostly be asked for.
                busy_seconds=None if microbatch.is_replay else done.busy_seconds,
                link_seconds=arrived_at - sending_at if tensors else None, queue_length=done.queue_length,
            )  # fmt: skip
            route = {entry.stage: PeerId(entry.peer_id) for entry in done.route}
            return HopReply(
                loss=done.loss, num_tokens=done.num_tokens, tensors=reader.tensors,
                route={**route, self.stage: peer_id}, num_reroutes=done.num_reroutes + retries.num_failures,
                num_busy=retries.num_busy, _call=call,
            )  # fmt: skip

    async def _evaluate_once(
        self, record: PeerRecord, tensors: Tensors, round_number: int, logits: TensorSpec | None,
        listener: HopListener,
    ) -> float | torch.Tensor:  # fmt: skip
        num_samples, num_tokens = tensors["tokens"].shape
        request = pb.EvaluateOpen(
            address=self._address(), round=round_number, want_logits=logits is not None,
            num_samples=num_samples, sequence_length=num_tokens - 1,
        )  # fmt: skip
        reader = TensorReader({} if logits is None else {"logits": logits})
        async with Stream(self._stub(record).Evaluate()) as call:
            await self._send(call, pb.EvaluateRequest(open=request), tensors)
            await call.done_writing()
            while True:
                reply = await call.read(self._limits.silence_seconds)
                for chunk in reply.chunks:
                    self._feed(reader, chunk)
                if reply.HasField("progress"):
                    listener.progress(reply.progress.stage, no_peer=reply.progress.no_peer)
                if reply.HasField("evaluated"):
                    call.cancel()
                    if logits is None:
                        return float(reply.evaluated.loss)
                    if not reader.complete:
                        raise PeerUnavailable("the reply ended before its tensors")
                    self._require_in_range(reader.tensors)
                    return reader.tensors["logits"]

    # -- plumbing ----------------------------------------------------------------------------------------------------

    def _stub(self, record: PeerRecord) -> Any:  # The generated type wants all requests when a call begins.
        return StageServiceStub(self._channels.channel(record))

    def _address(self) -> pb.Address:
        return pb.Address(run_id=self._run_id, protocol_version=PROTOCOL_VERSION, stage=self.stage)

    async def _send(self, call: Stream, request: Any, tensors: Tensors) -> None:
        """Write tensors, the first of them with what else `request` says; it is filled, so nobody is to keep it."""
        self._num_sending += 1
        try:
            for message in filled(request, tensors):
                await call.write(message, self._limits.silence_seconds)
        finally:
            self._num_sending -= 1

    def _admitted(self, reply: pb.TrainReply) -> pb.Accepted:
        if reply.HasField("busy"):
            raise Overloaded(reply.busy.reason, retry_after_seconds=reply.busy.retry_after_seconds)
        if not reply.HasField("accepted"):
            raise PeerUnavailable("an answer that neither accepts nor refuses")
        return reply.accepted

    @staticmethod
    def _feed(reader: TensorReader, chunk: Any) -> None:
        with _well_formed():
            reader.feed(chunk)

    @staticmethod
    def _require_in_range(tensors: Tensors) -> None:
        with _well_formed():
            for name, tensor in tensors.items():
                require_in_range(name, tensor)


@contextmanager
def _well_formed() -> Iterator[None]:
    """Around looking at a reply. What is wrong with it is its sender's fault: another peer may answer well."""
    try:
        yield
    except MalformedMessage as error:
        raise PeerUnavailable(f"a malformed reply: {error}") from None


def _num_cancels() -> int:
    """How often this task was cancelled and not taken back: a task group that failed before leaves one behind."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def most_sent_on(num_peers: int) -> int:
    """How many peers of a stage may leave a microbatch to the others."""
    return min(MOST_SENT_ON, num_peers // PEERS_TO_SEND_ON)


def route_entries(route: Mapping[int, PeerId]) -> list[pb.RouteEntry]:
    """A route as messages."""
    return [pb.RouteEntry(stage=stage, peer_id=peer) for stage, peer in sorted(route.items())]
