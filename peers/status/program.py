"""swarm-status: which peers and trainers are in a swarm, and what they are doing.

    swarm-status INVITE... [--watch] [--json]
    swarm-status --peer PEER_ID@HOST:PORT... [--watch] [--json]
    swarm-status --initial-peers ADDRESS... [--watch] [--json]
    swarm-status INVITE --contributions [--json]
    swarm-status --audit FILES... [--contributions] [--json]

It reads what is announced in the DHT through a peer, or enters the DHT itself as a client, and then asks every peer. Or
it reads event logs and proves from them that every microbatch counted as it should. It changes nothing. Unless it
enters the DHT, it answers in a second, because it does not import torch and hivemind, which takes several.
"""

import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from peers.shared import cli, lan, logs, stopping
from peers.shared import option_types as takes
from peers.shared.entrance import Entrance, find_entrance
from peers.shared.process import EXIT_FAILURE
from peers.shared.run_options import WayOptions
from peers.status.contributions import Tallies, of_checkpoints, of_logs
from peers.status.live_table import LiveTable, Screen, render
from peers.status.lookout import lookouts_on, views
from peers.status.view import SwarmView
from swarm.audit.audit import Report, audit
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock, SystemClock
from swarm.machine.words import counted
from swarm.types import Block

logger = logging.getLogger(__name__)

_FIGURES = (
    "rounds_committed", "rounds_aborted", "duplicates", "missing", "replayed", "rolled_back", "digests_compared",
    "digests_differing",
)  # fmt: skip
PROG = "swarm-status"


@dataclass(frozen=True, kw_only=True)
class ViewOptions(WayOptions):
    invites: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[INVITE ...]")]] = ()
    """The invite to the run, swarm://..., as every swarm-peer prints it: the first of its peers that answers is asked.
    Several invites show several runs side by side."""
    peer: tuple[str, ...] = ()
    """Peers to ask instead (PEER_ID@HOST:PORT, as a swarm-peer has it in its log)."""
    runs: bool = False
    """Show all runs that are found: with --lan those of this network; otherwise all that are announced in the same DHT
    as the given run. The DHT is entered for that."""

    @property
    def invite(self) -> str | None:
        """The first invite; None if the options name none."""
        return next(iter(self.invites), None)

    @property
    def num_ways(self) -> int:
        return [bool(self.invites), self.lan, bool(self.peer), bool(self.initial_peers)].count(True)

    def require_one_way(self, prog: str) -> None:
        """Raise ValueError unless the options say in exactly one way where the runs are."""
        if self.num_ways > 1:
            raise ValueError(
                "INVITE, --lan, --peer and --initial-peers all say where the runs are: leave all but one out"
            )
        if self.num_ways == 0:
            raise ValueError(f"which run? type {prog} INVITE, with the invite that every swarm-peer prints")

    @property
    def asks_the_dht(self) -> bool:
        return self.runs and not self.lan

    def entrances(self, prog: str, environment: Mapping[str, str], clock: Clock) -> list[Entrance]:
        """Where a program enters: once for each invite, or else once. With --lan and --runs, runs that need a token
        which the user has not given are left out, unless no run is left. Raises what find_entrance and found_invite
        raise."""
        shows_all, found = self.lan and self.runs, list[str]()
        if shows_all:
            found = lan.found_invites(insecure=self.insecure)
        elif self.lan:
            found = [lan.found_invite(insecure=self.insecure)]
        entrances, faults = list[Entrance](), list[ValueError]()
        invites: Sequence[str | None] = found or self.invites or [None]
        for invite in invites:
            way = self if invite is None else dataclasses.replace(self, invites=(invite,), lan=False)
            try:
                entrances.append(find_entrance(way, environment, prog=prog, clock=clock, peers=self.peer))
            except ValueError as fault:
                if not shows_all:
                    raise
                logger.warning("a run of this network is not shown: %s", fault)
                faults.append(fault)
        if not entrances:
            raise faults[0]
        return entrances


def render_audit(report: Report) -> RenderableType:
    table = Table("figure", "value", title=f"{report.setting} run {report.run}, {counted(report.files, 'file')}")
    figures, found = report.to_json(), report.findings
    for name in _FIGURES:
        table.add_row(name, str(figures[name]))
    table.add_row("lost_share", f"{report.lost_share:.4f}")
    for stage in report.stages:
        microbatches = counted(stage.microbatches, "microbatch")
        counts = f"{counted(stage.rounds, 'round')}, {stage.first_attempt} at the first attempt, {microbatches}"
        table.add_row(
            f"stage {Block(stage.stage, stage.variant)}", counts + (f", {stage.lost} lost" if stage.lost else "")
        )
    lines = [escape(violation) for violation in found.violations]
    if (more := found.num_violations - len(lines)) > 0:
        lines.append(f"and {more} more")
    for peer, by in sorted(found.liars.items()):
        lines.append(escape(f"{peer} is named as a liar in {', '.join(sorted(by))}: {[*by.values()][-1]}"))
    return Group(table, *lines, "proven" if report.proven else f"refuted: {counted(found.num_violations, 'violation')}")


