"""swarm-dashboard: a page in the browser with the figures of status/peer_row.py, where another one is added.

    swarm-dashboard INVITE... [--port 8080]
    swarm-dashboard INVITE --host 0.0.0.0 --view-token @FILE

It takes views of each run as swarm-status does, and shows them to all viewers. What it has seen of a run is kept in a
file. It changes nothing in the runs. Reads top to bottom: options -> take the page's address -> find the runs -> look
and serve until Ctrl-C.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from peers.dashboard.history import HistoryFile
from peers.dashboard.watcher import Watcher
from peers.shared import cli, logs, stopping
from peers.shared import option_types as takes
from peers.shared.entrance import Entrance
from peers.shared.process import cache_folder
from peers.shared.sole_writer import require_sole_writer
from peers.status.lookout import Lookout, lookouts_on
from peers.status.program import ViewOptions
from swarm.machine import extras
from swarm.machine.clock import SystemClock, run_loop

if TYPE_CHECKING:
    from peers.shared.web import Listener

PROG = "swarm-dashboard"
TOKEN_VARIABLE = "SWARM_VIEW_TOKEN"
SAVE_SECONDS = 30.0
"""Time between two writes of the history; a killed process loses at most this much of it."""


@dataclass(frozen=True, kw_only=True)
class DashboardOptions(ViewOptions):
    """Show running swarms as a page in the browser: http://localhost:8080. It changes nothing."""

    host: str = "127.0.0.1"
    """Address at which the page is served. With 0.0.0.0, say, other machines see it as well."""
    port: takes.Port = 8080
    """Port of the page; 0 takes a free one."""
    view_token: str | None = None
    """What people must enter to see the page, or @FILE; SWARM_VIEW_TOKEN in the environment does the same. A locked run
    is shown to other machines only with such a token."""
    known_as: tuple[str, ...] = ()
    """Names of this host under which browsers reach the page, such as the name of a proxy in front of it. localhost and
    IP addresses are accepted without being named."""
    interval: takes.Seconds = 2.0
    """Seconds between two views of the run, however many people look at the page."""
    history: takes.Folder | None = None
    """Folder that keeps what was seen; by default dashboard in ~/.cache/swarm."""
    embed: bool = False
    """End when stdin ends: for a program that starts this one, such as swarm-peer --dashboard-port."""
    log_level: logs.LogLevel = "warning"

    def __post_init__(self) -> None:
        self.require_one_way("swarm-dashboard")


def main(argv: Sequence[str]) -> int:
    options = cli.parse(DashboardOptions, prog=PROG, argv=argv)
    logs.setup_logging("dashboard", options.log_level)
    entrances = options.entrances(PROG, os.environ, SystemClock())
    is_locked = any(entrance.token is not None for entrance in entrances)
    listener, view_token = take_address(options, is_locked=is_locked)
    try:
        run_loop(run(options, entrances, listener, view_token))
    finally:
        listener.close()
    return 0


def take_address(options: DashboardOptions, *, is_locked: bool) -> "tuple[Listener, str | None]":
    """Listen at the page's address. Return the listener, and the token that viewers must have, if any. Raises
    ValueError if the libraries are not installed, the address cannot be taken, or a locked run would be shown to
    everybody, and OSError if the file with the token cannot be read."""
    extras.require(PROG, "starlette, uvicorn and websockets", "serve", modules=["starlette", "uvicorn", "websockets"])
    from peers.shared.web import Listener, find_secret

    view_token = find_secret(options.view_token, os.environ, option="--view-token", variable=TOKEN_VARIABLE)
    listener = Listener(options.host, options.port, option="--port", host_option="--host")
    if not listener.is_local and view_token is None:
        if is_locked:
            listener.close()
            raise ValueError(
                f"--host {options.host} would show a locked run to everybody: add --view-token @FILE, or leave --host "
                "out"
            )
        say(f"warning: everybody who reaches {listener.url} sees the run: lock the page with --view-token @FILE")
    return listener, view_token


class Watched(NamedTuple):
    run_id: str
    watcher: Watcher
    file: HistoryFile


async def run(
    options: DashboardOptions, entrances: Sequence[Entrance], listener: "Listener", view_token: str | None
) -> None:
    """Find the runs, then look and serve until told to stop. Raises what lookouts_on raises."""
    from peers.dashboard.app import Hub, page_of

    say("looking for the run")
    async with lookouts_on(entrances, all_runs=options.asks_the_dht) as lookouts:
        with ExitStack() as stack:
            runs = [stack.enter_context(watched(options, lookout)) for lookout in lookouts]
            hub = Hub(lambda: {one.run_id: one.watcher.series for one in runs})
            page = page_of(hub, token=view_token, names=options.known_as)
            stop = stopping.stop_event()
            say(f"shows {', '.join(one.run_id for one in runs)} at {listener.url}")

            def publish() -> None:
                hub.publish({"runs": {one.run_id: one.watcher.state for one in runs}})

            ending = [stop_after_stdin(stop)] if options.embed else []
            async with stopping.beside(*(one.watcher.watch(publish) for one in runs), keep(runs), *ending):
                await listener.serve(page, stop, with_websockets=True)


@contextmanager
def watched(options: DashboardOptions, lookout: Lookout) -> Iterator[Watched]:
    """A run, with its history, which is written to its file when the block ends. Raises ValueError if another dashboard
    keeps this run's history in this folder, and OSError if the folder, or what it holds, cannot be read."""
    run_id = lookout.config.run_id
    folder = options.history or cache_folder() / "dashboard"
    folder.mkdir(parents=True, exist_ok=True)
    # The lock is on a file beside the history, which is replaced at every write.
    lock = require_sole_writer(folder / f"{run_id}.lock", f"--history {folder}, of {run_id},")
    try:
        file = HistoryFile(folder / f"{run_id}.json")
        watcher = Watcher(lookout, file.read(run_id), clock=SystemClock(), interval_seconds=options.interval)
        try:
            yield Watched(run_id, watcher, file)
        finally:
            file.write(watcher.history)
    finally:
        os.close(lock)


async def keep(runs: Sequence[Watched]) -> None:
    """Write the histories every SAVE_SECONDS, until cancelled."""
    while True:
        await asyncio.sleep(SAVE_SECONDS)
        for one in runs:
            one.file.write(one.watcher.history)


async def stop_after_stdin(stop: asyncio.Event) -> None:
    """Set `stop` once stdin ends: then the process that started this one has ended."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while await reader.read(1024):
            pass
        stop.set()
    finally:
        transport.close()


def say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)
