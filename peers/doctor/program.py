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
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from peers.doctor import line, machine
from peers.doctor.finding import Finding, State, fine, is_well, not_checked, wrong
from peers.doctor.options import DoctorOptions
from peers.doctor.ports import from_outside, unasked
from peers.shared import cli, logs
from peers.shared.devices import Device
from peers.shared.entrance import Entrance, dht_addresses_of, find_entrance
from peers.shared.lan import with_invite
from peers.shared.needs import Needs
from peers.shared.network import Membership
from peers.shared.process import EXIT_FAILURE, cache_folder
from peers.shared.room import Room, together
from peers.shared.run_options import KeepingOptions, naming_options
from peers.shared.stage_choice import not_allowed
from swarm import __version__
from swarm.errors import SwarmError
from swarm.machine.clock import SystemClock, run_loop
from swarm.machine.words import counted, printable
from swarm.rpc.probe import Distance
from swarm.types import PROTOCOLS, Block, PeerId, PeerRecord

PROG = "swarm-doctor"
LOOK_SECONDS = 8.0
"""How long to look for the run."""
MOMENT_SECONDS = 2.0
"""How long `in_passing` waits for the answers of other peers."""


async def thoroughly(plan: DoctorOptions, run: Membership | str, dht_addresses: Sequence[str] = ()) -> list[Finding]:
    """Check everything, in 20 s at most. `plan` says how this machine is to be used. `run` is the run, with its known
    peers, or text that says why nothing is known of it. `dht_addresses` are where a peer would enter the run's DHT."""
    on_device = asyncio.create_task(asyncio.to_thread(machine.device, plan.device, plan.memory))
    on_line = [] if isinstance(run, str) else await _on_line(plan, run, dht_addresses)
    device_finding, device = await on_device
    findings = [device_finding]
    if isinstance(run, str):
        findings += [machine.files(0), *unasked(plan)]
        return [*findings, not_checked("the rest", run)]
    findings += await asyncio.to_thread(_for_run, plan, run, device)
    return [*findings, versions(run.known.everyone()), *on_line]


async def in_passing(
    plan: KeepingOptions, each: Mapping[int, Needs], blocks: Sequence[Block] | None, run: Membership
) -> list[Finding]:
    """Make the checks that take only a moment, for a peer that is known to have memory for these blocks, or with None
    for some stage. Return the findings that say that something is wrong. `each` is what each stage needs."""
    peers = run.known.everyone()
    found = await line.distances(peers, run.channels, run.clock, seconds=MOMENT_SECONDS)
    on_line = [line.judge_clock(found), line.judge_round_trip(found)]
    findings = [machine.files(len(peers)), *_on_disk(plan, each, blocks), *on_line]
    return [finding for finding in findings if finding.state is State.WRONG]


async def _on_line(plan: DoctorOptions, run: Membership, dht_addresses: Sequence[str]) -> list[Finding]:
    # Both run at the same time: peers dial this machine's ports while the lines to them are checked.
    asking = from_outside(plan, run.known.everyone(), run.channels, run.identity, run.clock)
    ports, nodes, on_line = await asyncio.gather(asking, line.nodes(dht_addresses), _to_peers(run))
    return [*ports, line.judge_dht(nodes), *on_line]


async def _to_peers(run: Membership) -> list[Finding]:
    peers = run.known.everyone()
    found = await line.distances(peers, run.channels, run.clock, seconds=line.DISTANCE_SECONDS)
    reached = [peer for peer in peers if isinstance(found.get(PeerId(peer.peer_id)), Distance)]
    passing = await line.passing(reached, run.channels)
    is_cut_off = passing and not any(passing)
    # Rates are measured last, because their traffic would delay the answers to the other checks.
    rates = "no messages pass" if is_cut_off else await line.rates(reached, run.channels, run.clock)
    return [
        line.judge_peers(found), line.judge_clock(found), line.judge_round_trip(found), line.judge_packets(passing),
        line.judge_rates(rates, run.config),
    ]  # fmt: skip


def _for_run(plan: DoctorOptions, run: Membership, device: Device | None) -> list[Finding]:
    findings = [machine.files(len(run.known.everyone()))]
    blocks = None if plan.stage == "auto" else plan.stage.of(run.config)
    if why := not_allowed(run.config, blocks or run.blocks, plan.allow_class):
        return [*findings, not_checked("memory", why), not_checked("disk", why)]
    try:
        room = Room.of(device or Device(name="cpu", free_bytes=0), run, run.config, blocks)
    except ValueError as error:  # A class of the user's own is not here.
        return [*findings, wrong("memory", str(error)), not_checked("disk", "what the stage takes is not known")]
    if device is None:
        memory = not_checked("memory", "there is no device")
    elif not room.each:
        memory = not_checked("memory", "the run's model.custom_class does not let itself be measured")
    else:
        memory = machine.judge_memory(room, blocks)
    return [*findings, memory, *_on_disk(plan, room.each, blocks)]


def _on_disk(plan: KeepingOptions, each: Mapping[int, Needs], blocks: Sequence[Block] | None) -> list[Finding]:
    if not each:
        return [not_checked("disk", "what the run's model.custom_class takes is not known")]
    needs = [*each.values()] if blocks is None else [together(each, blocks)]
    findings = [machine.disk(cache_folder(), max(need.cache for need in needs), "what is fetched may")]
    if plan.checkpoint is not None:
        most, each_bytes = plan.keeping.most, max(need.checkpoint for need in needs)
        findings.append(machine.disk(plan.checkpoint, most * each_bytes, f"{most} checkpoints"))
    return findings


def versions(peers: Sequence[PeerRecord]) -> Finding:
    """Whether the run's peers have a release of this one's protocol. Those that do not understand this one are not
    among them."""
    here = f"{__version__}, of protocol {PROTOCOLS.newest}"
    others = [peer for peer in peers if peer.protocol_version != PROTOCOLS.newest]
    if not others:
        return fine("version", f"{here}, as the run's peers have" if peers else here)
    theirs = max(peer.protocol_version for peer in others)
    older, newest = ("this machine", theirs) if theirs > PROTOCOLS.newest else ("them", PROTOCOLS.newest)
    return fine(
        "version",
        f"{here}, and {counted(len(others), 'peer')} of the run with protocol {theirs}: they train together; update "
        f"{older} before a release of protocol {newest + 1} comes",
    )


def main(argv: Sequence[str]) -> int:
    options = cli.parse(DoctorOptions, prog=PROG, argv=argv)
    logs.setup_logging("doctor", options.log_level)
    if options.plans:
        from peers.doctor import fit

        with naming_options(options):
            return fit.report(options)
    options = with_invite(options)
    entrance = find_entrance(options, os.environ, prog=PROG, clock=SystemClock())
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
                await member.known.look(member.directory, member.blocks)
        except TimeoutError:
            fault = f"no answer within {LOOK_SECONDS:.0f} s: check the network, and that a peer of the invite runs"
            return [wrong("run", fault), *await thoroughly(options, "no peer of the run answers")]
        except (SwarmError, ValueError) as error:
            return [wrong("run", str(error)), *await thoroughly(options, "nothing is known of the run")]
        return await thoroughly(options, member, dht_addresses_of(member, store))
