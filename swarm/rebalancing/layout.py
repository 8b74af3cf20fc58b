"""Which peers work at which block, and each block's throughput: what follows from the DHT's records and claims.

A claim names the block that its peer is about to serve. Other peers count that peer as if it were there already, so
that two peers do not fill one gap. A peer that claims looks again a little later, when it can see all claims that were
made at the same time. It counts the claims that come before its own, and leaves out those that come after. All peers
order claims in the same way, so of two that want the same gap one finds it taken. Pure.
"""

import statistics
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.types import Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState


@dataclass(frozen=True, kw_only=True)
class Worker:
    peer_id: PeerId
    block: Block
    """The block where the peer counts. A peer on its way counts where it goes."""
    speed: float = 0.0
    """Samples per second at a block of relative cost 1; 0 if unmeasured, which counts as the others' median."""
    serving: bool = True
    """Whether the peer serves that block already, and stays."""
    movable: bool = False
    """Whether the peer moves if that is called for; a peer that is on its way does not."""


class Layout:
    """All peers of a run, by block.

    Attributes:
        costs: relative cost of a sample, by block, in the order of the pipeline.
        workers: the peers, by id; of one that serves several blocks the last of them.
        throughput: samples per second of each block: the sum over its peers.
        squares: by block: the sum of the squares of its peers' samples per second.
        num_workers: how many peers count at each block.
        num_serving: how many of these serve it already.
        movable: by block, (speed, peer id) of the peers that may move, the slowest first.
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
        self.movable: dict[Block, list[tuple[float, PeerId]]] = {block: [] for block in costs}
        self.total_speed = 0.0
        for worker in all_workers:
            speed = self.speed(worker)
            rate = speed / self.costs[worker.block]
            self.total_speed += speed
            self.throughput[worker.block] += rate
            self.squares[worker.block] += rate * rate
            self.num_workers[worker.block] += 1
            self.num_serving[worker.block] += worker.serving
            if worker.movable and worker.serving:
                insort(self.movable[worker.block], (speed, worker.peer_id))

    def speed(self, worker: Worker) -> float:
        """A peer's samples per second at a block of cost 1; if unmeasured, the usual speed."""
        return worker.speed if worker.speed > 0 else self.usual_speed

    @property
    def pipeline_throughput(self) -> float:
        return min(self.throughput.values())


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
    """The layout of all peers, each at the block where it counts.

    Args:
        records: the peers' records by block, whatever their state.
        costs: relative cost of a sample, by block.
        own: this peer's claim, if it has made one. Then this peer, and those whose claims come later, count where they
            are now.
    """
    latest: dict[tuple[str, Block | None], PeerRecord] = {}
    for record in (record for row in records.values() for record in row):
        # One that stays may serve several blocks, and counts at each.
        place = record.peer_id, None if record.movable else record.block
        known = latest.get(place)
        if record.block in costs and (known is None or known.announced_at < record.announced_at):
            latest[place] = record
    counted = {
        claim.peer_id: claim
        for claim in claims
        if claim.state is not ClaimState.WITHDRAWN
        and claim.block in costs
        and (own is None or (claim.peer_id != own.peer_id and comes_before(claim, own)))
    }
    claimed = {
        place: claim for place, record in latest.items()
        if (claim := counted.get(record.peer_id)) is not None and (record.movable or claim.block == record.block)
    }  # fmt: skip
    workers = [_worker(record, claimed.get(place), costs) for place, record in latest.items()]
    for claim in claimed.values():
        counted.pop(claim.peer_id, None)
    # Newcomers have claims, but no records yet.
    newcomers = [Worker(peer_id=PeerId(claim.peer_id), block=claim.block, serving=False) for claim in counted.values()]
    return Layout([*(worker for worker in workers if worker is not None), *newcomers], costs)


def newcomers_before(claims: Iterable[ClaimRecord], own: ClaimRecord, layout: Layout) -> list[ClaimRecord]:
    """The claims of newcomers that are choosing a block now, and come before this peer.

    Claims of peers that count already are left out: a peer that has just arrived may still be listed with one.
    """
    choosing = (claim for claim in claims if _is_choosing(claim) and claim.peer_id not in layout.workers)
    return [claim for claim in choosing if comes_before(claim, own)]


def without_choosing(claims: Iterable[ClaimRecord]) -> list[ClaimRecord]:
    return [claim for claim in claims if not _is_choosing(claim)]


def _is_choosing(claim: ClaimRecord) -> bool:
    return claim.from_stage is None and claim.state is ClaimState.PENDING


def _worker(record: PeerRecord, claim: ClaimRecord | None, costs: Mapping[Block, float]) -> Worker | None:
    speed = record.samples_per_second * costs[record.block]
    peer_id, serves = PeerId(record.peer_id), record.state is PeerState.SERVING
    has_arrived = claim is not None and serves and record.block == claim.block
    if claim is not None and not has_arrived:
        return Worker(peer_id=peer_id, block=claim.block, speed=speed, serving=False)
    if record.state is PeerState.LEAVING:
        return None
    movable = serves and record.movable and not has_arrived
    return Worker(peer_id=peer_id, block=record.block, speed=speed, serving=serves, movable=movable)


def _order(claim: ClaimRecord) -> tuple[bool, float, str]:
    return claim.state is not ClaimState.CONFIRMED, claim.claimed_at, claim.peer_id
