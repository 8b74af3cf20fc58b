"""Which peers work at which blocks, and each block's throughput: what follows from the DHT's records and claims.

A claim names the blocks that its peer is about to serve. Other peers count that peer as if it were there already, so
that two peers do not fill one gap. A peer that claims looks again a little later, when it can see all claims that were
made at the same time. It counts the claims that come before its own, and leaves out those that come after. All peers
order claims in the same way, so of two that want the same gap one finds it taken.

Where stages have variants, a microbatch takes one of several paths, and passes only the blocks on it. So a sample of
the run costs a block no more than the share of the paths that lead through it, and with one path all of it. Throughputs
are in samples of the run, whatever path these take. Pure.
"""

import math
import statistics
from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarm.types import Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState

Span = tuple[Block, ...]
"""Adjacent blocks that one peer serves, in the order of the pipeline."""
Paths = Mapping[Span, float]
"""The paths of a run, and how much of the run's work each has, compared with the others."""
IDLE = 0.01
"""The work of a path that stands still, or that no trainer feeds, as a share of that of others: its blocks want a peer,
and hardly more."""


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
        costs: relative cost of a sample that passes the block, by block, in the order of the pipeline.
        shares: by block: the share of the run's samples that passes it.
        work: by block: the relative cost of a sample of the run there, the cost times the share.
        workers: the peers, by id; of one that computes on several devices the part on the last of them.
        throughput: samples per second of each block: the sum over its peers. It is infinite where a block does not
            count now; see `within`.
        squares: by block: the sum of the squares of its peers' samples per second.
        num_workers: how many peers count at each block.
        num_serving: how many of these serve it already.
        movable: by span, (speed, peer id) of the peers that may move from there, the slowest first.
        usual_speed: the median of the measured speeds; 1 if no peer is measured.
        total_speed: the speed of all peers together.
    """

    def __init__(self, workers: Iterable[Worker], costs: Mapping[Block, float], paths: Paths | None = None) -> None:
        """Without `paths` there is one, through all blocks."""
        self.costs = dict(costs)
        self.paths = {tuple(costs): 1.0} if paths is None else paths
        self.shares = shares_of(costs, self.paths)
        self.work = {block: cost * self.shares[block] for block, cost in costs.items()}
        self._all_workers = all_workers = list(workers)
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

    def cost(self, span: Collection[Block]) -> float:
        """The cost of a sample of the run at all blocks of a span."""
        return sum(self.work[block] for block in span)

    @property
    def pipeline_throughput(self) -> float:
        return min(self.throughput.values())

    @property
    def counting(self) -> list[Block]:
        """The blocks that count now."""
        return [block for block, rate in self.throughput.items() if rate < math.inf]

    def open_paths(self, closed: Collection[Block | Span]) -> list[Span]:
        """The paths that can be trained, at least once others serve their blocks without peers: of these none is
        closed."""
        shut = {block for block, number in self.num_workers.items() if not number and block in closed}
        return [path for path in self.paths if shut.isdisjoint(path)]

    def scopes(self, closed: Collection[Block | Span]) -> Iterator["Layout"]:
        """This layout within the paths for which something is to be won: those that are trained, and the one that lacks
        the fewest peers for that; then only the former."""
        lacks = {path: sum(not self.num_workers[block] for block in path) for path in self.open_paths(closed)}
        trained = [path for path, number in lacks.items() if not number]
        waiting = [path for path, number in lacks.items() if number]
        if waiting:
            yield self.within([*trained, min(waiting, key=lambda path: (lacks[path], -self.paths[path]))])
        if trained or not lacks:
            yield self.within(trained)

    def within(self, paths: Collection[Span]) -> "Layout":
        """This layout while only these paths are trained, if there are any: blocks on no other ones do not count, and
        those that count have the work of these paths alone."""
        if len(paths) in (0, len(self.paths)):
            return self
        weights = {path: weight if path in paths else weight * IDLE for path, weight in self.paths.items()}
        blocks, scope = {block for path in paths for block in path}, Layout(self._all_workers, self.costs, weights)
        scope.throughput |= dict.fromkeys(scope.costs.keys() - blocks, math.inf)
        return scope


def shares_of(costs: Iterable[Block], paths: Paths) -> dict[Block, float]:
    """By block: the share of the run's samples that passes it."""
    shares, whole = dict.fromkeys(costs, 0.0), sum(paths.values())
    for path, weight in paths.items():
        for block in path:
            shares[block] += weight / whole
    return shares


def all_spans(paths: Iterable[Span], longest: int) -> list[Span]:
    """All spans of up to so many blocks along these paths."""
    paths = list(paths)
    lengths = range(1, min(longest, max(map(len, paths))) + 1)
    spans = (
        path[first : first + length]
        for length in lengths
        for first in range(max(map(len, paths)) - length + 1)
        for path in paths
    )
    return list(dict.fromkeys(spans))


def comes_before(one: ClaimRecord, other: ClaimRecord) -> bool:
    """Whether `one` comes before `other` in the order by state, then age, then id. If so, the peer of `other` counts
    `one`."""
    return _order(one) < _order(other)


def layout_of(
    records: Mapping[Block, Sequence[PeerRecord]],
    claims: Iterable[ClaimRecord],
    costs: Mapping[Block, float],
    paths: Paths | None = None,
    *,
    own: ClaimRecord | None = None,
) -> Layout:
    """The layout of all peers, each at the blocks where it counts.

    Args:
        records: the peers' records by block, whatever their state.
        costs: relative cost of a sample that passes a block, by block.
        paths: those of the run; None: one, through all blocks.
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
    return Layout(workers, costs, paths)


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
    """Samples per second at a block of cost 1, by what is announced of the blocks that have been measured.

    A peer that serves several variants of a stage announces of each the samples that it gets there, beside the others.
    """
    rates = {record.block: record.samples_per_second for record in records if record.samples_per_second > 0}
    if len({block.stage for block in rates}) < len(rates):
        return sum(rate * costs[block] for block, rate in rates.items())
    return min(rates.values()) * sum(costs[block] for block in rates) if rates else 0.0


def _order(claim: ClaimRecord) -> tuple[bool, float, str]:
    return claim.state is not ClaimState.CONFIRMED, claim.claimed_at, claim.peer_id
