"""--dashboard-port: the page of swarm-dashboard at a peer, served by a child process that ends with the peer.

The child asks this peer as it would any other. It has a lower priority, and never holds up the peer's event loop.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
from collections.abc import Mapping

from peers.commands import command_line
from peers.dashboard.program import TOKEN_VARIABLE, DashboardOptions
from peers.shared import cli, option_types
from peers.shared.process import cache_folder
from peers.shared.token_option import VARIABLE
from peers.stage_peer.options import PeerOptions
from swarm.credentials.token import Token
from swarm.machine import extras
from swarm.rpc.endpoint import endpoint_of, ip_of
from swarm.rpc.entry import Entry
from swarm.types import PeerId

logger = logging.getLogger(__name__)

NICENESS = 10
"""The niceness of the page's process. The peer's own computing comes first: if all cores are busy, the page gets a
tenth of one core."""
END_SECONDS = 5.0
"""How long the page's process may take to write its history and end, once the peer ends."""


def require_page(options: PeerOptions, environment: Mapping[str, str], *, is_locked: bool) -> None:
    """Raise ValueError if --dashboard-port cannot be served, which otherwise would show only once the peer serves."""
    host, port = options.dashboard_host, options.dashboard_port
    if port is None:
        return
    if (ip := ip_of(host)) is None:
        raise ValueError(f"--dashboard-host takes an IP address, not {host!r}")
    libraries = ["starlette", "uvicorn", "websockets"]
    extras.require("--dashboard-port", "starlette, uvicorn and websockets", "serve", modules=libraries)
    if is_locked and not ip.is_loopback and not environment.get(TOKEN_VARIABLE):
        raise ValueError(
            f"--dashboard-host {host} would show a locked run to everybody: set {TOKEN_VARIABLE} in the environment to "
            "what viewers must enter, or leave --dashboard-host out"
        )
    option_types.require_free_port("--dashboard-port", host, port)


class OwnDashboard:
    def __init__(self, options: PeerOptions, peer_id: str, port: int, token: Token | None) -> None:
        """`port` is that of the peer's gRPC server; the page's process looks at a locked run with the token."""
        listens_everywhere = not options.host or ipaddress.ip_address(options.host).is_unspecified
        self._entry = Entry(PeerId(peer_id), endpoint_of("127.0.0.1" if listens_everywhere else options.host, port))
        self._options = options
        self._token = token
        self._serves = asyncio.Event()

    def begin(self) -> None:
        self._serves.set()

    async def run(self) -> None:
        """Show the page, if it has a port, from when the peer serves until this is cancelled. If the page's process
        ends, log a warning and go on."""
        given = self._options
        if given.dashboard_port is None:
            return
        options = DashboardOptions(
            peer=(str(self._entry),), host=given.dashboard_host, port=given.dashboard_port, insecure=given.insecure,
            # Each page has a folder for its history, because several peers of one machine may have pages.
            history=cache_folder() / "dashboard" / self._entry.peer_id, embed=True,
        )  # fmt: skip
        await self._serves.wait()
        token = {} if self._token is None else {VARIABLE: str(self._token)}
        page = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(NICENESS), *command_line("dashboard", cli.arguments(options))),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **token},
            # The page's process does not get the terminal's Ctrl-C: the peer goes on serving for a while, and is shown
            # meanwhile.
            start_new_session=True,
        )
        try:
            code = await page.wait()
            logger.warning("the dashboard has ended with exit code %d; the peer goes on without", code)
        finally:
            assert page.stdin is not None
            page.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(page.wait(), END_SECONDS)
            if page.returncode is None:
                page.kill()
                await page.wait()
