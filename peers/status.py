"""swarm-status: who is in a swarm and what everybody is doing.

    swarm-status --initial-peers ADDRESS... [--watch] [--json]
    swarm-status --audit FILES... [--json]

Enters the DHT as a client, reads the announcements and asks every peer; or reads event logs and proves from them that
every microbatch counted as it should. Changes nothing.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from peers import audit_report, cli, process
from peers.live_table import LiveTable, render
from peers.network import agree_on_config
from peers.observe import observe
from peers.token_option import admitted, find_token
from peers.view import SwarmView
from swarm.audit.audit import audit
from swarm.certificates import Role
from swarm.clock import SystemClock
from swarm.dht import node as dht_node
from swarm.dht.directory import Directory
from swarm.dht.node import DhtNode
from swarm.identity import Identity, generate
from swarm.rpc.channels import ChannelPool

PROG = "swarm-status"


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Show the stages, peers and trainers of a swarm."""

    initial_peers: tuple[str, ...] = ()
    """DHT addresses of the swarm's peers."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with an address (ADDRESS#TOKEN) or in SWARM_TOKEN."""
    audit: tuple[Path, ...] = ()
    """Event logs of all processes of a run, to be audited instead; exit code 1 if they refute it."""
    watch: bool = False
    """Go on until Ctrl-C."""
    json: bool = False
    """One line of JSON for each look, instead of a table."""
    interval: float = 2.0
    """Seconds between two looks with --watch."""
    insecure: bool = False
    """For a run whose peers were started with --insecure."""
    log_level: process.LogLevel = "warning"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        if self.audit and (self.initial_peers or self.watch):
            raise ValueError("--audit reads files: it goes with neither --initial-peers nor --watch")
        if not self.initial_peers and not self.audit:
            raise ValueError("--initial-peers needs the address of at least one peer; every swarm-peer prints its own")
        if self.interval <= 0:
            raise ValueError(f"--interval must be positive, not {self.interval}")


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(StatusOptions, prog=PROG, argv=argv)
    process.setup_logging("status", options.log_level)
    if options.audit:
        return audit_files(options)
    clock = SystemClock()
    addresses, token = find_token(
        options.token, options.initial_peers, os.environ, role=Role.TRAINER, insecure=options.insecure, clock=clock
    )
    node = dht_node.start(clock=clock, initial_peers=addresses, client_mode=True)
    try:
        asyncio.run(run(options, node, addresses, admitted(generate(), token)))
    finally:
        node.shutdown()
    return 0


def audit_files(options: StatusOptions) -> int:
    """Audit event logs; gives the exit code."""
    report = audit(options.audit)
    if options.json:
        print(json.dumps(report.to_json()))
    else:
        Console(soft_wrap=True).print(audit_report.render(report))
    return 0 if report.proven else process.EXIT_FAILURE


async def run(options: StatusOptions, node: DhtNode, addresses: Sequence[str], identity: Identity) -> None:
    """Look once, or again and again."""
    clock = SystemClock()
    config = await agree_on_config(node, None, addresses, clock, identity.authority)
    directory = Directory(node, identity, config.run_id, clock)
    channels = ChannelPool(insecure=options.insecure, identity=identity, clock=clock)

    async def look() -> SwarmView:
        stages = {stage: await directory.peers(stage) for stage in range(config.stages.num_stages)}
        trainers, claims = await directory.trainers(), await directory.claims()
        return await observe(config.run_id, stages, trainers, channels, claims=claims)

    stop = process.stop_event()
    with LiveTable() as table:
        while True:
            view = await look()
            if options.json:
                print(view.to_json(), flush=True)
            elif options.watch and sys.stdout.isatty():
                table.show(view)
            else:
                Console().print(render(view))
            if not options.watch or await _stopped(stop, options.interval):
                break
    await channels.close()


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
