"""Fetches from the donors of its stage, for a peer that is behind: the results of missed rounds, or a snapshot.

A snapshot comes from several donors at once, and segments that have come are kept when donors fail. Every byte is
checked before another part sees it. It decides nothing, and installs nothing.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.branches import most_held, voice_of
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.donor import snapshot_id
from swarm.averaging.vectors.results import Committed, IncomingResult
from swarm.averaging.vectors.snapshots import PartialSnapshot
from swarm.averaging.wire.transport import Transport
from swarm.errors import IntegrityError, MalformedMessage, NotReady, Overloaded, PeerUnavailable, SwarmError
from swarm.machine.clock import Clock
from swarm.machine.waits import Waits
from swarm.machine.words import counted
from swarm.rpc.bounds import require_bounds
from swarm.rpc.transfers import MAX_SOURCES, Arriving
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.training.round_member import Snapshot
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""After the first offer, other donors have at least this much time to make theirs."""
OFFER_BYTES_PER_SECOND = 2e8
"""This peer does not wait for a donor that copies and digests its state more slowly than this."""


_Offer = tuple[PeerRecord, pb.SnapshotHeader]
"""A snapshot that a donor offers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fetched:
    """A snapshot with its sources. It comes with the outcomes of the last rounds before it, the lineages of some more,
    and the run's amendments.

    Attributes:
        seconds: how long at least one source was sending.
        bytes_per_second: the rate in that time. The sources' pauses, and waits for a turn, are left out, because they
            say nothing about this peer's line.
    """

    snapshot: Snapshot
    outcomes: list[pb.Outcome]
    past: tuple[str, ...]
    amendments: tuple[str, ...]
    sources: list[PeerRecord]
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Describes the wanted snapshot, and which part of it is wanted.

    Attributes:
        max_bytes: a larger snapshot is refused.
        is_useful: tells whether a snapshot of some standing is of any use.
        round_number: if given, donors are to keep the state with which this round begins, once they reach it.
        only: fetch only the bytes of tensors with this prefix in their names.
    """

    max_bytes: int
    is_useful: Callable[[Standing], bool]
    round_number: int | None = None
    only: str = ""


