"""How soon after its start is each command useful, and what does the start cost?

Each repetition starts a new swarm: a first peer, a peer of another stage, a trainer until its first step is done, a
peer that joins the trained stage, and swarm-status, which asks that peer or enters the DHT itself. Seconds are those of
the clock until a peer serves, a trainer has taken its step, or a program has answered. CPU seconds are those of all its
processes until then, p2pd included. The time to import a command's program is the cost before it does anything.
Machines differ, so `cpu_over_import` is a ratio: the CPU seconds of a command over those of importing the libraries
that it needs.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.commands import command_line
from peers.local.supervisor import Supervisor
from peers.shared import cli
from scripts.benches.shared import paired, proc
from scripts.benches.shared.common import (
    POLL_SECONDS,
    STALL_SECONDS,
    BenchOptions,
    ServingPeer,
    SwarmProcesses,
    fail_on_exit,
    say,
    small_run,
    stalled,
    with_corpus,
)
from scripts.benches.shared.judged import LESS
from swarm.errors import PeerUnavailable
from swarm.rpc.entry import Entry
from swarm.types import PeerId

PROGRAMS = {
    "stage_peer": "peers.stage_peer.program",
    "trainer": "peers.trainer.program",
    "status": "peers.status.program",
    "local": "peers.local.program",
    "keys": "peers.keys",
}
"""The module of each program."""
YARDSTICKS = {"torch": "import torch", "hivemind": "import torch, hivemind"}
"""The imports with which CPU seconds are compared, measured in the same repetition: `torch`, except for the names in
IN_THE_DHT."""
IN_THE_DHT = ("first_peer_serving", "joiner_serving", "trainer_first_step", "status_dht")
"""The moments that need hivemind as well."""

JUDGED = {"cpu_over_import.*": LESS}


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Measure the start of each command."""

    repetitions: int = 3
    """Swarms that are started, one after another."""

    def __post_init__(self) -> None:
        cli.require_at_least(self, {"repetitions": 1})


def run(options: Options) -> dict[str, Any]:
    """Medians of all repetitions, and ratios of CPU seconds within each."""
    config, _ = with_corpus(small_run("startup", options.dataset))
    samples: list[dict[str, float]] = []
    for number in range(options.repetitions):
        say(f"repetition {number + 1} of {options.repetitions}")
        with tempfile.TemporaryDirectory() as folder, Supervisor(Path(folder) / "logs") as children:
            swarm = SwarmProcesses(config, children, Path(folder))
            samples.append({**_imports(), **_starts(swarm)})
            swarm.stop()
        say(", ".join(f"{name} {value:.2f}" for name, value in samples[-1].items()))
    turns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {
        **paired.figures({"cpu_over_import": _over_import(turns)}),
        **paired.medians(turns),
        "repetitions": turns,
    }


def _over_import(turns: paired.Turns) -> dict[str, paired.Ratio]:
    """The CPU seconds of every command, and of importing its program, over those of its import in YARDSTICKS."""
    found = {}
    for name in turns:
        command = name.removesuffix("_cpu_seconds")
        if command != name and command.removeprefix("import_") not in YARDSTICKS:
            yardstick = "hivemind" if command in IN_THE_DHT else "torch"
            found[command] = paired.ratio(turns[name], turns[f"import_{yardstick}_cpu_seconds"])
    return found


def _imports() -> dict[str, float]:
    statements = YARDSTICKS | {name: f"import {module}" for name, module in PROGRAMS.items()}
    return {
        f"import_{name}_cpu_seconds": _to_the_end([sys.executable, "-c", statement])[0]
        for name, statement in statements.items()
    }


def _starts(swarm: SwarmProcesses) -> dict[str, float]:
    swarm.prepare()
    figures = _serves(swarm, 0, "first_peer")
    _serves(swarm, 1, "second_peer")
    figures |= first_step(swarm)
    # The joiner downloads the state of the second peer.
    figures |= _serves(swarm, 1, "joiner")
    joiner = swarm.peers[-1]
    for way, where in (("status", ["--peer", _entry(joiner)]), ("status_dht", ["--initial-peers", joiner.dht_address])):
        cpu_seconds, seconds = _to_the_end(command_line("status", [*where, "--json"]))
        figures |= {f"{way}_cpu_seconds": cpu_seconds, f"{way}_seconds": seconds}
    return figures


def _serves(swarm: SwarmProcesses, stage: int, name: str) -> dict[str, float]:
    began_at = time.time()
    child = swarm.launch_peer(stage)
    peer = swarm.until_ready(child, stage)
    cpu_seconds = proc.cpu_seconds_of_all(child.pid)
    swarm.peers.append(peer)
    # The peer itself records the time at which it serves.
    seconds = peer.record.announced_at - began_at
    return {f"{name}_serving_cpu_seconds": cpu_seconds, f"{name}_serving_seconds": seconds}


def _entry(peer: ServingPeer) -> str:
    return str(Entry(PeerId(peer.record.peer_id), peer.record.endpoint))


def first_step(swarm: SwarmProcesses) -> dict[str, float]:
    """CPU seconds and seconds until a trainer has taken its first step."""
    began_at = time.monotonic()
    child = swarm.launch_trainer("trainer", 1)
    while not swarm.steps("trainer"):
        fail_on_exit(swarm.children)
        if time.monotonic() - began_at > STALL_SECONDS:
            raise stalled(child)
        time.sleep(POLL_SECONDS)
    seconds, cpu_seconds = time.monotonic() - began_at, proc.cpu_seconds_of_all(child.pid)
    swarm.until_ended(child, "trainer")
    return {"trainer_first_step_cpu_seconds": cpu_seconds, "trainer_first_step_seconds": seconds}


def _to_the_end(command: Sequence[str]) -> tuple[float, float]:
    """Run a command to its end, and return its CPU seconds, with those of its children, and the seconds of the
    clock."""
    began_at, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode != 0:
        raise PeerUnavailable(f"{command[-1]}: {result.stderr.strip() or result.returncode}")
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_seconds, time.monotonic() - began_at
