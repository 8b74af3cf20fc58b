"""What people see of a swarm at one moment: plain records, gathered by swarm-status and swarm-local.

Gathered by observe.py and drawn by live_table.py. Nothing here talks to anybody.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Self

from peers.status.figure import Column, figure, read
from peers.status.peer_row import PeerRow
from swarm.types import TrainerRecord


@dataclass(frozen=True, kw_only=True)
class StageRow:
    """A stage and its peers."""

    stage: int
    peers: tuple[PeerRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainerRow:
    """A trainer's announcement."""

    name: str = figure(
        "What it is called.",
        is_label=True,
        announced=lambda record: record.name,
        column=Column(heading="trainer", cell="{row.name}", is_text=True),
    )
    step: int = figure(
        "The step that it has seen last.",
        default=0,
        announced=lambda record: record.step,
        column=Column(heading="step", cell="{row.step}"),
    )
    loss: float | None = figure(
        "The loss of this step.",
        default=None,
        unit="nats per token",
        announced=lambda record: record.loss,
        column=Column(heading="loss", cell="{row.loss_text}"),
    )
    tokens_per_second: float = figure(
        "What the whole swarm trained on, in this step.",
        default=0.0,
        unit="tokens/s",
        announced=lambda record: record.tokens_per_second,
        column=Column(heading="tokens/s", cell="{row.tokens_per_second:,.0f}"),
    )

    @classmethod
    def of(cls, record: TrainerRecord) -> Self:
        """The row of a trainer by what it announces."""
        return cls(**read(cls, record, None))

    @property
    def loss_text(self) -> str:
        """The loss, or a dash where there is none yet."""
        return "-" if self.loss is None else f"{self.loss:.3f}"


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
        return [row.stage for row in self.stages if not any(peer.stays for peer in row.peers)]

    @property
    def refusals(self) -> dict[str, str]:
        """What peers say of holders that they do not follow.

        Keys name both peers only, since the rest changes at each look.
        """
        return {
            f"{peer.peer_id} refuses {refusal.partition(' ')[0]}": f"{peer.name}: {refusal}"
            for row in self.stages
            for peer in row.peers
            for refusal in peer.refusals
        }

    def to_json(self) -> str:
        """One line of JSON with the records' field names, and `empty_stages`."""
        return json.dumps({**dataclasses.asdict(self), "empty_stages": self.empty_stages}, allow_nan=False)
