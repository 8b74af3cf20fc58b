"""The newest rounds of a run, and which peers took part in each stage's average.

Kept by history.py. A peer counts as a participant if it says that it took part. It counts as missing if it served
during the round and never said so.
"""

import statistics
from dataclasses import dataclass, field

from peers.status.peer_row import PeerRow
from peers.status.view import StageRow, SwarmView

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
    stages: dict[int, Part] = field(default_factory=dict)


@dataclass
class Rounds:
    """The newest rounds, by number and in that order."""

    rounds: dict[int, Round] = field(default_factory=dict)
    serving: dict[int, list[str]] = field(default_factory=dict)
    """The ids of the peers that served each stage in the last view."""

    def add(self, view: SwarmView, at: float) -> None:
        """Add what peers say of their last rounds."""
        followed = {row.stage: _followed(row, len(view.stages)) for row in view.stages}
        everybody = [peer for peers in followed.values() for peer in peers]
        if everybody:
            middle = statistics.median_low(peer.round for peer in everybody)
            for stage, peers in followed.items():
                for peer in peers:
                    self._add(stage, peer, at, middle)
        self.serving = {stage: [peer.peer_id for peer in peers] for stage, peers in followed.items()}
        newest = sorted(self.rounds)[-MOST_ROUNDS:]
        self.rounds = {number: self.rounds[number] for number in newest}

    def _add(self, stage: int, peer: PeerRow, at: float, middle: int) -> None:
        for number in peer.recent_rounds:
            if abs(number - middle) > FARTHEST:
                continue
            found = self.rounds.setdefault(number, Round(at=at))
            if stage not in found.stages:
                found.stages[stage] = Part(was_there=list(self.serving.get(stage, ())))
            if peer.peer_id not in found.stages[stage].took_part:
                found.stages[stage].took_part.append(peer.peer_id)

    def to_json(self) -> dict[str, object]:
        """The rounds as the page shows them, by number."""
        return {
            str(number): {
                "at": found.at,
                "stages": {
                    str(stage): {
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
