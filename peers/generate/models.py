"""The model that writes: one that is loaded whole into this process, or a running swarm's.

The first is that of checkpoints, of a run folder, or of a model's folder of Hugging Face. Of a swarm's model this
process holds no weights.
"""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from random import SystemRandom

from peers.generate.options import PROG, GenerateOptions
from peers.generate.terminal import tell
from peers.shared.devices import computing_in, device_of, warn_of_emulation
from peers.shared.entrance import find_entrance, reading
from peers.shared.named_model import chooser, open_model
from peers.shared.network import REFRESH_SECONDS, Membership
from peers.shared.process import cache_folder, keep_compiled_code
from peers.shared.run_options import naming_options
from peers.shared.tokenizer import folder_of, have_tokenizer
from swarm.config import RunConfig
from swarm.data import tokenizers
from swarm.data.own_tokenizer import trusted
from swarm.data.tokenizers import Tokenizer
from swarm.generation.engine import Engine, LocalEngine, Room, RoutedEngine
from swarm.generation.text_model import TextModel, read_text_model
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext
from swarm.interchange import origin
from swarm.interchange.export import Origin
from swarm.machine.clock import SystemClock
from swarm.machine.recording import recorder_of
from swarm.model import compiled
from swarm.model.cache import cache_bytes
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.types import Block


@asynccontextmanager
async def open_local_model(options: GenerateOptions) -> AsyncIterator[TextModel]:
    """Load the model that --checkpoint or --model names, and run its engine inside the block. Raises ValueError,
    IntegrityError or CorpusMismatch if the model or its tokenizer cannot be loaded."""
    device = device_of(options.device, SystemRandom())
    found = _origins(options)
    config = computing_in(found[0].config, options.dtype, device)
    warn_of_emulation(config.model, device)
    data = dataclasses.replace(config.data, tokenizer=trusted(options.tokenizer, found[0].tokenizer))
    with naming_options(options):
        tokenizer = tokenizers.load_for_run(data, vocab_size=config.model.vocab_size)
    longest = config.model.max_positions or data.sequence_length
    num_positions = int(options.cache_gib * 2**30 / cache_bytes(config.model, config.model.num_layers))
    room = Room(options.max_sequences, max(longest, num_positions))
    engines = [
        LocalEngine(
            origin.transformer(each, config, device), room, longest=longest, round_number=each.card.round,
            recorder=recorder_of(device),
        )
        for each in found
    ]  # fmt: skip
    wanted = "off" if options.compile == "auto" and options.serve is None else options.compile
    if await asyncio.to_thread(compiled.compiles, wanted, config, device):
        tell("compiling the model's layers, which takes a minute the first time")
        keep_compiled_code(os.environ)
        for each in engines:
            await asyncio.to_thread(each.warm_up)
    # The chat template and end tokens may be beside the tokenizer, or in the model's folder.
    named = [Path(folder) for folder in (options.model, options.base) if folder is not None]
    folders = [*folder_of(data.tokenizer), *named]
    engine = _one(engines, options, tokenizer)
    # The run's own configuration, because its id is the model's name, whatever type the matrices have here.
    model = read_text_model(found[0].config, engine, tokenizer, folders=folders, now=datetime.now)
    async with asyncio.TaskGroup() as tasks:
        computing = [tasks.create_task(engine.run()) for engine in engines]
        yield model
        for task in computing:
            task.cancel()


def _one(engines: Sequence[Engine], options: GenerateOptions, tokenizer: Tokenizer) -> Engine:
    """The engine of the one path, or one that chooses among those of all paths. Raises ValueError, IntegrityError, or
    PeerUnavailable if the router is not theirs, or cannot be read."""
    if options.router is None:
        return engines[0]
    choose = chooser(options.router, len(engines), tokenizer, cache_folder(), tell)
    return RoutedEngine(engines, choose, options.reroute_every or 0)


def _paths(options: GenerateOptions, config: RunConfig) -> Sequence[int]:
    """The paths whose models are needed: all with a router, or else one. Raises ValueError if there is none of this
    number."""
    if options.router is not None:
        return range(len(config.paths))
    if options.path is None and len(config.paths) > 1:
        tell(f"the run has {len(config.paths)} paths, and path 0 writes: --path N or --router DIR chooses another")
    origin.require_path(config, options.path or 0)
    return [options.path or 0]


def _origins(options: GenerateOptions) -> list[Origin]:
    """The models of the paths that may write; of a model without paths, that one."""
    if options.checkpoint is not None:
        base = open_model(options.base, tell).all_weights(cache_folder()) if options.base is not None else None
        config = origin.config_of_checkpoints(options.checkpoint)
        return [
            origin.from_checkpoints(options.checkpoint, options.round, base, path=path)
            for path in _paths(options, config)
        ]
    assert options.model is not None
    if options.router is not None and (
        exports := sorted(path for path in Path(options.model).glob("path-*") if path.is_dir())
    ):
        return [origin.from_folder(folder) for folder in exports]
    found = origin.from_folder(Path(options.model))
    # At its beginning a run has the same weights along all paths.
    return [found] * len(_paths(options, found.config))


@asynccontextmanager
async def open_swarm(options: GenerateOptions) -> AsyncIterator[TextModel]:
    """Enter the DHT as a client, and yield a model that the run's peers compute. It works until the block ends. Raises
    ValueError if a token is missing, or the model generates no text, CorpusMismatch if the tokenizer is not the run's,
    and PeerUnavailable if no peer answers, or none gives the run's tokenizer."""
    clock = SystemClock()
    entrance = find_entrance(options, os.environ, prog=PROG, clock=clock)
    async with reading(entrance, clock) as member:
        config = member.config
        paths = _paths(options, config)
        blocks = sorted({block for path in paths for block in config.blocks_of(path)})
        await member.known.look_first(member.directory, blocks, clock)
        named = options.tokenizer or await have_tokenizer(member, cache_folder())
        data = dataclasses.replace(config.data, tokenizer=named)
        with naming_options(options):
            tokenizer = tokenizers.load_for_run(data, vocab_size=config.model.vocab_size)
        async with _engines(member, paths, blocks) as engines:
            engine = _one(engines, options, tokenizer)
            yield read_text_model(config, engine, tokenizer, folders=folder_of(data.tokenizer), now=datetime.now)


@asynccontextmanager
async def _engines(
    member: Membership, paths: Sequence[int], blocks: Sequence[Block]
) -> AsyncIterator[list[SwarmEngine]]:
    """Make an engine for each path, and inside the block keep the peers of stage 0 up to date."""
    known, channels, clock, config = member.known, member.channels, member.clock, member.config
    hops = {
        block: Hop(HopContext(run_id=config.run_id, block=block, router=known.router, channels=channels, clock=clock))
        for block in blocks
        if block.stage == 0
    }
    watcher = RoundWatcher(
        run_id=config.run_id,
        blocks=lambda: blocks,
        synchronous=config.rounds.synchronous,
        peers=known.peers,
        channels=channels,
    )
    await watcher.poll()
    engines = [
        SwarmEngine(hops[config.blocks_of(path)[0]], config, round_number=watcher.known_round, path=path)
        for path in paths
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(member.directory.watch(blocks, known.update, REFRESH_SECONDS)),
                tasks.create_task(member.follow_amendments()),
                *(tasks.create_task(hop.run()) for hop in hops.values()),
            ]
            yield engines
            for task in watching:
                task.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
