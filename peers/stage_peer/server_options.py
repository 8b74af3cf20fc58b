"""What a stage's server is told that concerns this machine alone."""

from dataclasses import dataclass, field

import torch

from peers.shared.own_figures import OwnFigures
from peers.stage_peer.incarnation import Incarnation
from peers.stage_peer.resume import ResumeOptions
from swarm.checkpoint.writer import CheckpointWriter
from swarm.content.servicer import Shelves
from swarm.events.kinds import Events
from swarm.interchange.weights import Weights
from swarm.rpc.meeting.budget import MeetingLimits
from swarm.stage.places import SessionLimits


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What concerns this machine alone."""

    name: str
    device: torch.device
    insecure: bool
    max_in_flight: int
    graph_bytes: int | None
    """What autograd graphs may take; None for a share of what is free."""
    resume: ResumeOptions
    checkpoints: CheckpointWriter | None
    events: Events
    compiles: bool = False
    """Whether layers are compiled."""
    sessions: SessionLimits = field(default_factory=SessionLimits)
    """How much text it helps to write."""
    weights: Weights | None = None
    """What the run begins with, if it is here."""
    shelves: Shelves = field(default_factory=Shelves)
    """What it gives to others."""
    meeting: MeetingLimits = field(default_factory=MeetingLimits)
    """What it does for peers that others do not reach."""
    movable: bool = False
    """Whether the peer may be needed elsewhere and go there."""
    moves: int = 0
    """How often it has done so."""
    own_figures: OwnFigures = field(default_factory=OwnFigures)
    """Where the peer says what it does."""
    incarnation: Incarnation = field(default_factory=Incarnation)
    """This start of the process."""
