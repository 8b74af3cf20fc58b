"""A swarm in which each process is behind a line of its own (throttle.py).

Used by the benches that measure over slow lines, and by the benches that lose messages on purpose. Never measures
anything.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared.common import ServingPeer, SwarmProcesses
from scripts.benches.shared.throttle import Link, Throttle

NEVER = 1_000_000_000
"""Microbatches of a round that does not end, or steps of a trainer that does not."""
FAST = 1e9
"""Bytes per second of a line that is never the limit."""


class Lines(Supervisor):
    """Puts every child behind a line of its own."""

    def __init__(self, log_folder: Path, throttle: Throttle, environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            environment: further environment variables of every child.
        """
        super().__init__(log_folder)
        self.folder = log_folder
        self.environment = dict(environment or {})
        self.throttle = throttle
        self.links: dict[str, Link] = {}
        """The link of each child, by its name."""
        self.own = throttle.link()
        """The link of this process."""

    def start(self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> Child:
        self.links[name] = link = self.throttle.link()
        environment = {**self.environment, **(environment or {}), **link.environment}
        return super().start(name, command, environment=environment)


def serve(swarm: SwarmProcesses, peers: Sequence[ServingPeer]) -> None:
    """Let what peers send and receive go over their own lines, if they have any."""
    if isinstance(swarm.children, Lines):
        for peer in peers:
            swarm.children.throttle.serve(peer.record.endpoint, swarm.children.links[peer.child.name])
