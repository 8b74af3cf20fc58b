"""swarm-peer: serves one stage of a run.

    swarm-peer --preset tiny                                   the first peer, stage 0, of a new run
    swarm-peer --stage 2 --initial-peers ADDRESS...            everyone else
    swarm-peer --stage auto --initial-peers ADDRESS...         ... wherever it is needed most

Reads top to bottom: options -> join the DHT -> agree on the configuration -> choose a stage -> have mover.py build,
enter the run and serve, at one stage or at several in turn, until SIGTERM. The mechanisms are in swarm/; here they are
wired together.
"""

import asyncio
import contextlib
import dataclasses
import errno
import json
import logging
import os
import random
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from peers.shared import cli, process
from peers.shared.cache import cache_folder
from peers.shared.devices import device_of
from peers.shared.event_file import begin, open_events, start_of
from peers.shared.network import (
    REFRESH_SECONDS,
    KnownPeers,
    agree_on_config,
    default_name,
    say_who_may_join,
)
from peers.shared.token_option import admitted, find_token, stop_or_expiry, with_token
from peers.stage_peer import incarnation as incarnations
from peers.stage_peer.claim import Claim
from peers.stage_peer.identity_file import claim_identity
from peers.stage_peer.incarnation import Rivals
from peers.stage_peer.mover import Listen, Mover
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_addresses import own_hosts
from peers.stage_peer.rebalancer import Rebalancer
from peers.stage_peer.resume import ResumeOptions
from peers.stage_peer.server import ServerOptions, StageServer
from swarm import config as configs
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig
from swarm.credentials.certificates import Role
from swarm.credentials.identity import Identity
from swarm.credentials.token import Token
from swarm.data import corpora, tokenizers
from swarm.dht import node as dht_node
from swarm.dht.addresses import OwnAddress
from swarm.dht.directory import Directory
from swarm.dht.node import DhtNode
from swarm.errors import PeerUnavailable, SwarmError
from swarm.events.kinds import Events
from swarm.machine.clock import SystemClock, run_loop
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PROG = "swarm-peer"


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(PeerOptions, prog=PROG, argv=argv)
    process.setup_logging(options.name or options.label, options.log_level)
    clock = SystemClock()
    addresses, token = find_token(
        options.token, options.initial_peers, os.environ, role=Role.PEER, insecure=options.insecure, clock=clock
    )
    announce = options.announce and options.announce.lower()
    options = dataclasses.replace(options, initial_peers=addresses, announce=announce)
    require_ready_file(options.ready_file)
    cache = cache_folder()
    device = device_of(options.device, random.SystemRandom())
    if options.threads:
        torch.set_num_threads(options.threads)
    with process.interruptible():
        own = own_config(options, token, cache)
    identity = claim_identity(options.identity, cache / "identities", options.label.replace(" ", "-"))
    checkpoints = open_checkpoints(options, owner=identity.identity.peer_id)
    events = open_events(options.events, SystemClock())
    # Whoever begins a run at an address that it has had before may find the run still there.
    returns = not options.initial_peers and options.dht_port > 0 and identity.libp2p_path.exists()
    if not (options.initial_peers or returns or options.resume or options.stage in (0, "auto")):
        logger.warning(
            "this begins a new run at stage %s, in which nobody serves stage 0; to join one that is there, add "
            "--initial-peers ADDRESS", options.stage,
        )  # fmt: skip
    member = admitted(identity.identity, token)
    node = enter_dht(options, member, identity.libp2p_path)
    try:
        run_loop(run(options, own, member, node, device, checkpoints, events, token, returns))
    finally:
        node.shutdown()
    return 0


def enter_dht(options: PeerOptions, member: Identity, libp2p_path: Path) -> DhtNode:
    """Start this peer's node. Raises what dht_node.start raises, and Fatal if another process has this identity."""
    clock = SystemClock()
    try:
        return dht_node.start(
            clock=clock, initial_peers=options.initial_peers, host=options.host, port=options.dht_port,
            announce_hosts=[options.announce] if options.announce else own_hosts(options.host, options.initial_peers),
            identity_path=libp2p_path,
        )  # fmt: skip
    except OwnAddress:
        # Either the process that has this address has died, or its key files were copied to here.
        with contextlib.suppress(PeerUnavailable):
            node = dht_node.start(clock=clock, initial_peers=options.initial_peers, client_mode=True)
            try:
                run_loop(
                    incarnations.require_alone_at(
                        node, options.initial_peers, member, insecure=options.insecure, clock=clock
                    )
                )
            finally:
                node.shutdown()
        raise


def open_checkpoints(options: PeerOptions, owner: str) -> CheckpointWriter | None:
    """What writes checkpoints, if they are wanted. Raises ValueError if the folder to resume from is not there."""
    writer = None
    if options.checkpoint is not None:
        writer = CheckpointWriter(
            options.checkpoint, every=options.checkpoint_every or 10, keep=options.keep_checkpoints or 3, owner=owner
        )
    if options.resume is not None and not options.resume.is_dir():
        raise ValueError(f"--resume {options.resume}: there is no such folder")
    return writer


