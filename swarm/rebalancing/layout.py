"""Which peers work at which blocks, and each block's throughput: what follows from the DHT's records and claims.

A claim names the blocks that its peer is about to serve. Other peers count that peer as if it were there already, so
that two peers do not fill one gap. A peer that claims looks again a little later, when it can see all claims that were
made at the same time. It counts the claims that come before its own, and leaves out those that come after. All peers
order claims in the same way, so of two that want the same gap one finds it taken. Pure.
"""

import itertools
import statistics
from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.types import Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState

Span = tuple[Block, ...]
"""Adjacent blocks that one peer serves, in the order of the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    peer_id: PeerId
    span: Span
    """The blocks where the peer counts. A peer on its way counts where it goes."""
    speed: float = 0.0
    """Samples per second at a block of relative cost 1; 0 if unmeasured, which counts as the others' median."""
    missing: Collection[Block] = ()
    """Those of its blocks that the peer does not serve yet."""
    movable: bool = False
    """Whether the peer moves if that is called for; a peer that is on its way does not."""


class Layout:
    """All peers of a run, by block.

    Attributes:
        costs: relative cost of a sample, by block, in the order of the pipeline.
        workers: the peers, by id; of one that computes on several devices the part on the last of them.
        throughput: samples per second of each block: the sum over its peers.
        squares: by block: the sum of the squares of its peers' samples per second.
        num_workers: how many peers count at each block.
        num_serving: how many of these serve it already.
        movable: by span, (speed, peer id) of the peers that may move from there, the slowest first.
        usual_speed: the median of the measured speeds; 1 if no peer is measured.
        total_speed: the speed of all peers together.
    """

    def __init__(self, workers: Iterable[Worker], costs: Mapping[Block, float]) -> None:
        self.costs = dict(costs)
        all_workers = list(workers)
        self.workers = {worker.peer_id: worker for worker in all_workers}
        measured = [worker.speed for worker in all_workers if worker.speed > 0]
        self.usual_speed = statistics.median(measured) if measured else 1.0
        self.throughput = dict.fromkeys(costs, 0.0)
        self.squares = dict.fromkeys(costs, 0.0)
        self.num_workers = dict.fromkeys(costs, 0)
        self.num_serving = dict.fromkeys(costs, 0)
        self.movable: defaultdict[Span, list[tuple[float, PeerId]]] = defaultdict(list)
        self.total_speed = 0.0
        for worker in all_workers:
            speed = self.speed(worker)
            rate = speed / self.cost(worker.span)
            self.total_speed += speed
            for block in worker.span:
                self.throughput[block] += rate
                self.squares[block] += rate * rate
                self.num_workers[block] += 1
                self.num_serving[block] += block not in worker.missing
            if worker.movable and not worker.missing:
                insort(self.movable[worker.span], (speed, worker.peer_id))

    def speed(self, worker: Worker) -> float:
        """A peer's samples per second at a block of cost 1; if unmeasured, the usual speed."""
        return worker.speed if worker.speed > 0 else self.usual_speed

    def cost(self, span: Span) -> float:
        """The cost of a sample at all blocks of a span, each of which every sample passes."""
        return sum(self.costs[block] for block in span)

    @property
    def pipeline_throughput(self) -> float:
        return min(self.throughput.values())


def all_spans(blocks: Sequence[Block], longest: int) -> list[Span]:
    """All spans of up to so many blocks: each has one block, of any variant, of each of its stages."""
    by_stage = defaultdict[int, list[Block]](list)
    for block in blocks:
        by_stage[block.stage].append(block)
    stages = sorted(by_stage)
    return [
        span
        for length in range(1, longest + 1)
        for first in range(len(stages) - length + 1)
        for span in itertools.product(*(by_stage[stage] for stage in stages[first : first + length]))
    ]


def comes_before(one: ClaimRecord, other: ClaimRecord) -> bool:
    """Whether `one` comes before `other` in the order by state, then age, then id. If so, the peer of `other` counts
    `one`."""
    return _order(one) < _order(other)


