"""Which peers took part in a run's newest rounds, and what each has contributed since the run began.

Kept by history.py. A peer counts as a participant if it says that it took part. It counts as missing if it served
during the round and never said so.
"""

import statistics
from dataclasses import dataclass, field

from peers.status.contributions import Tallies
from peers.status.peer_row import PeerRow
from peers.status.view import StageRow, SwarmView
from swarm.training.tally import NOTHING_GIVEN, Given, total
from swarm.training.tally import by_peer as tallies_by_peer
from swarm.types import Block

MOST_ROUNDS = 48
MOST_FOLLOWED = 256
"""The most peers that are followed, over all stages: at each stage those with the lowest ids."""
FARTHEST = 64
"""A peer's claim about a round is ignored if the round is further than this from the median of all peers' rounds."""


@dataclass
class Part:
    """One stage's part in a round: the ids of the peers that took part, and of those that served."""

    took_part: list[str] = field(default_factory=list)
    was_there: list[str] = field(default_factory=list)


@dataclass
class Round:
    """One round, and when it was first seen to be over (`at`), in seconds since the epoch."""

    at: float
    stages: dict[str, Part] = field(default_factory=dict)


@dataclass
class Rounds:
    rounds: dict[int, Round] = field(default_factory=dict)
    serving: dict[str, list[str]] = field(default_factory=dict)
    """The ids of the peers that served each block, by its name, in the last view."""

    def add(self, view: SwarmView, at: float) -> None:
        followed = {str(row.block): _followed(row, len(view.stages)) for row in view.stages}
        everybody = [peer for peers in followed.values() for peer in peers]
        if everybody:
            middle = statistics.median_low(peer.round for peer in everybody)
            for stage, peers in followed.items():
                for peer in peers:
                    self._add(stage, peer, at, middle)
        self.serving = {stage: [peer.peer_id for peer in peers] for stage, peers in followed.items()}
        newest = sorted(self.rounds)[-MOST_ROUNDS:]
        self.rounds = {number: self.rounds[number] for number in newest}

    def _add(self, stage: str, peer: PeerRow, at: float, middle: int) -> None:
        for number in peer.recent_rounds:
            if abs(number - middle) > FARTHEST:
                continue
            found = self.rounds.setdefault(number, Round(at=at))
            if stage not in found.stages:
                found.stages[stage] = Part(was_there=list(self.serving.get(stage, ())))
            if peer.peer_id not in found.stages[stage].took_part:
                found.stages[stage].took_part.append(peer.peer_id)

    def to_json(self) -> dict[str, object]:
        return {
            str(number): {
                "at": found.at,
                "stages": {
                    stage: {
                        "took_part": list(part.took_part),
                        "missing": [peer_id for peer_id in part.was_there if peer_id not in part.took_part],
                    }
                    for stage, part in found.stages.items()
                },
            }
            for number, found in self.rounds.items()
        }


def _followed(row: StageRow, num_stages: int) -> list[PeerRow]:
    serving = sorted((peer for peer in row.peers if peer.state == "serving"), key=lambda peer: peer.peer_id)
    return serving[: max(1, MOST_FOLLOWED // num_stages)]


def by_peer(view: SwarmView) -> dict[str, dict[Block, PeerRow]]:
    found: dict[str, dict[Block, PeerRow]] = {}
    for row in view.stages:
        for peer in row.peers:
            if peer.peer_id:
                found.setdefault(peer.peer_id, {})[row.block] = peer
    return found


MOST_PEERS = 1024
"""The most peers that are kept: those that were seen last."""


@dataclass
class Contribution:
    """What one peer has contributed.

    Attributes:
        first_seen, last_seen: when it was seen first and last, in seconds since the epoch; 0 if it never was.
        serving_seconds: for how long it was seen to serve.
        given: what it has given since the run began, over all its blocks, by the run's tally.
        named: why it is named as a liar, if most members of a round have signed that.
    """

    name: str
    first_seen: float = 0.0
    last_seen: float = 0.0
    serving_seconds: float = 0.0
    given: Given = NOTHING_GIVEN
    named: str = ""


@dataclass
class Contributions:
    peers: dict[str, Contribution] = field(default_factory=dict)

    def add(self, view: SwarmView, at: float, *, seconds: float) -> None:
        """Note who serves in a view. The last one was taken `seconds` ago."""
        for peer_id, rows in by_peer(view).items():
            serving = [peer for peer in rows.values() if peer.state == "serving"]
            if not serving:
                continue
            name, known = serving[0].name, self.peers.pop(peer_id, None)
            was_seen = known is not None and known.first_seen > 0
            # The peer moves to the end of the dict, whose order is that in which peers were last seen.
            known = self.peers[peer_id] = known or Contribution(name=name)
            known.first_seen = known.first_seen or at
            known.serving_seconds += seconds if was_seen else 0.0
            known.name, known.last_seen = name, at
        self._forget()

    def take(self, tallies: Tallies) -> None:
        """Note what peers have given, and who is named, by the tallies of all blocks."""
        lines = {peer: named.line for block in tallies.blocks for peer, named in tallies.named(block).items()}
        for peer_id, given in tallies_by_peer(tallies.blocks).items():
            if peer_id not in self.peers:
                # It was gone before the page began to watch.
                named = Contribution(name=tallies.names.get(peer_id, peer_id[:8]))
                self.peers = {peer_id: named, **self.peers}
            self.peers[peer_id].given = total(given)
        for peer_id, known in self.peers.items():
            known.named = lines.get(peer_id, "")
        self._forget()

    def _forget(self) -> None:
        for peer_id in list(self.peers)[: max(0, len(self.peers) - MOST_PEERS)]:
            del self.peers[peer_id]

    def to_json(self) -> dict[str, dict[str, object]]:
        return {peer_id: vars(each) | {"given": each.given._asdict()} for peer_id, each in self.peers.items()}
