"""What a peer keeps for peers behind it: snapshots that they fetch, and the results committed since.

A snapshot stays as it was when it was first asked for, whatever is committed meanwhile. While no peer asks, nothing is
kept but the last result of members in groups, and what is kept is bounded. Never touches weights.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.place import Phase, Place
from swarm.averaging.vectors import results
from swarm.averaging.vectors.results import Committed
from swarm.averaging.vectors.snapshots import TensorBytes, describe
from swarm.errors import MalformedMessage, NotReady
from swarm.machine.clock import Clock
from swarm.rpc.callers import Caller
from swarm.rpc.transfers import NOBODY, Turns, yield_to_exchange
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import RoundMember, Snapshot

logger = logging.getLogger(__name__)

PIN_SECONDS = 30.0
"""A snapshot, and the results committed since, are kept for this long after the last request; the last result of
members in groups for this long after its commit."""
NUM_PINS = 2
SEGMENT_BYTES = 4 << 20
RESULTS_BYTES = 2 << 30
LOOK_SECONDS = 1.0
"""How often a donor looks for snapshots that no peer asks for any more."""
REACH_SECONDS = 8.0
"""The longest time that an offer waits for this peer to reach the wanted round."""
REACH_LOOK_SECONDS = 0.02
RESULTS_FACTOR = 4
"""The results that are kept may take this multiple of a snapshot's size, or RESULTS_BYTES if that is more."""


@dataclass(eq=False)
class _Pin:
    snapshot: Snapshot
    content: TensorBytes
    outcomes: list[pb.Outcome]
    past: list[str]
    expires_at: float
    header: pb.SnapshotHeader | None = None
    snapshot_id: bytes = b""
    is_fetched: bool = False
    """Whether more than the header was asked for."""