def layout_of(
    records: Mapping[Block, Sequence[PeerRecord]],
    claims: Iterable[ClaimRecord],
    costs: Mapping[Block, float],
    *,
    own: ClaimRecord | None = None,
) -> Layout:
    """The layout of all peers, each at the blocks where it counts.

    Args:
        records: the peers' records by block, whatever their state.
        costs: relative cost of a sample, by block.
        own: this peer's claim, if it has made one. Then this peer, and those whose claims come later, count where they
            are now.
    """
    announced = defaultdict[str, dict[Block, PeerRecord]](dict)
    for record in (record for row in records.values() for record in row if record.block in costs):
        known = announced[record.peer_id].get(record.block)
        if known is None or known.announced_at < record.announced_at:
            announced[record.peer_id][record.block] = record
    counted = {
        claim.peer_id: claim
        for claim in claims
        if claim.state is not ClaimState.WITHDRAWN
        and all(block in costs for block in claim.span)
        and (own is None or (claim.peer_id != own.peer_id and comes_before(claim, own)))
    }
    workers: list[Worker] = []
    # Newcomers have claims, but no records yet.
    for peer_id in [*announced, *(claim for claim in counted if claim not in announced)]:
        workers += _workers(PeerId(peer_id), list(announced[peer_id].values()), counted.get(peer_id), costs)
    return Layout(workers, costs)


def newcomers_before(claims: Iterable[ClaimRecord], own: ClaimRecord, layout: Layout) -> list[ClaimRecord]:
    """The claims of newcomers that are choosing their blocks now, and come before this peer.

    Claims of peers that count already are left out: a peer that has just arrived may still be listed with one.
    """
    choosing = (claim for claim in claims if _is_choosing(claim) and claim.peer_id not in layout.workers)
    return [claim for claim in choosing if comes_before(claim, own)]


def without_choosing(claims: Iterable[ClaimRecord]) -> list[ClaimRecord]:
    return [claim for claim in claims if not _is_choosing(claim)]


def _is_choosing(claim: ClaimRecord) -> bool:
    return claim.from_stage is None and claim.state is ClaimState.PENDING


def _workers(
    peer_id: PeerId, records: Sequence[PeerRecord], claim: ClaimRecord | None, costs: Mapping[Block, float]
) -> list[Worker]:
    """One peer: where it goes by its claim, or else where it is."""
    # What an earlier process of the peer announced is out of date.
    nonce = max(records, key=lambda record: record.announced_at).nonce if records else ""
    records = [record for record in records if record.nonce == nonce]
    served = {record.block for record in records if record.state is PeerState.SERVING}
    staying = [record for record in records if record.state is not PeerState.LEAVING]
    if claim is not None:
        speed = sum(_speed(those, costs) for those in _by_device(staying or records))
        return [Worker(peer_id=peer_id, span=claim.span, speed=speed, missing=set(claim.span) - served)]
    return [
        Worker(
            peer_id=peer_id, span=(span := tuple(sorted(record.block for record in those))),
            speed=_speed(those, costs), missing=set(span) - served, movable=all(record.movable for record in those),
        )
        for those in _by_device(staying)
    ]  # fmt: skip


def _by_device(records: Sequence[PeerRecord]) -> list[list[PeerRecord]]:
    """The records of one peer, by its devices. Blocks on one device share its time."""
    devices = sorted({record.device for record in records})
    return [[record for record in records if record.device == device] for device in devices]


def _speed(records: Sequence[PeerRecord], costs: Mapping[Block, float]) -> float:
    """Samples per second at a block of cost 1, by what is announced of the blocks that have been measured."""
    measured = [record for record in records if record.samples_per_second > 0]
    rates = [record.samples_per_second for record in measured]
    return min(rates) * sum(costs[record.block] for record in measured) if rates else 0.0


def _order(claim: ClaimRecord) -> tuple[bool, float, str]:
    return claim.state is not ClaimState.CONFIRMED, claim.claimed_at, claim.peer_id
