"""The options that say which runs a program shows: by invites, by peers to ask, or by addresses of the DHT.

The options of swarm-status and swarm-dashboard extend these. This imports neither gRPC nor torch.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from peers.shared.entrance import Entrance
    from swarm.machine.clock import Clock


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Where the runs are."""

    invites: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[INVITE ...]")]] = ()
    """The invite to the run, swarm://..., as every swarm-peer prints it: the first of its peers that answers is asked.
    Several invites show several runs side by side."""
    lan: bool = False
    """Instead of an INVITE: the run that a peer announces in this network with --lan. Needs the extra lan."""
    peer: tuple[str, ...] = ()
    """Peers to ask instead (PEER_ID@HOST:PORT, as a swarm-peer has it in its log)."""
    initial_peers: tuple[str, ...] = ()
    """Enter the DHT instead, at these addresses of the swarm's peers: slower, but relies on no single peer's answer."""
    runs: bool = False
    """Show all runs that are found: with --lan those of this network; otherwise all that are announced in the same DHT
    as the given run. The DHT is entered for that."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with the invite (INVITE#TOKEN), with an address
    (ADDRESS#TOKEN), or in SWARM_TOKEN."""
    insecure: bool = False
    """Look at a run whose peers were started with --insecure."""

    @property
    def invite(self) -> str | None:
        """The first invite; None if the options name none."""
        return next(iter(self.invites), None)

    @property
    def num_ways(self) -> int:
        return [bool(self.invites), self.lan, bool(self.peer), bool(self.initial_peers)].count(True)

    def require_one_way(self, prog: str) -> None:
        """Raise ValueError unless the options say in exactly one way where the runs are."""
        if self.num_ways > 1:
            raise ValueError(
                "INVITE, --lan, --peer and --initial-peers all say where the runs are: leave all but one out"
            )
        if self.num_ways == 0:
            raise ValueError(f"which run? type {prog} INVITE, with the invite that every swarm-peer prints")

    @property
    def asks_the_dht(self) -> bool:
        return self.runs and not self.lan

    def entrances(self, environment: Mapping[str, str], clock: "Clock") -> "list[Entrance]":
        """One entrance for each invite, or else a single one. With --lan and --runs, runs that need a token which the
        user has not given are left out, unless no run is left.

        Raises:
            What find_entrance and found_invite raise.
        """
        from peers.shared.lan import found_invite, found_invites

        if self.lan and self.runs:
            return self._enterable(found_invites(insecure=self.insecure), environment, clock)
        found = [found_invite(insecure=self.insecure)] if self.lan else []
        invites: Sequence[str | None] = found or self.invites or [None]
        return [self._entrance(invite, environment, clock) for invite in invites]

    def _enterable(self, invites: Sequence[str], environment: Mapping[str, str], clock: "Clock") -> "list[Entrance]":
        entrances, faults = [], []
        for invite in invites:
            try:
                entrances.append(self._entrance(invite, environment, clock))
            except ValueError as fault:
                logger.warning("a run of this network is not shown: %s", fault)
                faults.append(fault)
        if not entrances:
            raise faults[0]
        return entrances

    def _entrance(self, invite: str | None, environment: Mapping[str, str], clock: "Clock") -> "Entrance":
        from peers.shared.entrance import find_entrance
        from swarm.credentials.certificates import Role

        way = self if invite is None else dataclasses.replace(self, invites=(invite,), lan=False)
        return find_entrance(way, environment, role=Role.TRAINER, clock=clock, peers=self.peer)
