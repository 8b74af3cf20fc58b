"""What people see of a swarm at one moment: plain records, gathered by swarm-status and swarm-local.

Drawn by live_table.py. Nothing here talks to anybody.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """A stage peer: its announcement, and what it answered when asked."""

    name: str
    peer_id: str
    state: str
    """joining, serving, moving or leaving; unreachable where it announces itself and does not answer."""
    moving_from: int | None = None
    """The stage that it comes from, while it is listed where it goes."""
    moving_to: int | None = None
    """The stage that it goes to, while it finishes at the one where it is listed."""
    moves: int = 0
    """How often it has moved to another stage since it started."""
    device: str = ""
    """What it computes on, as PyTorch names it; empty where it has not said."""
    samples_per_second: float = 0.0
    queue_length: int = 0
    round: int = 0
    samples: int = 0
    """Samples it holds towards the current round."""
    forwards: int = 0
    backwards: int = 0
    rerouted_backwards: int = 0
    """Backwards it took over from a peer that dropped."""
    alive_peers: int = 0
    """Peers of its stage when it committed its last round, itself included."""
    members: int = 0
    """Of these, the ones that took part in that round's average; the next fields are about it as well."""
    averaged_fraction: float = 0.0
    """Share of the stage's parameters that were averaged."""
    averaged_bytes: int = 0
    """Sent and received."""
    compression_ratio: float = 0.0
    """Float32 size of what was averaged, over its size on the wire."""
    exchange_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Closed, before and after the exchange."""
    contribution_norm: float = 0.0
    """Of what it contributed itself."""
    attempts: int = 0
    """Attempts it led, since it started."""
    aborted: Mapping[str, int] = field(default_factory=dict)
    """Of these, the ones that came to nothing, by reason."""
    downloads: int = 0
    """States it downloaded because it was behind."""
    inner_steps: int = 0
    """DiLoCo: that it took in its last committed round; the next fields are about these steps."""
    samples_per_inner_step: float = 0.0
    configured_samples_per_inner_step: int = 0
    """0 in the synchronous setting."""
    staleness: float = 0.0
    """Versions of the weights made between a microbatch's forward and the step that used it, mean."""
    largest_staleness: int = 0
    loop_lag_seconds: float = 0.0
    """By how long its event loop was late at most, in the last minute or two: for so long it answered nobody."""
    refusals: tuple[str, ...] = ()
    """A line for each holder of its stage that says it is elsewhere in the run, and that it does not follow."""


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """A stage and its peers."""

    stage: int
    peers: tuple[PeerRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainerRow:
    """A trainer's announcement."""

    name: str
    step: int = 0
    loss: float | None = None
    """Nats per token, of the last step."""
    tokens_per_second: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SwarmView:
    """A whole swarm."""

    run: str
    stages: tuple[StageRow, ...] = ()
    """One row for each stage of the configuration, also for one without a peer."""
    trainers: tuple[TrainerRow, ...] = ()
    events: tuple[str, ...] = ()
    """What happened, oldest first: peers killed, joined, ended."""

    @property
    def empty_stages(self) -> list[int]:
        """Stages without a peer that serves or is on its way there."""
        return [row.stage for row in self.stages if not any(map(_stays, row.peers))]

    def to_json(self) -> str:
        """One line of JSON with the records' field names, and `empty_stages`."""
        return json.dumps({**dataclasses.asdict(self), "empty_stages": self.empty_stages}, allow_nan=False)


def _stays(peer: PeerRow) -> bool:
    return peer.state in _ALIVE and peer.moving_to is None


_ALIVE = ("joining", "moving", "serving")
