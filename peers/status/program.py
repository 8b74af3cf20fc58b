"""swarm-status: which peers and trainers are in a swarm, and what they are doing.

    swarm-status INVITE [--watch] [--json]
    swarm-status --peer PEER_ID@HOST:PORT... [--watch] [--json]
    swarm-status --initial-peers ADDRESS... [--watch] [--json]
    swarm-status --audit FILES... [--json]

Has a peer show what is announced in the DHT, or enters the DHT itself as a client, and then asks every peer; or reads
event logs and proves from them that every microbatch counted as it should. Changes nothing. Without entering the DHT
it answers in a second: the imports of torch and hivemind alone, which nothing else here needs, take several.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from peers.shared import cli, process
from peers.shared.entrance import Entrance, find_entrance
from peers.shared.invite_option import InviteOption, joins
from peers.status import audit_report
from peers.status.live_table import LiveTable, render
from peers.status.lookout import lookout_at, node_for
from peers.status.view import SwarmView
from swarm.audit.audit import audit
from swarm.credentials.certificates import Role
from swarm.dht.node import DhtNode
from swarm.errors import PeerUnavailable
from swarm.machine.clock import SystemClock

logger = logging.getLogger(__name__)

PROG = "swarm-status"


@dataclass(frozen=True, kw_only=True)
class StatusOptions:
    """Show the stages, peers and trainers of a swarm."""

    invite: InviteOption = None
    """To the run, swarm://..., as every swarm-peer prints it: the first of its peers that answers is asked."""
    peer: tuple[str, ...] = ()
    """Peers to ask instead (PEER_ID@HOST:PORT, as a swarm-peer has it in its log)."""
    initial_peers: tuple[str, ...] = ()
    """Enter the DHT instead, at these addresses of the swarm's peers: slower, and asks no single peer who there is."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with the invite (INVITE#TOKEN), with an address
    (ADDRESS#TOKEN), or in SWARM_TOKEN."""
    audit: tuple[Path, ...] = ()
    """Event logs of all processes of a run, to be audited instead; exit code 1 if they refute it, or one is
    missing."""
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
        ways = [joins(self), bool(self.peer), bool(self.audit)].count(True)
        if self.audit and (ways > 1 or self.watch):
            raise ValueError("--audit reads files: it goes with no INVITE, --peer, --initial-peers or --watch")
        if ways > 1:
            raise ValueError("INVITE, --peer and --initial-peers are ways to the same: leave all but one out")
        if ways == 0:
            raise ValueError("which run? say swarm-status INVITE, with the invite that every swarm-peer prints")
        cli.require_positive(self, ["interval"])


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(StatusOptions, prog=PROG, argv=argv)
    process.setup_logging("status", options.log_level)
    if options.audit:
        return audit_files(options)
    entrance = find_entrance(options, os.environ, role=Role.TRAINER, clock=SystemClock(), peers=options.peer)
    with node_for(entrance) as node:
        asyncio.run(look_from(options, entrance, node))
    return 0


def audit_files(options: StatusOptions) -> int:
    """Audit event logs; gives the exit code."""
    report = audit(options.audit)
    if options.json:
        print(json.dumps(report.to_json()))
    else:
        Console(soft_wrap=True).print(audit_report.render(report))
    return 0 if report.proven else process.EXIT_FAILURE


async def look_from(options: StatusOptions, entrance: Entrance, node: DhtNode | None) -> None:
    """Look at the run to which the entrance leads. Raises what lookout_at and Lookout.view raise."""
    async with lookout_at(entrance, node) as lookout:
        await look(options, lookout.view)


async def look(options: StatusOptions, view: Callable[[], Awaitable[SwarmView]]) -> None:
    """Look once, or again and again until told to stop.

    Raises:
        PeerUnavailable: the directory cannot be read, at the first look.
    """
    with LiveTable() as table:

        def show(seen: SwarmView) -> None:
            if options.json:
                print(seen.to_json(), flush=True)
            elif options.watch and sys.stdout.isatty():
                table.show(seen)
            else:
                Console().print(render(seen))

        if options.watch:
            await process.before_stop(watch(view, show, options.interval))
        else:
            show(await view())


async def watch(
    view: Callable[[], Awaitable[SwarmView]], show: Callable[[SwarmView], None], interval_seconds: float
) -> None:
    """Look until cancelled. Once it has seen the swarm, a look that fails is passed over: the next may not."""
    has_seen = is_failing = False
    while True:
        try:
            show(await view())
            has_seen, is_failing = True, False
        except PeerUnavailable as error:
            if not has_seen:
                raise
            if not is_failing:
                logger.warning("the swarm cannot be seen, looking again: %s", error)
            is_failing = True
        await asyncio.sleep(interval_seconds)