def own_config(options: PeerOptions, token: Token | None, cache: Path) -> RunConfig | None:
    """The configuration that the command line names, complete with data's digest and owner; None if it names none."""
    if options.config is None and options.preset is None:
        return None
    config = configs.load(options.config) if options.config else configs.load_preset(options.preset or "")
    if options.stages is not None:
        stages = dataclasses.replace(config.stages, num_stages=options.stages, layers_per_stage=())
        config = dataclasses.replace(config, stages=stages)
    if options.dataset is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, dataset=options.dataset))
    if options.tokenizer is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=options.tokenizer))
    if options.stage != "auto":
        require_stage(config, options.stage)
    owner = token.authority.fingerprint if token is not None else ""
    if config.owner not in ("", owner):
        raise ValueError(f"the run is locked by owner {config.owner[:16]}: give a token of that owner's with --token")
    config = dataclasses.replace(config, owner=owner)
    tokenizers.load_for_run(config.data, vocab_size=config.model.vocab_size)
    corpus = corpora.prepare(config.data, cache_dir=cache / "corpora")
    corpora.check_digest(config.data, corpus)
    return dataclasses.replace(config, data=corpora.published(config.data, corpus))


def require_stage(config: RunConfig, stage: int) -> None:
    """Raise ValueError if the run has no such stage."""
    last = config.stages.num_stages - 1
    if stage > last:
        raise ValueError(f"--stage {stage} does not exist: this run has the stages 0 to {last}")


def require_allowed_class(config: RunConfig, own: RunConfig | None, allowed: str | None) -> None:
    """Raise ValueError if the run has a class of its own that our user has named neither in a file nor in an option."""
    name = config.model.custom_class
    # With a configuration of our own, the run's is the same.
    if name and own is None and name != allowed:
        raise ValueError(
            f"this run would have this machine import and run {name!r}, its model.custom_class: "
            f"if you trust that code, add --allow-class {shlex.quote(name)}"
        )


async def run(
    options: PeerOptions, own: RunConfig | None, identity: Identity, node: DhtNode, device: torch.device,
    checkpoints: CheckpointWriter | None, events: Events, token: Token | None, returns: bool,
) -> None:  # fmt: skip
    """Join, serve and leave. Raises what Mover.run raises."""
    clock = SystemClock()
    config = await agree_on_config(node, own, options.initial_peers, clock, identity.authority)
    require_allowed_class(config, own, options.allow_class)
    if options.stage != "auto":
        require_stage(config, options.stage)
    directory = Directory(node, identity, config.run_id, clock)
    rng = random.Random(identity.peer_id)
    router = Router(clock, rng)
    known = KnownPeers(router, own_id=identity.peer_id)
    stages = range(config.stages.num_stages)
    name = options.name or default_name()
    channels = ChannelPool(insecure=options.insecure, identity=identity, clock=clock)
    incarnation = incarnations.begin(clock)
    rivals = Rivals(config=config, identity=identity, own=incarnation, known=known, channels=channels, clock=clock)
    claim = Claim(directory=directory, clock=clock, peer_id=identity.peer_id, name=name)
    rebalancer = Rebalancer(
        config=config, own_id=PeerId(identity.peer_id), claim=claim, directory=directory, known=known,
        channels=channels, clock=clock, rng=rng, checkpoints=options.resume,
        every_seconds=options.rebalance_seconds,
    )  # fmt: skip

    def make_server(stage: int, moves: int, comes_from_another: bool, tasks: asyncio.TaskGroup) -> StageServer:
        local = ServerOptions(
            name=name, device=device, insecure=options.insecure, max_in_flight=options.max_in_flight,
            graph_bytes=None if options.graph_memory_mib is None else options.graph_memory_mib << 20,
            checkpoints=checkpoints, events=events,
            resume=ResumeOptions(
                folder=options.resume, round_number=None if comes_from_another else options.resume_round,
                joins=comes_from_another or bool(options.initial_peers), moves=comes_from_another,
                had_checkpoints=checkpoints is not None and checkpoints.had_any, starts_over=options.start_over,
            ),
            movable=options.rebalance_seconds > 0, moves=moves, incarnation=incarnation,
        )  # fmt: skip
        return StageServer(
            config=config, stage=stage, identity=identity, known=known, router=router, directory=directory,
            clock=clock, tasks=tasks, options=local,
        )  # fmt: skip

    addresses = outside_addresses(node)
    has_said = False

    def on_serving(stage: int, endpoint: str) -> None:
        nonlocal has_said
        is_first, has_said = not has_said, True
        if is_first:
            say_who_may_join(identity.authority)
            entry = Entry(identity.peer_id, endpoint)
            is_new = not (options.initial_peers or returns or options.resume)
            announce_to_people(options, stage, device, config, node, known, entry, token, is_new=is_new)
        try:
            write_ready_file(options, stage, identity, endpoint, node, device)
        except OSError as error:
            if is_first:
                raise
            logger.warning("%s still names the former stage: %s", options.ready_file, error.strerror)

    async with asyncio.TaskGroup() as tasks:
        # Before it is waited for anything: joiners look for the run now.
        publishing = tasks.create_task(republish(directory, config))
        await known.look_first(directory, stages, clock, returns=returns)
        # Before anything is announced, which would take the place of what the other one has announced.
        await rivals.require_alone()
        keeping = tasks.create_task(claim.keep())
        stage = await first_stage(options, rebalancer)
        # Not before: until here nobody looks at it, and Ctrl-C and SIGTERM end the process by themselves.
        stop = process.stop_event()
        begin(events, options.events, start_of(config, peer_id=identity.peer_id, name=name, stage=stage))
        background = [
            keeping,
            tasks.create_task(directory.watch(stages, known.update, REFRESH_SECONDS)),
            publishing,
            tasks.create_task(stop_or_expiry(stop, identity, clock)),
            tasks.create_task(rivals.watch()),
        ]
        mover = Mover(
            make_server=make_server, rebalancer=rebalancer, clock=clock, event_log=events, stop=stop,
            on_serving=on_serving,
            listen=Listen(
                host=options.host, port=options.port, announced_host=options.announce or addresses[0].split("/")[2],
                dht_address=addresses[0],
            ),
        )  # fmt: skip
        await mover.run(stage)
        for task in background:
            task.cancel()
    await channels.close()


