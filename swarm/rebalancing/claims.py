"""The layout that follows from the DHT's records: which peers count at which stage, given the claims.

Used by the stage peer's program. A claim names the stage that its peer is about to serve. Other peers count that peer
as if it were there already, so that two peers do not fill one gap. A peer that claims looks again a little later, when
it can see all claims that were made at the same time. It counts the claims that come before its own, and leaves out
those that come after. All peers order claims in the same way, so of two that want the same gap one finds it taken.
Pure.
"""

from collections.abc import Iterable, Mapping, Sequence

from swarm.rebalancing.layout import Layout, Worker
from swarm.types import ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState


def comes_before(one: ClaimRecord, other: ClaimRecord) -> bool:
    """Whether `one` comes before `other` in the order by state, then age, then id. If so, the peer of `other` counts
    `one`."""
    return _order(one) < _order(other)


def layout_of(
    records: Mapping[int, Sequence[PeerRecord]],
    claims: Iterable[ClaimRecord],
    costs: Sequence[float],
    *,
    own: ClaimRecord | None = None,
) -> Layout:
    """The layout of all peers, each at the stage where it counts.

    Args:
        records: the peers' records by stage, whatever their state.
        costs: relative cost of a sample, by stage.
        own: this peer's claim, if it has made one. Then this peer, and those whose claims come later, count where they
            are now.
    """
    latest: dict[str, PeerRecord] = {}
    for record in (record for row in records.values() for record in row):
        known = latest.get(record.peer_id)
        if record.stage < len(costs) and (known is None or known.announced_at < record.announced_at):
            latest[record.peer_id] = record
    counted = {
        claim.peer_id: claim
        for claim in claims
        if claim.state is not ClaimState.WITHDRAWN
        and claim.stage < len(costs)
        and (own is None or (claim.peer_id != own.peer_id and comes_before(claim, own)))
    }
    workers = [_worker(record, counted.pop(peer_id, None), costs) for peer_id, record in latest.items()]
    # Newcomers have claims, but no records yet.
    newcomers = [Worker(peer_id=PeerId(claim.peer_id), stage=claim.stage, serving=False) for claim in counted.values()]
    return Layout([*(worker for worker in workers if worker is not None), *newcomers], costs)


def newcomers_before(claims: Iterable[ClaimRecord], own: ClaimRecord, layout: Layout) -> list[ClaimRecord]:
    """The claims of newcomers that are choosing a stage now, and come before this peer.

    Args:
        layout: the peers that count already. Their claims are left out: a peer that has just arrived may still be
            listed with one.
    """
    choosing = (claim for claim in claims if _is_choosing(claim) and claim.peer_id not in layout.workers)
    return [claim for claim in choosing if comes_before(claim, own)]


def without_choosing(claims: Iterable[ClaimRecord]) -> list[ClaimRecord]:
    """All claims except those of newcomers that are still choosing a stage."""
    return [claim for claim in claims if not _is_choosing(claim)]


def _is_choosing(claim: ClaimRecord) -> bool:
    return claim.from_stage is None and claim.state is ClaimState.PENDING


def _worker(record: PeerRecord, claim: ClaimRecord | None, costs: Sequence[float]) -> Worker | None:
    speed = record.samples_per_second * costs[record.stage]
    peer_id, serves = PeerId(record.peer_id), record.state is PeerState.SERVING
    has_arrived = claim is not None and serves and record.stage == claim.stage
    if claim is not None and not has_arrived:
        return Worker(peer_id=peer_id, stage=claim.stage, speed=speed, serving=False)
    if record.state is PeerState.LEAVING:
        return None
    movable = serves and record.movable and not has_arrived
    return Worker(peer_id=peer_id, stage=record.stage, speed=speed, serving=serves, movable=movable)


def _order(claim: ClaimRecord) -> tuple[bool, float, str]:
    return claim.state is not ClaimState.CONFIRMED, claim.claimed_at, claim.peer_id
