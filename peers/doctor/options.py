"""The options of swarm-doctor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from peers.doctor.ports import Ports
from peers.shared import cli, logs
from peers.shared.invite_option import InviteOption
from peers.stage_peer.listen import Outside


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Say whether this machine can serve a stage, and what stands in the way. The options are those of swarm-peer."""

    invite: InviteOption = None
    """The invite to the run, swarm://..., as every swarm-peer prints it; without one only this machine is checked."""
    lan: bool = False
    """Instead of an INVITE: the run that a peer announces in this network with --lan. Needs the extra lan."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with the invite (INVITE#TOKEN), or in SWARM_TOKEN."""
    stage: int | Literal["auto"] = "auto"
    """Stage that the peer is to serve."""
    device: str = "auto"
    """Device that the peer is to compute on."""
    host: str = ""
    """IP address to listen on; left out, all of this machine's."""
    port: int = 0
    """TCP port for tensors (gRPC)."""
    dht_port: int = 0
    """TCP port for the DHT."""
    announce: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """HOST[:PORT] at which others are to reach --port, once for each such address."""
    announce_dht: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """HOST[:PORT] at which others are to reach --dht-port, likewise."""
    checkpoint: Path | None = None
    """Folder for checkpoints."""
    keep_checkpoints: int = 3
    """Checkpoints to keep."""
    json: bool = False
    """Print one line of JSON instead of a line for each check."""
    insecure: bool = False
    """Look at a run whose peers were started with --insecure."""
    log_level: logs.LogLevel = "warning"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        if self.invite is not None and self.lan:
            raise ValueError("INVITE and --lan both say which run to enter: leave one out")
        cli.require_at_least(self, {"keep_checkpoints": 1})
        cli.require_ports(self, ["port", "dht_port"])
        if self.stage != "auto" and self.stage < 0:
            raise ValueError(f"--stage must not be negative, not {self.stage}")
        # Reading this property checks the addresses.
        _ = self.ports

    @property
    def ports(self) -> Ports:
        """Where the peer is to listen, and where others are to reach its ports."""
        outside = tuple(Outside.parse(text, option="--announce") for text in self.announce)
        outside_dht = tuple(Outside.parse(text, option="--announce-dht") for text in self.announce_dht)
        return Ports(host=self.host, port=self.port, dht_port=self.dht_port, outside=outside, outside_dht=outside_dht)

    @property
    def initial_peers(self) -> tuple[str, ...]:
        """Always empty: swarm-doctor finds the run through the peers that an invite names, and does not enter the
        DHT."""
        return ()