@dataclass(eq=False)
class StateTransfer:
    """One peer's downloads: what has come so far, and which peers sent wrong bytes."""

    transport: Transport
    address: Address
    own_id: str
    waits: Waits
    """Shows how far a download is."""
    clock: Clock
    silence_seconds: float
    """The longest wait for a donor's next piece."""
    _partial: PartialSnapshot | None = field(default=None, init=False)
    _distrusted: set[str] = field(default_factory=set, init=False)
    num_bytes: int = field(default=0, init=False)
    """How many bytes of segments have come that match their digests."""
    _refusals: dict[str, str] = field(default_factory=dict, init=False)
    """Why each donor that was asked last gave nothing of use, by its name."""

    def distrust(self, donor: PeerRecord, error: SwarmError) -> None:
        """From now on, ask this peer only when no other is left, because it sent a wrong state."""
        if donor.peer_id not in self._distrusted:
            logger.warning("%s is asked only when no other is left: %s", donor.peer_id, error)
        self._distrusted.add(donor.peer_id)

    def forget(self) -> None:
        """Let go of a half-fetched snapshot, which is of no use any more."""
        self._partial = None

    # -- results -------------------------------------------------------------------------------------------------------

    async def results(
        self, donor: PeerRecord, standing: Standing, *, max_bytes: int
    ) -> AsyncGenerator[tuple[Committed, int], None]:
        """Yield the rounds committed after `standing`, in order, up to where the donor stands.

        Each comes with the donor's round at the time of sending.

        Args:
            max_bytes: a larger result is refused.

        Raises:
            Overloaded: the donor serves others first. Results that came before that are valid.
            NotReady: the donor does not keep these results.
            PeerUnavailable, DeadlineExceeded: the donor is gone, or was silent for too long.
            MalformedMessage, IntegrityError: the donor's answer is wrong.
        """
        wanted = pb.ResultsRequest(standing=messages.pack_standing(standing))
        incoming: IncomingResult | None = None
        async for reply in self._replies(donor, pb.DownloadRequest(results=wanted)):
            match reply.WhichOneof("message"):
                case "result" if incoming is None:
                    require_bounds(reply.result, finite=True)
                    incoming = IncomingResult(standing, reply.result, max_bytes)
                case "data" if incoming is not None:
                    incoming.feed(reply.data)
                case _:
                    raise MalformedMessage("the pieces of a result come in the wrong order")
            if incoming.is_whole:
                if await asyncio.to_thread(incoming.sha256) != incoming.header.sha256:
                    raise IntegrityError(f"the result of round {standing.round} does not match its digest")
                yield incoming.committed, incoming.header.donor_round
                standing, incoming = incoming.committed.after, None
        if incoming is not None:
            raise PeerUnavailable(f"the result of round {standing.round} ended early")

    def _replies(
        self, donor: PeerRecord, request: pb.DownloadRequest, *, more_seconds: float = 0.0
    ) -> AsyncIterator[pb.DownloadReply]:
        """Send a request with the address and this peer's id added, and yield the donor's answers. `more_seconds` says
        how much longer than usual the donor may be silent."""
        request.MergeFrom(pb.DownloadRequest(address=self.address, peer_id=self.own_id))
        return self.transport.download(donor, request, silence_seconds=self.silence_seconds + more_seconds)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def begin(self, donors: Sequence[PeerRecord], wanted: Wanted) -> PartialSnapshot:
        """Ask donors to keep a snapshot, and choose the farthest that most of them stand behind, to be fetched.

        A half-fetched one is chosen again while some peer still keeps it. A second call makes the donors keep the
        chosen snapshot for longer. Donors are asked a few at a time: first the sources of a half-fetched snapshot, and
        last the donors that sent wrong bytes.

        Args:
            donors: the best first; the first few that answer are used.

        Raises:
            PeerUnavailable: no peer offers what is wanted.
        """
        self._refusals.clear()
        former = {donor.peer_id for donor in self._partial.sources} if self._partial else set()
        ranked = sorted(donors, key=lambda donor: donor.peer_id not in former)
        for group in (
            [donor for donor in ranked if donor.peer_id not in self._distrusted],
            [donor for donor in ranked if donor.peer_id in self._distrusted],
        ):
            for start in range(0, len(group), MAX_SOURCES):
                asked = group[start : start + MAX_SOURCES]
                names = ", ".join(one.display_name for one in asked)
                with self.waits.on(f"an offer of the state of stage {self.address.stage} by {names}"):
                    offers = await self._offers(asked, wanted)
                if (partial := self._choose(offers, wanted)) is not None:
                    return partial
        raise PeerUnavailable(f"no peer offers a snapshot that would be of use{self._why}")

    async def fetch(self, partial: PartialSnapshot, has_others: Callable[[], bool] = lambda: False) -> Fetched:
        """Fetch what `begin` has chosen, from all donors that hold it with the same bits. A failure, or cancellation,
        loses no whole segment.

        Args:
            has_others: tells whether there are donors by now that were not asked.

        Raises:
            PeerUnavailable: the last source failed before all of it had come.
            Overloaded: all donors serve others first, less than half has come, and there are other donors by now.
        """
        self._refusals.clear()
        arriving = Arriving(f"the state of stage {self.address.stage}", partial.num_missing_bytes)
        with self.waits.on(arriving.in_words):
            async with asyncio.TaskGroup() as workers:
                for donor in partial.sources:
                    workers.create_task(self._work(donor, partial, arriving, has_others))
        if partial.segments.num_missing:
            if partial.is_young and has_others():
                self.forget()
                raise Overloaded("others have the state by now as well", retry_after_seconds=0.0)
            segments = counted(partial.num_segments, "segment")
            raise PeerUnavailable(f"no source is left, {partial.segments.num_missing} of {segments} missing{self._why}")
        self._partial = None
        return Fetched(
            snapshot=partial.snapshot, outcomes=list(partial.header.outcomes), past=voice_of(partial.header).past,
            amendments=tuple(partial.header.amendments), sources=partial.fastest_first,
            seconds=arriving.sending_seconds, bytes_per_second=arriving.bytes_per_second,
        )  # fmt: skip

    @property
    def _why(self) -> str:
        return "".join(f"; {name}: {why}" for name, why in self._refusals.items())

    async def _offers(self, donors: Sequence[PeerRecord], wanted: Wanted) -> list[_Offer]:
        """Ask several donors at once. After the first offer, wait as long again for the others, or GRACE_SECONDS."""
        offers: list[_Offer] = []

        async def ask(donor: PeerRecord) -> None:
            try:
                offers.append((donor, await self._ask(donor, wanted)))
            except SwarmError as error:
                logger.debug("no snapshot from %s: %s", donor.display_name, error)
                self._refusals[donor.display_name] = str(error)

        time = asyncio.get_running_loop().time
        began_at = time()
        async with asyncio.TaskGroup() as tasks:
            asking = {tasks.create_task(ask(donor)) for donor in donors}
            while asking and not offers:
                _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            if asking:
                _, asking = await asyncio.wait(asking, timeout=max(GRACE_SECONDS, time() - began_at))
            for task in asking:
                task.cancel()
        return offers

    async def _ask(self, donor: PeerRecord, wanted: Wanted) -> pb.SnapshotHeader:
        begun = self._partial.snapshot_id if self._partial else b""
        offer = pb.OfferRequest(begun=begun, round=wanted.round_number, tally=True)
        copy_seconds = wanted.max_bytes / OFFER_BYTES_PER_SECOND
        async for reply in self._replies(donor, pb.DownloadRequest(offer=offer), more_seconds=copy_seconds):
            if reply.WhichOneof("message") != "header":
                raise MalformedMessage("an offer is a header")
            require_bounds(reply.header, finite=True)
            if not wanted.is_useful(voice_of(reply.header).standing):
                raise NotReady("it is of no use here")
            return reply.header
        raise PeerUnavailable("it ended before the header came")

    def _choose(self, offers: list[_Offer], wanted: Wanted) -> PartialSnapshot | None:
        """Choose the half-fetched snapshot if it is offered. Else choose the best by `most_held` with a valid header;
        None if there is none."""
        begun = self._partial.snapshot_id if self._partial else b""
        donors, headers = defaultdict[bytes, list[PeerRecord]](list), dict[bytes, pb.SnapshotHeader]()
        for donor, header in offers:
            name = snapshot_id(header)
            donors[name].append(donor)
            headers[name] = header
        best_first = most_held(
            {name: voice_of(header) for name, header in headers.items()},
            {name: len(holders) for name, holders in donors.items()},
        )
        for best in sorted(best_first, key=lambda name: name != begun):
            try:
                if self._partial is None or best != begun:
                    self._partial = None
                    self._partial = PartialSnapshot(headers[best], best, wanted.max_bytes, only=wanted.only)
            except MalformedMessage as error:
                for donor in donors[best]:
                    self._refusals[donor.display_name] = str(error)
                    self.distrust(donor, error)
                continue
            self._partial.sources = donors[best]
            return self._partial
        return None

    async def _work(
        self, donor: PeerRecord, partial: PartialSnapshot, arriving: Arriving, has_others: Callable[[], bool]
    ) -> None:
        """Fetch segments from one source until all have come, the source fails, or other donors may be faster."""
        try:
            await partial.segments.fetch_from(
                donor.display_name,
                lambda index: self._fetch(donor, partial, index, arriving),
                self.clock,
                arriving,
                gives_way=lambda: partial.is_young and has_others(),
            )
        except SwarmError as error:
            self._refusals[donor.display_name] = str(error)
            if isinstance(error, IntegrityError | MalformedMessage):
                self.distrust(donor, error)
            elif len(partial.sources) > 1:
                logger.info("%s is no source any more: %s", donor.display_name, error)

    async def _fetch(self, donor: PeerRecord, partial: PartialSnapshot, index: int, arriving: Arriving) -> None:
        time = asyncio.get_running_loop().time
        start, stop = partial.edges(index)
        at, timed_from, began_at = start, start, time()
        wanted = pb.SegmentRequest(snapshot=partial.snapshot_id, index=index)
        async for reply in self._replies(donor, pb.DownloadRequest(segment=wanted)):
            if not 0 < len(reply.data) <= stop - at:
                raise MalformedMessage(f"segment {index} does not come in {stop - start} bytes")
            partial.content.write(at, reply.data)
            if at == start and len(reply.data) < stop - start:
                # The wait for the first piece says nothing about the line, so it is not timed.
                timed_from, began_at = start + len(reply.data), time()
            at += len(reply.data)
            arriving.add(len(reply.data), donor.display_name)
        if at != stop:
            raise PeerUnavailable(f"segment {index} ended early")
        arriving.timed(stop - timed_from, began_at, time())
        if await asyncio.to_thread(partial.content.sha256, start, stop) != partial.header.segment_digests[index]:
            raise IntegrityError(f"segment {index} does not match its digest")
        partial.arrived(donor)
        self.num_bytes += stop - start
