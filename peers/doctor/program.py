"""swarm-doctor: says in 20 seconds whether this machine can serve a stage of a run, and what to change if not.

    swarm-doctor INVITE [--stage N] [--device NAME] [--port P --dht-port P] [--json]
    swarm-doctor --lan                                        for the run of this network
    swarm-doctor                                              without a run: this machine alone
    swarm-doctor --model NAME [--stages N] [--peers N]        before there is a run: what fits where

One line for each thing: fine, wrong with what to change, or not checked with the reason. The exit code is 1 if anything
is wrong. It joins nothing, announces nothing and changes nothing.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from peers.doctor.examination import thoroughly
from peers.doctor.finding import Finding, is_well, wrong
from peers.doctor.options import DoctorOptions
from peers.shared import cli, logs
from peers.shared.entrance import Entrance, dht_addresses_of, find_entrance
from peers.shared.lan import with_invite
from peers.shared.process import EXIT_FAILURE
from peers.shared.run_options import naming_options
from swarm.credentials.certificates import Role
from swarm.errors import SwarmError
from swarm.machine.clock import SystemClock, run_loop
from swarm.machine.words import printable

PROG = "swarm-doctor"
LOOK_SECONDS = 8.0
"""How long to look for the run."""


def main(argv: Sequence[str]) -> int:
    """Run the program and return its exit code."""
    options = cli.parse(DoctorOptions, prog=PROG, argv=argv)
    logs.setup_logging("doctor", options.log_level)
    if options.plans:
        from peers.doctor import fit

        with naming_options(options):
            return fit.report(options)
    options = with_invite(options)
    entrance = find_entrance(options, os.environ, role=Role.TRAINER, clock=SystemClock())
    if not options.json:
        print(f"{PROG}: looking, for 20 s at most", file=sys.stderr, flush=True)
    findings = run_loop(examine(options, entrance))
    if options.json:
        print(json.dumps({"fine": is_well(findings), "findings": [asdict(finding) for finding in findings]}))
    else:
        print("\n".join(printable(str(finding)) for finding in findings))
    return 0 if is_well(findings) else EXIT_FAILURE


async def examine(options: DoctorOptions, entrance: Entrance) -> list[Finding]:
    """All findings, the run's own first."""
    if not entrance.entries:
        return await thoroughly(options, "it takes an INVITE, and so a run")
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                member, store = await stack.enter_async_context(entrance.asking(SystemClock()))
                await member.known.look(member.directory, member.stages)
        except TimeoutError:
            fault = f"no answer within {LOOK_SECONDS:.0f} s: check the network, and that a peer of the invite runs"
            return [wrong("run", fault), *await thoroughly(options, "no peer of the run answers")]
        except (SwarmError, ValueError) as error:
            return [wrong("run", str(error)), *await thoroughly(options, "nothing is known of the run")]
        return await thoroughly(options, member, dht_addresses_of(member, store))