class Donor:
    """One peer's pinned snapshots and its log of results, which reaches back to the oldest of them."""

    def __init__(self, place: Place, member: RoundMember, clock: Clock, turns: Turns | None = None) -> None:
        """`turns` decide which peers may fetch a snapshot's segments now; None if all may at the same time."""
        self._place = place
        self._member = member
        self._clock = clock
        self._turns = turns
        self._result_turns = None if turns is None else Turns(clock, is_training=lambda: False)
        """Turns for later results. A peer that waits for results falls further behind. So results wait neither for
        snapshots that others fetch, nor for training."""
        self._lock = asyncio.Lock()
        """Held while a snapshot is made: peers that ask meanwhile get the same one."""
        self._pins: list[_Pin] = []
        """By round, oldest first."""
        self._log: dict[int, Committed] = {}
        self._in_groups: tuple[int, float] = -1, -math.inf
        """The last round that members in groups averaged, and until when its result is kept."""

    @property
    def num_bytes(self) -> int:
        return sum(pin.content.num_bytes for pin in self._pins) + self._log_bytes

    def serve(self, request: pb.DownloadRequest, caller: Caller = NOBODY) -> AsyncGenerator[pb.DownloadReply, None]:
        """Answer a peer that is behind.

        Args:
            caller: who answers for it, as Turns.turn says.

        Raises:
            NotReady: the wanted data are not kept here, or not any more.
            Overloaded: other peers come first.
            MalformedMessage: the peer asks for something that does not exist.
        """
        match request.WhichOneof("wanted"):
            case "offer":
                return self._offer(request.offer)
            case "segment":
                return self._segment(request, caller)
            case "results":
                return self._results(request, caller)
        raise MalformedMessage("the request does not say what is wanted")

    async def run(self) -> None:
        """Let go of what no peer asks for any more, until cancelled."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            self.expire()

    # -- what advance tells -------------------------------------------------------------------------------------------

    def committed(self, committed: Committed) -> None:
        """Keep the result of a round that this peer applied, if any peer is fetching from it, or some members may not
        have been reached by the result."""
        self.expire()
        if committed.outcome.prepared.decider_ids:
            self._in_groups = committed.before.round, self._clock.monotonic() + PIN_SECONDS
        elif not self._pins:
            return
        self._log[committed.before.round] = committed
        while self._pins and self._log_bytes > max(RESULTS_BYTES, RESULTS_FACTOR * self._pins[0].content.num_bytes):
            lost = self._pins.pop(0)
            logger.warning(
                "the snapshot of round %d is given up: %.0f MB of results have come since",
                lost.snapshot.round,
                self._log_bytes / 1e6,
            )
            self._prune()

    def jumped(self) -> None:
        """Drop everything, because this peer installed another state, which does not follow from the kept results."""
        self._pins.clear()
        self._log.clear()

    def expire(self) -> None:
        now = self._clock.monotonic()
        self._pins = [pin for pin in self._pins if pin.expires_at > now]
        self._prune()

    # -- what others ask -----------------------------------------------------------------------------------------------

    async def _offer(self, request: pb.OfferRequest) -> AsyncGenerator[pb.DownloadReply, None]:
        wanted = request.round if request.HasField("round") else None
        until = self._clock.monotonic() + REACH_SECONDS
        while wanted is not None and self._place.standing.round < wanted and self._clock.monotonic() < until:
            await self._clock.sleep(REACH_LOOK_SECONDS)
        async with self._lock:
            self.expire()
            pin = self._find(request.begun) or next((pin for pin in self._pins if pin.snapshot.round == wanted), None)
            if pin is None and wanted not in (None, self._place.standing.round):
                raise NotReady(f"this peer is at round {self._place.standing.round}")
            pin = pin or self._reusable() or await self._pin()
            if wanted not in (None, pin.snapshot.round):
                raise NotReady(f"this peer does not keep the state of round {wanted}")
            self._renew(pin)
            if pin.header is None:
                # The digest of a large state may take longer to compute than a pin lasts.
                pin.expires_at = math.inf
                try:
                    header = await asyncio.to_thread(self._describe, pin)
                finally:
                    self._renew(pin)
                pin.snapshot_id, pin.header = snapshot_id(header), header
        header = pb.SnapshotHeader()
        header.CopyFrom(pin.header)
        if request.tally:
            header.tally = pin.snapshot.tally.to_text()
        yield pb.DownloadReply(header=header)

    async def _segment(self, request: pb.DownloadRequest, caller: Caller) -> AsyncGenerator[pb.DownloadReply, None]:
        self.expire()
        wanted = request.segment
        pin = self._find(wanted.snapshot)
        if pin is None:
            raise NotReady("that snapshot is not kept here any more")
        start = wanted.index * SEGMENT_BYTES
        if start >= pin.content.num_bytes:
            raise MalformedMessage(f"the snapshot has no segment {wanted.index}")
        pin.is_fetched = True
        self._renew(pin)
        async with _turn(self._turns, request.peer_id, caller):
            for piece in pin.content.pieces(start, min(pin.content.num_bytes, start + SEGMENT_BYTES)):
                self._renew(pin)
                await yield_to_exchange(self._is_exchanging, self._clock)
                yield pb.DownloadReply(data=piece)

    async def _results(self, request: pb.DownloadRequest, caller: Caller) -> AsyncGenerator[pb.DownloadReply, None]:
        self.expire()
        standing = messages.unpack_standing(request.results.standing)
        begins_at = standing.round
        # A member that missed just one round waits for no turn, so that it is back soon.
        turns = self._result_turns if self._place.standing.round - begins_at > 1 else None
        while standing != self._place.standing:
            kept = self._log.get(standing.round)
            if kept is None or kept.before != standing:
                raise NotReady(f"the results from round {standing.round} on are not kept here")
            for pin in (pins := [pin for pin in self._pins if pin.snapshot.round <= begins_at][-1:]):
                self._renew(pin)
            async with _turn(turns, request.peer_id, caller):
                header = await results.pack(kept)
                header.donor_round = self._place.standing.round
                yield pb.DownloadReply(result=header)
                for piece in kept.content.pieces(0, kept.content.num_bytes):
                    for pin in pins:
                        pin.is_fetched = True
                        self._renew(pin)
                    await yield_to_exchange(self._is_exchanging, self._clock)
                    yield pb.DownloadReply(data=piece)
            standing = kept.after

    def _is_exchanging(self) -> bool:
        return self._place.group.phase is Phase.EXCHANGING

    # -- pins ----------------------------------------------------------------------------------------------------------

    def _find(self, wanted: bytes) -> _Pin | None:
        return next((pin for pin in self._pins if pin.header is not None and pin.snapshot_id == wanted), None)

    def _reusable(self) -> _Pin | None:
        """The snapshot of the present round; or the newest one, if no further snapshot may be kept because all are
        being fetched; else None."""
        if self._pins and messages.standing_of(self._pins[-1].snapshot) == self._place.standing:
            return self._pins[-1]
        if len(self._pins) < NUM_PINS:
            return None
        unwanted = next((pin for pin in self._pins if not pin.is_fetched), None)
        if unwanted is None:
            return self._pins[-1]
        self._pins.remove(unwanted)
        self._prune()
        return None

    async def _pin(self) -> _Pin:
        async with self._place.lock:
            snapshot = await self._member.snapshot()
        # There is no await between the copy and its registration, so no result in between is missed.
        if messages.standing_of(snapshot) != self._place.standing:
            raise NotReady("this peer is about to move")
        pin = _Pin(
            snapshot=snapshot,
            content=TensorBytes(tensor for _, tensor in sorted(snapshot.tensors.items())),
            outcomes=[outcome for outcome in self._place.outcomes.values() if outcome.round < snapshot.round],
            past=self._place.branches.told,
            expires_at=0.0,
        )
        self._pins.append(pin)
        return pin

    def _describe(self, pin: _Pin) -> pb.SnapshotHeader:
        content, size = pin.content, SEGMENT_BYTES
        digests = [
            content.sha256(start, min(content.num_bytes, start + size)) for start in range(0, content.num_bytes, size)
        ]
        header = pb.SnapshotHeader(
            standing=messages.pack_standing(messages.standing_of(pin.snapshot)), state_digest=pin.snapshot.digest,
            tensors=describe(dict(sorted(pin.snapshot.tensors.items()))), outcomes=pin.outcomes, segment_bytes=size,
            segment_digests=digests, past=pin.past, amendments=self._place.timeline.texts,
        )  # fmt: skip
        for outcome in header.outcomes:
            # Of a thousand members they would be megabytes, and those that count are in the tally.
            del outcome.prepared.signatures[:]
        return header

    def _renew(self, pin: _Pin) -> None:
        pin.expires_at = self._clock.monotonic() + PIN_SECONDS

    # -- the log -------------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        oldest = self._pins[0].snapshot.round if self._pins else math.inf
        in_groups, until = self._in_groups
        last = in_groups if self._clock.monotonic() < until else math.inf
        self._log = {number: kept for number, kept in self._log.items() if number >= min(oldest, last)}

    @property
    def _log_bytes(self) -> int:
        return sum(kept.content.num_bytes for kept in self._log.values())


def _turn(turns: Turns | None, who: str, caller: Caller) -> AbstractAsyncContextManager[None]:
    return nullcontext() if turns is None else turns.turn(who, caller)


def snapshot_id(header: pb.SnapshotHeader) -> bytes:
    """The name of a snapshot, which is the same at all peers that hold the same bits at the same standing.

    Outcomes and lineages of earlier rounds, and amendments, of which peers may know different numbers, are not part of
    the name, nor is the tally, of which they may have different signatures.
    """
    named = pb.SnapshotHeader()
    named.CopyFrom(header)
    named.ClearField("outcomes")
    named.ClearField("past")
    named.ClearField("amendments")
    named.ClearField("tally")
    return hashlib.sha256(named.SerializeToString(deterministic=True)).digest()
