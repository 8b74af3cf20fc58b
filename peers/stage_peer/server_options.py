"""The options of a stage's server that concern this machine alone: the run's configuration says nothing of them."""

from dataclasses import dataclass, field

import torch

from peers.shared.devices import Dtype
from peers.stage_peer.incarnation import Incarnation
from peers.stage_peer.resume import ResumeOptions
from peers.status.exporter import OwnFigures
from swarm.checkpoint.writer import CheckpointWriter
from swarm.content.servicer import Shelves
from swarm.events.kinds import Events
from swarm.interchange.weights import Weights
from swarm.machine.recording import Recorder
from swarm.rpc.meeting.budget import MeetingLimits
from swarm.stage.generation import SessionLimits


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of one stage's server."""

    name: str
    device: torch.device
    insecure: bool
    max_in_flight: int
    graph_bytes: int | None
    """Bytes that autograd graphs may take; None for a share of what is free."""
    resume: ResumeOptions
    checkpoints: CheckpointWriter | None
    events: Events
    dtype: Dtype | None = None
    """The type of matrix products; None for that of the run."""
    peak_flops: float = 0.0
    """The floating-point operations in a second that the device manages at best; 0 where that is not known."""
    compiles: bool = False
    """Whether layers are compiled."""
    recorder: Recorder | None = None
    """Records what the peer computes again and again; None: nothing is recorded."""
    sessions: SessionLimits = field(default_factory=SessionLimits)
    """How many texts this peer helps to write at a time, and with how much memory."""
    weights: Weights | None = None
    """The weights with which the run begins, if they are on this machine."""
    shelves: Shelves = field(default_factory=Shelves)
    """The content that this peer gives to others."""
    meeting: MeetingLimits = field(default_factory=MeetingLimits)
    """How much this peer does as a meeting point."""
    movable: bool = False
    """Whether the peer moves to another stage that needs it more."""
    moves: int = 0
    """How often the peer has moved."""
    own_figures: OwnFigures = field(default_factory=OwnFigures)
    """Given the peer's figures, for --metrics-port."""
    incarnation: Incarnation = field(default_factory=Incarnation)
    """This start of the process."""
