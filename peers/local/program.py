"""swarm-local: a whole swarm on one machine, in processes that are as real as anywhere."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peers.local.options import PRESET, LocalOptions
from peers.local.peers import LocalPeers, spans_of
from peers.local.supervisor import GRACE_SECONDS, Supervisor
from peers.local.swarm import LocalSwarm
from peers.shared import cli, devices, stopping
from peers.shared.logs import setup_logging
from peers.shared.process import cache_folder
from peers.shared.reporting import require_reporters
from peers.shared.run_options import named_config, naming_options
from peers.shared.sole_writer import require_sole_writer
from peers.shared.token_option import VARIABLE, admitted, find_token
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock

PROG = "swarm-local"
CHECKPOINT_GRACE_SECONDS = 120.0
"""How long peers may take to end if they write checkpoints: they finish their round first, and write one more."""


def main(argv: Sequence[str]) -> int:
    options = cli.parse(LocalOptions, prog=PROG, argv=argv)
    setup_logging("local", "warning")
    require_reporters(options)
    if not hasattr(os, "waitid"):
        raise ValueError("swarm-local cannot watch over processes with this Python: on macOS take 3.13 or newer")
    with naming_options(options):
        config = run_config(options)
    clock = SystemClock()
    _, token = find_token(options.token, (), os.environ, prog=PROG, insecure=options.insecure, clock=clock)
    if token is not None:
        # Children get the token in the environment: every user of this machine can read their command lines.
        os.environ[VARIABLE] = str(token)
    num_peers = len(spans_of(config, options.stages_per_peer)) * options.peers_per_stage
    places = devices.spread(devices.named(options.device), num_peers + (options.join_at is not None))
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    require_sole_writer(logs, f"--output {options.output}")
    # Our trainer will lock the folder itself, so we check that no other process has it now, and lock `logs` instead.
    os.close(require_sole_writer(options.output, f"--output {options.output}"))
    grace_seconds = CHECKPOINT_GRACE_SECONDS if options.checkpoint else GRACE_SECONDS
    with (
        tempfile.TemporaryDirectory(prefix="swarm-local-") as folder,
        Supervisor(logs, grace_seconds=grace_seconds) as children,
    ):
        peers = LocalPeers(options, config, children, Path(folder), places)
        swarm = LocalSwarm(options, config.run, peers, children, admitted(generate(), token))
        return asyncio.run(run(swarm))


def run_config(options: LocalOptions) -> RunConfig:
    """The configuration with which the first peer begins the run, as far as this program needs it: its name, its
    stages, and classes that it names."""
    of_model = None
    if options.model is not None:
        # This import takes seconds, and only a --model needs it.
        from peers.shared.named_model import open_model

        of_model = open_model(options.model).config(cache_folder(), num_stages=options.stages or 0)
    return named_config(options, of_model, preset=options.preset or PRESET)


async def run(swarm: LocalSwarm) -> int:
    """Run the swarm until it has trained, or this program is told to stop, and return the exit code."""
    stop = stopping.stop_event()
    exit_code = await stopping.before(stop.wait(), swarm.run())
    if exit_code is None:
        print(f"{PROG}: stopped; every process is being ended", file=sys.stderr)
        return stop.exit_code
    return exit_code