Look = Callable[[], Awaitable[Sequence[SwarmView]]]
"""Takes views of all runs once."""


@dataclass(frozen=True, kw_only=True)
class StatusOptions(ViewOptions):
    """Show the stages, peers and trainers of swarms."""

    audit: tuple[Path, ...] = ()
    """Event logs of all processes of a run, to be audited instead; exit code 1 if they refute it, or one is
    missing."""
    contributions: bool = False
    """Instead, show what each peer has given since the run began, and who has signed that; with --audit as event logs
    prove it, with --checkpoint as checkpoints have it."""
    checkpoint: tuple[Path, ...] = ()
    """With --contributions: checkpoints of the run's stages, to be read instead."""
    watch: bool = False
    """Go on until Ctrl-C."""
    json: bool = False
    """One line of JSON for each run and look, instead of a table."""
    every_peer: bool = False
    """Ask and show every peer, also of a stage that has more than 64. Otherwise 64 of them are asked what they do and
    shown, and the others counted; with --json the others are shown as they announce themselves."""
    interval: takes.Seconds = 2.0
    """Seconds between two looks with --watch."""
    log_level: logs.LogLevel = "warning"

    def __post_init__(self) -> None:
        if self.audit and (self.num_ways or self.runs or self.watch):
            raise ValueError(
                "--audit reads files: it goes with no INVITE, --lan, --peer, --initial-peers, --runs or --watch"
            )
        if self.checkpoint and (self.num_ways or self.audit or not self.contributions):
            raise ValueError("--checkpoint names files for --contributions, which then needs no INVITE and no --audit")
        if self.contributions and (self.watch or self.runs):
            raise ValueError("--contributions is for one look at one run: leave --watch and --runs out")
        if not self.audit and not self.checkpoint:
            self.require_one_way("swarm-status")


def main(argv: Sequence[str]) -> int:
    options = cli.parse(StatusOptions, prog=PROG, argv=argv)
    logs.setup_logging("status", options.log_level)
    if options.audit:
        return audit_files(options)
    if options.checkpoint:
        show_contributions(options, of_checkpoints(options.checkpoint))
        return 0
    asyncio.run(look_from(options, options.entrances(PROG, os.environ, SystemClock())))
    return 0


def audit_files(options: StatusOptions) -> int:
    report = audit(options.audit)
    if options.contributions and report.proven:
        show_contributions(options, of_logs(report.run, report.tallies))
    elif options.json:
        print(json.dumps(report.to_json()))
    else:
        Screen(soft_wrap=True).print(render_audit(report))
    return 0 if report.proven else EXIT_FAILURE


def show_contributions(options: StatusOptions, tallies: Tallies) -> None:
    if options.json:
        print(tallies.to_json())
    else:
        Screen(soft_wrap=True).print(tallies.render())


async def look_from(options: StatusOptions, entrances: Sequence[Entrance]) -> None:
    """Show the runs that are entered there. Raises what lookouts_on and views raise."""
    async with lookouts_on(entrances, all_runs=options.asks_the_dht, asks_all=options.every_peer) as lookouts:
        if options.contributions:
            for lookout in lookouts:
                show_contributions(options, await lookout.tallies())
            return
        await look(options, partial(views, lookouts))


async def look(options: StatusOptions, view: Look) -> None:
    """Take views and show them: once, or with --watch until told to stop. Raises PeerUnavailable if the directory
    cannot be read the first time."""
    with LiveTable() as table:

        def show(seen: Sequence[SwarmView]) -> None:
            if options.json:
                print(*(one.to_json() for one in seen), sep="\n", flush=True)
            elif options.watch and sys.stdout.isatty():
                table.show(*seen)
            else:
                Screen(soft_wrap=True).print(*map(render, seen), sep="\n")

        if options.watch:
            await stopping.before(stopping.stop_event().wait(), watch(view, show, options.interval))
        else:
            show(await view())


async def watch(view: Look, show: Callable[[Sequence[SwarmView]], None], interval_seconds: float) -> None:
    """Take views and show them until cancelled. After the first view, one that fails is skipped, with a warning."""
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
