"""The options of swarm-dashboard."""

from dataclasses import dataclass
from pathlib import Path

from peers.shared import logs, option_checks
from peers.status.view_options import ViewOptions

TOKEN_VARIABLE = "SWARM_VIEW_TOKEN"


@dataclass(frozen=True, kw_only=True)
class DashboardOptions(ViewOptions):
    """Show running swarms as a page in the browser: http://localhost:8080. It changes nothing."""

    host: str = "127.0.0.1"
    """Address at which the page is served. With 0.0.0.0, say, other machines see it as well."""
    port: int = 8080
    """Port of the page; 0 takes a free one."""
    view_token: str | None = None
    """What people must enter to see the page, or @FILE; SWARM_VIEW_TOKEN in the environment does the same. A locked run
    is shown to other machines only with such a token."""
    known_as: tuple[str, ...] = ()
    """Names of this host under which browsers reach the page, such as the name of a proxy in front of it. localhost and
    IP addresses are accepted without being named."""
    interval: float = 2.0
    """Seconds between two views of the run, however many people look at the page."""
    history: Path | None = None
    """Folder that keeps what was seen; by default dashboard in ~/.cache/swarm."""
    embed: bool = False
    """End when stdin ends: for a program that starts this one, such as swarm-peer --dashboard-port."""
    log_level: logs.LogLevel = "warning"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        self.require_one_way("swarm-dashboard")
        option_checks.require_ports(self, ["port"])
        option_checks.require_kinds(self, folders=["history"])
        option_checks.require_positive(self, ["interval"])
