"""swarm-dashboard: a page in the browser that shows a running swarm.

    swarm-dashboard INVITE [--port 8080]
    swarm-dashboard INVITE --host 0.0.0.0 --view-token @FILE

Looks at the run as swarm-status does, for all viewers at once, and keeps what it has seen in a file of its own. Changes
nothing. Reads top to bottom: options -> take the page's address -> find the run -> look and serve until Ctrl-C.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from peers.dashboard.history import HistoryFile
from peers.dashboard.hub import Hub
from peers.dashboard.invitation import how_to_join
from peers.dashboard.options import TOKEN_VARIABLE, DashboardOptions
from peers.dashboard.watcher import Watcher
from peers.shared import cli, process
from peers.shared.cache import cache_folder
from peers.shared.entrance import Entrance, find_entrance
from peers.shared.sole_writer import require_sole_writer
from peers.status.lookout import lookout_at, node_for
from swarm.credentials.certificates import Role
from swarm.dht.node import DhtNode
from swarm.machine.clock import SystemClock, run_loop

if TYPE_CHECKING:
    from peers.shared.web import Listener

PROG = "swarm-dashboard"
SAVE_SECONDS = 30.0
"""So much of what was seen is lost at most, if the process is killed."""


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(DashboardOptions, prog=PROG, argv=argv)
    process.setup_logging("dashboard", options.log_level)
    entrance = find_entrance(options, os.environ, role=Role.TRAINER, clock=SystemClock(), peers=options.peer)
    listener, view_token = take_address(options, is_locked=entrance.token is not None)
    try:
        with node_for(entrance) as node:
            run_loop(run(options, entrance, node, listener, view_token))
    finally:
        listener.close()
    return 0


def take_address(options: DashboardOptions, *, is_locked: bool) -> "tuple[Listener, str | None]":
    """The page's address, and what must be known to see it.

    Raises:
        ValueError: the libraries are not installed, the address cannot be had, or a locked run would be shown to
            everybody.
        OSError: the file with the token cannot be read.
    """
    try:
        import websockets  # noqa: F401 - the web server imports it once a browser asks

        from peers.shared.web import Listener, find_secret
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "websockets"):
            raise
        raise ValueError(
            f"{PROG} needs starlette, uvicorn and websockets: .venv/bin/pip install -c constraints.txt -e '.[serve]'"
        ) from None
    view_token = find_secret(options.view_token, os.environ, option="--view-token", variable=TOKEN_VARIABLE)
    listener = Listener(options.host, options.port, option="--port")
    if not listener.is_local and view_token is None:
        if is_locked:
            listener.close()
            raise ValueError(
                f"--host {options.host} would show a locked run to everybody: add --view-token @FILE, or leave --host "
                "out"
            )
        say(f"warning: everybody who reaches {listener.url} sees the run: lock the page with --view-token @FILE")
    return listener, view_token


async def run(
    options: DashboardOptions, entrance: Entrance, node: DhtNode | None, listener: "Listener", view_token: str | None
) -> None:  # fmt: skip
    """Find the run, then look and serve until told to stop. Raises what lookout_at raises."""
    from peers.dashboard.app import page_of

    say("looking for the run")
    async with lookout_at(entrance, node) as lookout:
        config, clock = lookout.config, SystemClock()
        folder = options.history or cache_folder() / "dashboard"
        folder.mkdir(parents=True, exist_ok=True)
        # A file beside it: the history itself is replaced each time.
        lock = require_sole_writer(folder / f"{config.run_id}.lock", f"the history of {config.run_id} in {folder}")
        file = HistoryFile(folder / f"{config.run_id}.json")
        watcher = Watcher(
            lookout, file.read(config.run_id), clock=clock, interval_seconds=options.interval,
            how_to_join=partial(how_to_join, insecure=options.insecure),
        )  # fmt: skip
        hub = Hub(lambda: {config.run_id: watcher.series})
        page = page_of(hub, token=view_token, names=["localhost", *map(str.lower, options.known_as)])
        stop = process.stop_event()
        say(f"shows {config.run_id} at {listener.url}")
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(watcher.watch(lambda: hub.publish({"runs": {config.run_id: watcher.state}}))),
                    tasks.create_task(keep(file, watcher)),
                ]
                await listener.serve(page, stop, with_websockets=True)
                for task in background:
                    task.cancel()
        finally:
            file.write(watcher.history)
            os.close(lock)


async def keep(file: HistoryFile, watcher: Watcher) -> None:
    """Write the history down now and then, until cancelled."""
    while True:
        await asyncio.sleep(SAVE_SECONDS)
        file.write(watcher.history)


def say(text: str) -> None:
    """To the user, on stderr."""
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)
