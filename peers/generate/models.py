"""The model that writes: one that is loaded whole into this process, or a running swarm's.

The first is that of checkpoints, of a run folder, or of a model's folder of Hugging Face. Of a swarm's model this
process holds no weights.
"""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from random import SystemRandom

import torch

from peers.generate.options import GenerateOptions
from peers.generate.terminal import tell
from peers.shared.devices import computing_in, device_of, warn_of_emulation
from peers.shared.entrance import find_entrance, reading
from peers.shared.environment import cache_folder
from peers.shared.network import REFRESH_SECONDS, Membership
from peers.shared.run_options import naming_options
from peers.shared.tokenizer import folder_of, have_tokenizer
from peers.stage_peer.own_model import open_model
from swarm.config import RunConfig
from swarm.credentials.rights import Role
from swarm.data import tokenizers
from swarm.data.own_tokenizer import trusted
from swarm.generation.engine import LocalEngine, Room
from swarm.generation.text_model import TextModel, read_text_model
from swarm.hop.hop import Hop, watch_connections
from swarm.interchange import origin, run_folder
from swarm.interchange.export import Origin
from swarm.machine.clock import SystemClock
from swarm.machine.recording import recorder_of
from swarm.model.cache import cache_bytes
from swarm.model.functions import fuses
from swarm.model.stage_module import autocast_dtype
from swarm.model.stages import Transformer
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.types import Block


@asynccontextmanager
async def open_local_model(options: GenerateOptions) -> AsyncIterator[TextModel]:
    """Load the model that --checkpoint or --model names, and run its engine inside the block. Raises ValueError,
    IntegrityError or CorpusMismatch if the model or its tokenizer cannot be loaded."""
    device = device_of(options.device, SystemRandom())
    found = _origin(options)
    config = computing_in(found.config, options.dtype, device)
    warn_of_emulation(config.model, device)
    data = dataclasses.replace(config.data, tokenizer=trusted(options.tokenizer, found.tokenizer))
    with naming_options(options):
        tokenizer = tokenizers.load_for_run(data, vocab_size=config.model.vocab_size)
    longest = config.model.max_positions or data.sequence_length
    num_positions = int(options.cache_gib * 2**30 / cache_bytes(config.model, config.model.num_layers))
    room = Room(options.max_sequences, max(longest, num_positions))
    weights = load(found, config, device)
    engine = LocalEngine(weights, room, longest=longest, round_number=found.card.round, recorder=recorder_of(device))
    # The chat template and end tokens may be beside the tokenizer, or in the model's folder.
    named = [Path(folder) for folder in (options.model, options.base) if folder is not None]
    folders = [*folder_of(data.tokenizer), *named]
    # The run's own configuration, because its id is the model's name, whatever type the matrices have here.
    model = read_text_model(found.config, engine, tokenizer, folders=folders, now=datetime.now)
    async with asyncio.TaskGroup() as tasks:
        computing = tasks.create_task(engine.run())
        yield model
        computing.cancel()


def load(found: Origin, config: RunConfig, device: torch.device) -> Transformer:
    """The whole model with its weights on a device. Matrices have the type of model.autocast, and else float32: reading
    them is most of what a token takes. Raises IntegrityError if the weights are not those of the model."""
    model = Transformer(config, fused=fuses(device))
    for name, parameter in model.named_parameters():
        value = found.load({name})[name]
        dtype = autocast_dtype(config.model) if value.ndim > 1 else None
        parameter.data = value.to(device, dtype or torch.float32)
    return model.to(device)


def _origin(options: GenerateOptions) -> Origin:
    if options.checkpoint is not None:
        base = open_model(options.base, tell).all_weights(cache_folder()) if options.base is not None else None
        return origin.from_checkpoints(options.checkpoint, options.round, base)
    assert options.model is not None
    folder = Path(options.model)
    is_run = (folder / run_folder.CONFIG).is_file()
    return origin.from_run_folder(folder) if is_run else origin.from_model_folder(folder)


@asynccontextmanager
async def open_swarm(options: GenerateOptions) -> AsyncIterator[TextModel]:
    """Enter the DHT as a client, and yield a model that the run's peers compute. It works until the block ends.

    Raises:
        ValueError: a token is missing, or the model generates no text.
        CorpusMismatch: the tokenizer is not the run's.
        PeerUnavailable: no peer answers, or none gives the run's tokenizer.
    """
    clock = SystemClock()
    entrance = find_entrance(options, os.environ, role=Role.TRAINER, clock=clock)
    async with reading(entrance, clock) as member:
        config = member.config
        await member.known.look_first(member.directory, member.blocks, clock)
        named = options.tokenizer or await have_tokenizer(member, cache_folder())
        data = dataclasses.replace(config.data, tokenizer=named)
        with naming_options(options):
            tokenizer = tokenizers.load_for_run(data, vocab_size=config.model.vocab_size)
        async with _engine(member) as engine:
            yield read_text_model(config, engine, tokenizer, folders=folder_of(data.tokenizer), now=datetime.now)


@asynccontextmanager
async def _engine(member: Membership) -> AsyncIterator[SwarmEngine]:
    """Make an engine, and inside the block keep its peers of stage 0 up to date."""
    known, channels, clock = member.known, member.channels, member.clock
    first = Block(0)
    hop = Hop(
        run_id=member.config.run_id, block=first, reply_specs={}, router=known.router, channels=channels, clock=clock
    )
    watcher = RoundWatcher(
        run_id=member.config.run_id,
        blocks=lambda: member.blocks,
        synchronous=member.config.rounds.synchronous,
        peers=known.peers,
        channels=channels,
    )
    await watcher.poll()
    engine = SwarmEngine(hop, member.config, round_number=watcher.known_round)
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(member.directory.watch(member.blocks, known.update, REFRESH_SECONDS)),
                tasks.create_task(watch_connections(block=first, router=known.router, channels=channels, clock=clock)),
            ]
            yield engine
            for task in watching:
                task.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
