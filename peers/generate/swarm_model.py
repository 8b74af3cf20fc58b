"""The model of a running swarm, used over the network: this process holds none of its weights."""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

from peers.generate.options import GenerateOptions
from peers.shared.entrance import find_entrance, reading
from peers.shared.environment import cache_folder
from peers.shared.network import REFRESH_SECONDS, Membership
from peers.shared.run_options import naming_options
from peers.shared.tokenizer import folder_of, have_tokenizer
from swarm.credentials.certificates import Role
from swarm.data import tokenizers
from swarm.generation.text_model import TextModel, read_text_model
from swarm.hop.hop import Hop, watch_connections
from swarm.machine.clock import SystemClock
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.swarm_engine import SwarmEngine


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
        await member.known.look_first(member.directory, member.stages, clock)
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
    hop = Hop(run_id=member.config.run_id, stage=0, reply_specs={}, router=known.router, channels=channels, clock=clock)
    watcher = RoundWatcher(
        run_id=member.config.run_id,
        num_stages=len(member.stages),
        synchronous=member.config.rounds.synchronous,
        peers=known.peers,
        channels=channels,
    )
    await watcher.poll()
    engine = SwarmEngine(hop, member.config, round_number=watcher.known_round)
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(member.directory.watch(member.stages, known.update, REFRESH_SECONDS)),
                tasks.create_task(watch_connections(stage=0, router=known.router, channels=channels, clock=clock)),
            ]
            yield engine
            for task in watching:
                task.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
