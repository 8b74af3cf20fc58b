"""What do the viewers of a dashboard cost the swarm, and the machine of the dashboard?

Two stages train, and a dashboard takes a view of them every two seconds, as usual. Turns with `--viewers` viewers and
turns without any alternate. Each viewer holds a WebSocket and reads all messages, as a browser does, but draws nothing.
Turns are short, so that two neighbouring turns see about the same of what else the machine does. They begin and end
with a step. `throughput` is the steps per second with viewers over those without. Everything shares this machine's
cores here, so the bench also says how much of a core each part uses: the peers (which only pay for the views, wherever
the dashboard runs), the dashboard, and the viewers. `peers_cpu_per_step` is the peers' CPU time for a step with viewers
over that without. `intervals` has, for both ratios, the interval that holds the median with 95 %.
"""

import asyncio
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.commands import command_line
from peers.dashboard.options import DashboardOptions
from peers.local.supervisor import Child, Supervisor
from peers.shared import cli
from scripts.benches.shared import paired, proc
from scripts.benches.shared.common import (
    POLL_SECONDS,
    START_SECONDS,
    BenchOptions,
    SwarmProcesses,
    fail_on_exit,
    say,
    small_run,
    with_corpus,
)
from scripts.benches.shared.judged import LESS, MORE
from swarm.errors import DeadlineExceeded
from swarm.rpc.entry import Entry
from swarm.types import PeerId

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MOST_STEPS = 1_000_000
"""More steps than the trainer takes while the bench measures."""
SETTLE_SECONDS = 1.0
"""Time after the viewers have connected until their cost is measured."""

STEP_POLL_SECONDS = 0.01

JUDGED = {"throughput": MORE, "peers_cpu_per_step": LESS}


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Measure what viewers cost."""

    viewers: int = 50
    """Viewers that watch at once, 100 at most."""
    repetitions: int = 16
    """Turns with viewers, and as many without."""
    turn_seconds: float = 5.0
    """Length of each turn; it ends with the first step after that."""

    def __post_init__(self) -> None:
        cli.require_at_least(self, {"viewers": 1, "repetitions": 1})
        cli.require_positive(self, ["turn_seconds"])


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The measurements of one turn. CPU is in cores: seconds of processor time for each second."""

    steps_per_second: float
    peers_cpu: float
    dashboard_cpu: float
    viewers_cpu: float
    messages_per_second: float
    """The messages per second that all viewers together received."""


def run(options: Options) -> dict[str, Any]:
    """Ratios of neighbouring turns, and the medians of each side."""
    config, _ = with_corpus(small_run("viewers", options.dataset))
    sides: dict[str, list[Turn]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name, Supervisor(Path(name) / "logs") as children:
        swarm = SwarmProcesses(config, children, Path(name))
        swarm.start_peers([0, 1])
        dashboard, url = _start_dashboard(swarm)
        swarm.launch_trainer("trainer", MOST_STEPS)
        while not swarm.steps("trainer"):
            fail_on_exit(children)
            time.sleep(POLL_SECONDS)
        for number in range(options.repetitions):
            for side in paired.order(list(sides), number):
                num_viewers = options.viewers if side == "with" else 0
                sides[side].append(asyncio.run(_turn(swarm, dashboard, url, num_viewers, options.turn_seconds)))
                fail_on_exit(children)
            say(
                f"{number + 1} of {options.repetitions}: " + ", ".join(f"{s} {turns[-1]}" for s, turns in sides.items())
            )
    return {"viewers": options.viewers, **compared(sides["with"], sides["without"])}


def compared(watched: Sequence[Turn], unwatched: Sequence[Turn]) -> dict[str, Any]:
    """The figures of turns with viewers and without."""
    ratios = {
        "throughput": paired.ratio(*([turn.steps_per_second for turn in side] for side in (watched, unwatched))),
        "peers_cpu_per_step": paired.ratio(
            *([turn.peers_cpu / turn.steps_per_second for turn in side] for side in (watched, unwatched))
        ),
    }
    return {
        **paired.figures(ratios),
        "intervals": {name: list(found.interval) for name, found in ratios.items()},
        "with": paired.medians(_columns(watched)),
        "without": paired.medians(_columns(unwatched)),
    }


def _columns(turns: Sequence[Turn]) -> Mapping[str, Sequence[float]]:
    rows = [asdict(turn) for turn in turns]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _start_dashboard(swarm: SwarmProcesses) -> tuple[Child, str]:
    """Start a dashboard of the swarm. Return its process, and the address of its page."""
    record = swarm.peers[0].record
    options = DashboardOptions(
        peer=(str(Entry(PeerId(record.peer_id), record.endpoint)),), port=0, history=swarm.folder / "history"
    )
    child = swarm.children.start("dashboard", command_line("dashboard", cli.arguments(options)))
    deadline = time.monotonic() + START_SECONDS
    while (found := re.search(r"at (http://\S+)\n", child.log.read_text())) is None:
        fail_on_exit(swarm.children)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"no page after {START_SECONDS:.0f} s: is the machine busy with other work?")
        time.sleep(POLL_SECONDS)
    return child, found[1]


async def _turn(swarm: SwarmProcesses, dashboard: Child, url: str, num_viewers: int, seconds: float) -> Turn:
    # Only users of this bench need the extra `serve`.
    from websockets.asyncio.client import connect

    told = 0

    async def watch(viewer: "ClientConnection") -> None:
        nonlocal told
        await viewer.send("")
        async for _ in viewer:
            told += 1

    async def spent() -> list[float]:
        """The resources that were spent so far, read when a step ends."""
        metrics = swarm.metrics("trainer")
        size = metrics.stat().st_size
        while metrics.stat().st_size == size:
            fail_on_exit(swarm.children)
            await asyncio.sleep(STEP_POLL_SECONDS)
        peers = sum(proc.cpu_seconds_of_all(peer.child.pid) for peer in swarm.peers)
        steps = float(len(swarm.steps("trainer")))
        return [time.monotonic(), steps, peers, proc.cpu_seconds(dashboard.pid), time.process_time(), float(told)]

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        address = f"{url.replace('http', 'ws')}/live"
        viewers = [await stack.enter_async_context(connect(address, max_size=None)) for _ in range(num_viewers)]
        watching = [tasks.create_task(watch(viewer)) for viewer in viewers]
        await asyncio.sleep(SETTLE_SECONDS)
        before = await spent()
        await asyncio.sleep(seconds)
        passed, *changes = (after - earlier for after, earlier in zip(await spent(), before, strict=True))
        for one in watching:
            one.cancel()
    steps, peers, page, own, messages = (change / passed for change in changes)
    return Turn(
        steps_per_second=steps, peers_cpu=peers, dashboard_cpu=page, viewers_cpu=own, messages_per_second=messages
    )
