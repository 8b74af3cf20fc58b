"""The options of swarm-dashboard."""

from dataclasses import dataclass
from pathlib import Path

from peers.shared import cli, process
from peers.shared.invite_option import InviteOption, joins

TOKEN_VARIABLE = "SWARM_VIEW_TOKEN"


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    """Show a running swarm as a page in the browser: http://localhost:8080. It changes nothing."""

    invite: InviteOption = None
    """To the run, swarm://..., as every swarm-peer prints it: the first of its peers that answers is asked."""
    peer: tuple[str, ...] = ()
    """Peers to ask instead (PEER_ID@HOST:PORT, as a swarm-peer has it in its log)."""
    initial_peers: tuple[str, ...] = ()
    """Enter the DHT instead, at these addresses of the swarm's peers, and ask no single peer who there is."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with the invite (INVITE#TOKEN), with an address
    (ADDRESS#TOKEN), or in SWARM_TOKEN."""
    host: str = "127.0.0.1"
    """Address at which the page is: others than this machine see it at 0.0.0.0, say."""
    port: int = 8080
    """Port of the page; 0 takes a free one."""
    view_token: str | None = None
    """What others must enter to see the page, or @FILE; also as SWARM_VIEW_TOKEN in the environment. A locked run is
    shown to other machines with one only."""
    known_as: tuple[str, ...] = ()
    """Names of this host under which browsers reach the page, such as that of a proxy before it; localhost and IP
    addresses always are."""
    interval: float = 2.0
    """Seconds between two looks at the run, however many people look at the page."""
    history: Path | None = None
    """Folder in which it is kept what was seen; by default dashboard in ~/.cache/swarm."""
    insecure: bool = False
    """For a run whose peers were started with --insecure."""
    log_level: process.LogLevel = "warning"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        ways = [joins(self), bool(self.peer)].count(True)
        if ways > 1:
            raise ValueError("INVITE, --peer and --initial-peers are ways to the same: leave all but one out")
        if ways == 0:
            raise ValueError("which run? say swarm-dashboard INVITE, with the invite that every swarm-peer prints")
        cli.require_ports(self, ["port"])
        cli.require_positive(self, ["interval"])
