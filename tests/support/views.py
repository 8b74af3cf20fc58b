"""Views of made-up swarms, like those of swarm-status, for tests of code that shows or keeps views."""

from collections.abc import Iterable
from typing import Any

from peers.status.peer_row import PeerRow
from peers.status.view import StageRow, SwarmView, TrainerRow


def peer_id(name: str) -> str:
    return name.encode().hex().ljust(40, "0")[:40]


def peer(name: str, **figures: Any) -> PeerRow:
    """A peer that serves, unless its figures say otherwise."""
    return PeerRow(**{"name": name, "peer_id": peer_id(name), "state": "serving", **figures})


def view(*stages: Iterable[PeerRow], step: int | None = 1, **trainer: Any) -> SwarmView:
    """A run with these peers at each stage, and with a trainer unless there is no step."""
    rows = tuple(StageRow(stage=number, peers=tuple(peers)) for number, peers in enumerate(stages))
    figures = {"name": "feeder", "loss": 2.5, "tokens_per_second": 1000.0, **trainer}
    return SwarmView(run="run", stages=rows, trainers=() if step is None else (TrainerRow(step=step, **figures),))