async def first_stage(options: PeerOptions, rebalancer: Rebalancer) -> int:
    """The stage to begin with, claimed: the one that was asked for, 0 of a new run, or the neediest."""
    if options.stage == "auto" and options.initial_peers:
        return await rebalancer.choose_stage()
    stage = 0 if options.stage == "auto" else options.stage
    await rebalancer.goes(stage, from_stage=None)
    return stage


async def republish(directory: Directory, config: RunConfig) -> None:
    """Keep the configuration in the DHT, as every peer does."""
    while True:
        try:
            await directory.publish_config(configs.to_json(config), lifetime_seconds=60.0)
        except SwarmError as error:
            logger.debug("the configuration was not published: %s", error)
        await asyncio.sleep(20.0)


def outside_addresses(node: DhtNode) -> list[str]:
    """Where others enter the DHT: the addresses that reach beyond this machine, if it has any."""
    addresses = node.addresses()
    outside = [address for address in addresses if address.split("/")[2] != "::1" and "/127." not in address]
    return outside or addresses


def announce_to_people(
    options: PeerOptions, stage: int, device: torch.device, config: RunConfig, node: DhtNode, known: KnownPeers,
    entry: Entry, token: Token | None, *, is_new: bool,
) -> None:  # fmt: skip
    """Say on stdout how others join, with several peers' addresses where there are several.

    Args:
        is_new: whether this peer begins the run. Its id is that of every run of the same configuration and text, so
            that nothing else tells whoever forgot --initial-peers.
    """
    addresses = list(dict.fromkeys([*outside_addresses(node)[:2], *known.dht_addresses(4)]))
    peers = with_token(addresses[:5], str(token or ""))
    trainers = with_token(addresses[:5], "TOKEN" if token else "")
    watched = with_token(list(map(str, [entry, *known.entries(2)])), "TOKEN" if token else "")
    insecure = " --insecure" if options.insecure else ""
    own_class = f" --allow-class {shlex.quote(config.model.custom_class)}" if config.model.custom_class else ""
    last = config.stages.num_stages - 1
    kind = "new run" if is_new else "run"
    print(f"Serving stage {stage} (of 0 to {last}) of {kind} {config.run_id} on {device}")
    print(f"  join:   swarm-peer --stage auto --initial-peers {peers}{own_class}{insecure}")
    print(f"  train:  swarm-trainer --steps 100 --initial-peers {trainers}{insecure}")
    print(f"  watch:  swarm-status --watch --peer {watched}{insecure}", flush=True)
    if token:
        print("  TOKEN is a trainer's; the run's owner makes one: swarm-keys issue FILE --role trainer", flush=True)


def require_ready_file(path: Path | None) -> None:
    """Raise ValueError for a --ready-file that cannot be written, which else would show only once the peer serves.

    Its folder is made.
    """
    if path is None:
        return
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = _temporary(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise ValueError(f"--ready-file {path}: cannot be written: {error.strerror}") from None


def write_ready_file(
    options: PeerOptions, stage: int, identity: Identity, endpoint: str, node: DhtNode, device: torch.device
) -> None:  # fmt: skip
    """Tell whoever started us that we serve, and where; again after each move."""
    if options.ready_file is None:
        return
    ready = {
        "peer_id": identity.peer_id, "stage": stage, "endpoint": endpoint,
        "dht_addresses": outside_addresses(node), "device": str(device),
        "certificate_pem": "" if options.insecure else identity.certificate_pem, "time": time.time(),
    }  # fmt: skip
    temporary = _temporary(options.ready_file)
    temporary.write_text(json.dumps(ready))
    temporary.rename(options.ready_file)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")
