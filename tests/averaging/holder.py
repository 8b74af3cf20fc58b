"""Donors without a stage, and a line to them that can count, fail and lie, for the tests of state transfer."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import cast

import torch

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Ballot, Standing, lineage_after
from swarm.averaging.averager import place_of
from swarm.averaging.donor import Donor, snapshot_id
from swarm.averaging.state_transfer import StateTransfer
from swarm.averaging.vectors.results import Committed
from swarm.config import from_dict
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.machine.waits import Waits
from swarm.rpc.transfers import Turns
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.training.round_member import RoundCost, RoundMember, RoundResult, Snapshot, known
from swarm.types import PeerRecord
from tests.averaging.doubles import make_context, peer_id, record
from tests.support.manual_clock import ManualClock
from tests.support.virtual_time import LoopClock

SIZE = 40
NUM_BYTES = 4 * SIZE
MANY_FRAGMENTS = from_dict(
    {
        "model": {"num_layers": 100}, "stages": {"num_stages": 1}, "rounds": {"setting": "diloco"},
        "averaging": {"num_fragments": 100},
    },
    source="test",
)  # fmt: skip
"""A run with many fragments. A peer keeps the outcomes of as many rounds."""


class Holder:
    """A peer whose state is one vector, with its donor."""

    def __init__(self, clock: Clock | None = None, turns: Turns | None = None) -> None:
        self.clock = ManualClock()
        clock = clock or self.clock
        self.state = torch.arange(SIZE, dtype=torch.float32)
        self.num_copies = 0
        start = Standing(run_samples=0, round=0, lineage="00")
        self.place = place_of(make_context(record(1), config=MANY_FRAGMENTS, clock=clock), start)
        self.donor = Donor(
            self.place,
            cast("RoundMember", self),  # Nothing but snapshots is asked of it.
            clock,
            turns,
        )

    @property
    def standing(self) -> Standing:
        return self.place.standing

    def exchange(self) -> None:
        """From now on let this peer take part in an exchange."""
        ballot = Ballot(1, "m")
        self.place.group.begin(self.standing.round, ballot)
        self.place.group.join(self.standing.round, ballot, "shares")

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.state.numpy().tobytes()).hexdigest()

    async def snapshot(self) -> Snapshot:
        self.num_copies += 1
        await asyncio.sleep(0)
        return Snapshot(
            round=self.standing.round, run_samples=self.standing.run_samples, lineage=self.standing.lineage,
            tensors={"state": self.state.clone()}, digest=self.digest,
        )  # fmt: skip

    def commit(self, step: float = 1.0, *, in_groups: bool = False) -> Committed:
        before, average = self.standing, torch.full((SIZE,), step)
        prepared = pb.Prepared(
            digest=f"{before.round:064x}", member_ids=["m"], num_samples=10, squared_norm=SIZE * step**2,
            ballot=pb.Ballot(attempt=1, leader_id="m"), decider_ids=["m"] if in_groups else [],
        )  # fmt: skip
        outcome = pb.Outcome(round=before.round, prepared=prepared, total_squared_norm=prepared.squared_norm)
        lineage = lineage_after(before.lineage, outcome)
        result = RoundResult(
            round=before.round, tensors={"state": average}, num_samples=10, squared_norm=prepared.squared_norm,
            total_squared_norm=prepared.squared_norm, members=("m",), lineage=lineage, attempts=1,
            digest=prepared.digest, cost=RoundCost(bytes_sent=5, bytes_received=5, compression_ratio=2.0, seconds=1.0),
        )  # fmt: skip
        self.state = self.state - average
        after = Standing(run_samples=before.run_samples + 10, round=before.round + 1, lineage=lineage)
        self.place.group.install(after.round)
        self.place.committed(after, outcome)
        committed = Committed(
            before=before, after=after, result=result, outcome=outcome, state_digest=known(self.digest)
        )
        self.donor.committed(committed)
        return committed

    async def offer(self, begun: bytes = b"") -> pb.SnapshotHeader:
        (reply,) = await self.ask(pb.DownloadRequest(offer=pb.OfferRequest(begun=begun)))
        return reply.header

    async def segment(self, header: pb.SnapshotHeader, index: int) -> bytes:
        wanted = pb.SegmentRequest(snapshot=snapshot_id(header), index=index)
        return b"".join([reply.data for reply in await self.ask(pb.DownloadRequest(segment=wanted))])

    async def results(self, standing: Standing) -> list[pb.DownloadReply]:
        wanted = pb.ResultsRequest(standing=messages.pack_standing(standing))
        return await self.ask(pb.DownloadRequest(results=wanted))

    async def ask(self, request: pb.DownloadRequest) -> list[pb.DownloadReply]:
        return [reply async for reply in self.donor.serve(request)]


class Line:
    """A Transport that knows downloads only.

    Attributes:
        num_bytes: the bytes of segments and results that arrived, by donor.
        num_segments: how many segments were asked for, by donor.
        broken: donors that are out of reach.
        silent: donors that do not answer.
        tamper: sees each message and may change it, or break the line.
    """

    def __init__(self, holders: dict[str, Holder]) -> None:
        self.holders = holders
        self.num_bytes: Counter[str] = Counter()
        self.num_segments: Counter[str] = Counter()
        self.broken: set[str] = set()
        self.silent: set[str] = set()
        self.tamper: Callable[[str, pb.DownloadReply], None] = lambda donor, reply: None

    async def download(
        self, peer: PeerRecord, request: pb.DownloadRequest, *, silence_seconds: float
    ) -> AsyncIterator[pb.DownloadReply]:
        donor = peer.peer_id
        self.num_segments[donor] += request.HasField("segment")
        async for original in self.holders[donor].donor.serve(request):
            await asyncio.sleep(0.001)
            reply = pb.DownloadReply.FromString(original.SerializeToString())
            self.tamper(donor, reply)
            if donor in self.silent:
                await asyncio.sleep(silence_seconds)
                raise DeadlineExceeded("silence")
            if donor in self.broken:
                raise PeerUnavailable("the line is broken")
            self.num_bytes[donor] += len(reply.data)
            yield reply


def line_to(num_holders: int, *, rounds: int = 1) -> Line:
    """Donors 1, 2, ... that hold the same state after some rounds."""
    line = Line({peer_id(number): Holder() for number in range(1, num_holders + 1)})
    for holder in line.holders.values():
        for _ in range(rounds):
            holder.commit()
    return line


def holder(line: Line, number: int) -> Holder:
    """One of a line's donors."""
    return line.holders[peer_id(number)]


def queueing_line(num_holders: int) -> tuple[Line, Turns]:
    """Donors that hold the same state. The first one serves one peer at a time."""
    clock = LoopClock()
    turns = Turns(clock, is_training=lambda: False)
    line = Line({peer_id(n): Holder(clock, turns if n == 1 else None) for n in range(1, num_holders + 1)})
    for each in line.holders.values():
        each.commit()
    return line, turns


def transfer_over(
    line: Line, own_number: int = 99, *, silence_seconds: float = 0.05, waits: Waits | None = None, stage: int = 0
) -> StateTransfer:
    """A peer's downloads over that line."""
    return StateTransfer(
        line,  # type: ignore[arg-type]  # It knows downloads only.
        Address(stage=stage),
        peer_id(own_number),
        waits or Waits(),
        LoopClock(),
        silence_seconds=silence_seconds,
    )
