"""swarm-peer: serves one stage of a run, or adjacent ones.

    swarm-peer --preset tiny                                   the first peer, stage 0, of a new run
    swarm-peer INVITE                                          everyone else, wherever it is needed most
    swarm-peer INVITE --stage 2                                ... at a stage
    swarm-peer INVITE --stage 1-3                              ... or at adjacent ones
    swarm-peer INVITE --path 5                                 ... or at those of a path, where stages have variants
    swarm-peer --meet ID@HOST:443 --preset tiny                the first peer, if all are behind routers

It does, in this order: read the options, join the DHT, agree on the configuration, and choose stages. Then mover.py
builds and serves these, and others as it moves, until SIGTERM. Here the mechanisms of swarm/ are wired together.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.reach.listen import Announced, Listen, Outside, own_outside
from peers.reach.own_port import reserved
from peers.reach.reach import Reach
from peers.reach.router_ports import RouterPorts, own_routers
from peers.shared import cli, logs, option_types, stopping
from peers.shared.devices import devices_of, peak_flops
from peers.shared.entrance import Entrance, find_entrance
from peers.shared.event_file import begin, open_events, start_of
from peers.shared.lan import Announcer, found_invite, require_installed
from peers.shared.named_model import OwnModel, open_model
from peers.shared.network import REFRESH_SECONDS, Membership, agree_on_config, default_name
from peers.shared.process import cache_folder, keep_compiled_code
from peers.shared.run_options import naming_options
from peers.shared.sole_writer import claim_identity
from peers.shared.stopping import stop_or_expiry
from peers.shared.token_option import admitted
from peers.stage_peer import incarnation as incarnations
from peers.stage_peer.contents import Contents
from peers.stage_peer.incarnation import Incarnation, Rivals
from peers.stage_peer.mover import Mover
from peers.stage_peer.news import Arrival, require_ready_file, say_what_is_wrong
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_dashboard import OwnDashboard, require_page
from peers.stage_peer.own_model import own_config
from peers.stage_peer.own_room import require_blocks, require_room
from peers.stage_peer.own_stage import ServerOptions
from peers.stage_peer.own_state import open_checkpoints
from peers.stage_peer.rebalancer import Claim, Rebalancer
from peers.stage_peer.server import PeerServer
from peers.status.exporter import OwnFigures, exporting, require_exporter
from swarm import config as configs
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig
from swarm.credentials.identity import Identity
from swarm.dht import node as dht_node
from swarm.dht.directory import Announcement, Directory
from swarm.dht.node import DhtNode
from swarm.errors import Fatal
from swarm.events import Events
from swarm.machine.clock import Clock, SystemClock, run_loop
from swarm.machine.recording import recorder_of
from swarm.model import compiled
from swarm.rebalancing.layout import Span
from swarm.rpc.endpoint import LOOPBACK
from swarm.rpc.entry import Entry
from swarm.rpc.serving import Front
from swarm.types import RunRecord

logger = logging.getLogger(__name__)

PROG = "swarm-peer"
CONFIG_SECONDS = 20.0
"""Time between two announcements of the configuration."""


def main(argv: Sequence[str]) -> int:
    options = cli.parse(PeerOptions, prog=PROG, argv=argv)
    name = options.name or default_name()
    # If the stage is fixed, log lines name the stage, which says more than a process id.
    logs.setup_logging(name if options.span == "auto" else options.name or options.label, options.log_level)
    clock, cache = SystemClock(), cache_folder()
    option_types.require_own_host("--host", options.host)
    if options.shares_port:
        option_types.require_free_port("--port", options.host, options.port)
    require_exporter(options.metrics_host, options.metrics_port)
    if options.lan:
        require_installed()
    if options.seeks:
        options = dataclasses.replace(options, invite=found_invite(insecure=options.insecure))
    entrance = find_entrance(options, os.environ, prog=PROG, clock=clock)
    token = entrance.token
    options = dataclasses.replace(options, name=name)
    require_ready_file(options.ready_file)
    require_page(options, os.environ, is_locked=token is not None)
    keep_compiled_code(os.environ)
    devices = devices_of(options.device, random.SystemRandom(), for_span=not options.serves_one)
    if options.threads:
        torch.set_num_threads(options.threads)
    meet = tuple(map(Entry.parse, options.meet))
    begins_at = dataclasses.replace(entrance, entries=meet)
    addresses = run_loop(
        begins_at.node_addresses(clock) if meet and not options.joins else entrance.dht_addresses(clock)
    )
    with stopping.interruptible(), naming_options(options):
        model = open_model(options.model) if options.model is not None else None
        own = own_config(options, token, cache, model=model)
    identity = claim_identity(options.identity, cache / "identities", options.label.replace(" ", "-"))
    checkpoints = open_checkpoints(options, owner=identity.identity.peer_id)
    events = open_events(options.events, SystemClock())
    # A peer that begins a run at an address that it had before may find that the run still exists.
    returns = not (options.joins or meet) and options.dht_port > 0 and identity.libp2p_path.exists()
    warn_of_empty_run(options, returns=returns)
    member = admitted(identity.identity, token)
    own_hosts = own_outside(options.host, addresses, is_named=bool(options.outside and options.outside_dht))
    outside_dht = tuple(dict.fromkeys([*options.outside_dht, *own_hosts]))
    node = enter_dht(options, addresses, outside_dht, identity.libp2p_path)
    # Where one port is shared, this one of the loopback is kept for the gRPC servers as long as the process runs.
    inner = reserved(LOOPBACK) if options.shares_port else None
    try:
        listen = Listen(
            host=options.host, port=options.port, outside=options.outside or own_hosts, own=own_hosts,
            dht_addresses=tuple(node.addresses()), dht_port=options.port if inner else node.port,
            behind_front=(inner.getsockname()[1], node.port) if inner else None,
        )  # fmt: skip
        start = Start(
            options=options, config=own, model=model, entrance=entrance, addresses=addresses, identity=member,
            node=node, listen=listen, meet=meet, devices=devices, checkpoints=checkpoints, events=events,
            returns=returns,
        )  # fmt: skip
        run_loop(run(start))
    finally:
        node.shutdown()
    logger.info("this peer has left")
    return 0


def warn_of_empty_run(options: PeerOptions, *, returns: bool) -> None:
    if not (options.joins or returns or options.resume or options.span == "auto" or options.span.first == 0):
        logger.warning(
            "this begins a new run at %s, in which nobody serves stage 0; to join one that is there, give its INVITE",
            options.label,
        )


def enter_dht(
    options: PeerOptions, initial_peers: Sequence[str], outside: Sequence[Outside], libp2p_path: Path
) -> DhtNode:
    """Start this peer's node. Raises what dht_node.start raises."""
    host, port = (LOOPBACK, 0) if options.shares_port else (options.host, options.dht_port)
    return dht_node.start(
        clock=SystemClock(), initial_peers=initial_peers, host=host, port=port,
        announce=[(one.host, one.port or options.dht_port) for one in outside], identity_path=libp2p_path,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Start:
    options: PeerOptions
    config: RunConfig | None
    model: OwnModel | None
    entrance: Entrance
    addresses: Sequence[str]
    """Empty for a new run."""
    identity: Identity
    node: DhtNode
    listen: Listen
    meet: Sequence[Entry]
    devices: Sequence[torch.device]
    checkpoints: CheckpointWriter | None
    events: Events
    returns: bool
    """Whether this peer was in the run before, so that others may still know its address."""


async def run(start: Start) -> None:
    """Join, serve and leave. Raises what `serve` and `exporting` raise, and Fatal if the last checkpoint was not
    written."""
    own_figures, options = OwnFigures(), start.options
    front: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
    if start.listen.behind_front is not None:
        front = Front(*start.listen.behind_front).listening(options.host, options.port)
    async with exporting(own_figures, "swarm_peer", host=options.metrics_host, port=options.metrics_port), front:
        await serve(start, own_figures)
    if start.checkpoints is not None and start.checkpoints.fault:
        raise Fatal(f"this peer has left, and its last checkpoint is missing: {start.checkpoints.fault}")


async def enter(start: Start) -> Membership:
    """Enter the run. Raises what agree_on_config, require_blocks and Membership.require_own_token
    raise."""
    options, identity, clock = start.options, start.identity, SystemClock()
    run, others = start.entrance.run, start.addresses if options.joins else ()
    config = await agree_on_config(start.node, start.config, others, clock, identity.authority, run=run)
    require_blocks(options, config, start.config)
    member = Membership.enter(config, start.node, identity, clock, insecure=options.insecure)
    await member.require_own_token()
    return member


def reach_of(start: Start, member: Membership) -> Reach:
    options = start.options
    routers = [] if options.no_port_mapping else own_routers()
    return Reach(
        member, start.node, start.listen, router_ports=RouterPorts(member.clock, routers), meet=start.meet,
        own=lambda: own_outside(options.host, start.addresses, is_named=True),
    )  # fmt: skip


async def options_for(
    start: Start, member: Membership, device: torch.device, own_figures: OwnFigures, incarnation: Incarnation
) -> ServerOptions:
    """The options of all stages on a device, as far as they do not depend on the stage. Compiling may be tried."""
    options = start.options
    compiles = await asyncio.to_thread(compiled.compiles, options.compile, member.config, device)
    return ServerOptions(
        given=options, device=device, checkpoints=start.checkpoints, events=start.events, compiles=compiles,
        recorder=None if options.compile == "off" else recorder_of(device),
        peak_flops=peak_flops(options.peak_tflops, member.config, options.dtype, device),
        own_figures=own_figures, incarnation=incarnation,
    )  # fmt: skip


async def serve(start: Start, own_figures: OwnFigures) -> None:
    """Join, serve and leave. Raises what Mover.run raises."""
    options, identity, clock = start.options, start.identity, SystemClock()
    member = await enter(start)
    incarnation = incarnations.begin(clock)
    rivals, claim = Rivals(member, own=incarnation), Claim(member, options.name)
    announcer = Announcer(member.config.run_id) if options.lan else None
    is_new = not (options.joins or start.returns or options.resume)
    arrival = Arrival(options, member, ",".join(map(str, start.devices)), is_new=is_new, announcer=announcer)
    reach = reach_of(start, member)
    page = OwnDashboard(options, identity.peer_id, reach.open_port, start.entrance.token)
    contents = Contents(member, start.model, cache_folder(), checkpoints=options.checkpoint)

    def serves(blocks: Span, announced: Announced) -> None:
        arrival.serves(blocks, announced)
        page.begin()

    async with asyncio.TaskGroup() as tasks:
        # This task starts before anything that waits, because joiners may already look for the run.
        announcing = published(member.directory, member.peer_id, member.config, clock).keep()
        background = list(map(tasks.create_task, (announcing, member.waits.run(clock))))
        await member.known.look_first(member.directory, member.blocks, clock, returns=start.returns)
        member.directory.require_common_protocol()
        room = await require_room(options, member, start.devices)
        rebalancer = Rebalancer(
            member, claim, random.Random(identity.peer_id), every_seconds=options.rebalance_seconds,
            checkpoints=options.resume, spans=room.spans, starts_over=options.start_over,
        )  # fmt: skip
        await say_what_is_wrong(options, member, room)
        everywhere = [await options_for(start, member, one, own_figures, incarnation) for one in start.devices]
        # Rivals are looked for before anything is announced: an announcement would replace the records of another
        # process with this identity.
        await rivals.require_alone()
        watching = member.directory.watch(member.blocks, member.known.update, REFRESH_SECONDS)
        background += map(tasks.create_task, (watching, reach.keep(), claim.keep()))
        await reach.found_out()
        with member.waits.on("a stage that needs this peer"):
            span = await first_span(options, rebalancer, member.config)
        # Only from here on is the stop event watched. Before this line, Ctrl-C and SIGTERM end the process directly.
        stop = stopping.stop_event()
        said = start_of(member.config, peer_id=member.peer_id, name=options.name, stage=span[0].stage)
        begin(start.events, options.events, said)
        serving = [stop_or_expiry(stop, identity, clock), rivals.watch(), contents.keep_tokenizer(), page.run()]
        background += map(tasks.create_task, serving if announcer is None else [*serving, announcer.run()])
        server = PeerServer(member, everywhere, contents)
        await Mover(server, rebalancer, listen=reach, clock=clock, stop=stop, on_serving=serves).run(span)
        for task in background:
            task.cancel()
    await member.channels.close()


async def first_span(options: PeerOptions, rebalancer: Rebalancer, config: RunConfig) -> Span:
    """Claim the blocks to begin with, all of them: those that the user named, or those that need a peer most."""
    if options.span == "auto":
        return await rebalancer.choose_span()
    span = options.span.of(config)
    await rebalancer.goes(span)
    return span


def published(directory: Directory, peer_id: str, config: RunConfig, clock: Clock) -> Announcement:
    """The configuration in the DHT, where every peer keeps it."""
    record = RunRecord(peer_id=peer_id, config_json=configs.to_json(config))
    return Announcement(directory, "the configuration", lambda: record, clock, every_seconds=CONFIG_SECONDS)
