"""Says in words what happened to a swarm between two views of it."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from peers.status.peer_row import PeerRow
from peers.status.view import SwarmView

MOST_AT_ONCE = 24
"""The most lines about one view. If there are more, a line gives only their number."""

Kind = Literal["good", "bad", "plain"]


class Line(NamedTuple):
    """One thing that happened, and whether it is good for the run."""

    kind: Kind
    text: str


def news(before: SwarmView | None, now: SwarmView) -> list[Line]:
    """The lines that tell what has changed between two views."""
    if before is None:
        num_peers = sum(peer.stays for peer in now.peers)
        return [Line("plain", f"this page begins to watch: peers {num_peers}, trainers {len(now.trainers)}")]
    lines = [*_of_stages(before, now), *_of_peers(before, now), *_of_trainers(before, now), *_of_refusals(before, now)]
    if (more := len(lines) - MOST_AT_ONCE) > 0:
        lines[MOST_AT_ONCE:] = [Line("plain", f"and {more} more changes")]
    return lines


def _of_stages(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    was_empty, is_empty = set(before.empty_stages), set(now.empty_stages)
    for stage in sorted(is_empty - was_empty):
        last = now.last_peers.get(stage)
        yield Line("bad", f"stage {stage} has no peer{f': {last.name} was its last one' if last else ''}")
    silent = sorted(now.silent_stages.keys() - before.silent_stages.keys())
    yield from (Line("bad", f"no peer of stage {stage} answers") for stage in silent)
    yield from (Line("good", f"stage {stage} has a peer again") for stage in sorted(was_empty - is_empty))


def _of_peers(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    earlier, present = _by_id(before), _by_id(now)
    for peer_id, (stage, peer) in present.items():
        if peer_id not in earlier:
            yield from _of_newcomer(stage, peer)
        else:
            yield from _of_change(*earlier[peer_id], stage, peer)
    for peer_id, (stage, peer) in earlier.items():
        if peer_id not in present and peer.state != "leaving":
            yield Line("bad", f"{peer.name} of stage {stage} has gone")


def _of_newcomer(stage: int, peer: PeerRow) -> Iterator[Line]:
    if peer.state == "serving":
        yield Line("good", f"{peer.name} serves stage {stage}")
    elif peer.state in ("joining", "moving"):
        yield Line("plain", f"{peer.name} is on its way to stage {stage}")


def _of_change(old_stage: int, old: PeerRow, stage: int, peer: PeerRow) -> Iterator[Line]:
    if peer.state == "serving" and old_stage != stage:
        yield Line("good", f"{peer.name} has moved from stage {old_stage} to stage {stage}")
    elif peer.started_at > old.started_at > 0:
        yield Line("plain", f"{peer.name} of stage {stage} was started again")
    elif peer.state == old.state:
        return
    elif peer.state == "unreachable":
        if old.state != "leaving":
            yield Line("bad", f"{peer.name} of stage {stage} does not answer")
    elif peer.state == "serving":
        how = "answers again" if old.state == "unreachable" else f"serves stage {stage}"
        yield Line("good", f"{peer.name} {how}")
    elif peer.state == "leaving":
        yield Line("plain", f"{peer.name} leaves stage {stage}")
    elif peer.moving_to is not None:
        yield Line("plain", f"{peer.name} leaves stage {stage} for stage {peer.moving_to}")


def _of_trainers(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    earlier, present = {row.name for row in before.trainers}, {row.name for row in now.trainers}
    yield from (Line("good", f"trainer {name} is there") for name in sorted(present - earlier))
    yield from (Line("plain", f"trainer {name} has gone") for name in sorted(earlier - present))


def _of_refusals(before: SwarmView, now: SwarmView) -> Iterator[Line]:
    for key in now.refusals.keys() - before.refusals.keys():
        yield Line("bad", now.refusals[key])


def _by_id(view: SwarmView) -> dict[str, tuple[int, PeerRow]]:
    """The stage and row of each peer by its id. A moving peer has two rows: the one at its new stage is taken."""
    found: dict[str, tuple[int, PeerRow]] = {}
    for row in view.stages:
        for peer in row.peers:
            if peer.peer_id and (peer.peer_id not in found or peer.stays):
                found[peer.peer_id] = (row.stage, peer)
    return found
