"""The server of a stage peer: its port, its compute threads, its devices, and the blocks that it serves on them.

One process has one of it at a time. The blocks begin one after another, each as served_block.py says.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import grpc

from peers.reach.listen import Announced, Listening
from peers.shared.network import Membership
from peers.stage_peer.own_process import OwnProcess
from peers.stage_peer.own_stage import ServerOptions, own_backends
from peers.stage_peer.resume import require_weights
from peers.stage_peer.served_block import ServedBlock
from peers.stage_peer.services import add_services_of
from swarm.errors import Fatal, SwarmError
from swarm.events import Leave
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.channels import ChannelPool
from swarm.rpc.dispatch import Dispatch
from swarm.rpc.guard import Guard
from swarm.rpc.serving import SERVER_OPTIONS, bind_server, start_server
from swarm.rpc.transfers import Turns
from swarm.stage.boundary import request_specs
from swarm.stage.call import max_kept_bytes
from swarm.stage.context import StageLimits
from swarm.stage.runtime import Runtime
from swarm.stage.slots import LARGEST_NUM_SLOTS
from swarm.stage.staging import staging_of
from swarm.types import Block

logger = logging.getLogger(__name__)

LAST_ROUND_SECONDS, LAST_DRAIN_SECONDS, LAST_QUIET_SECONDS = 60.0, 15.0, 5.0
"""How long a peer that ends goes on serving until its round is committed, how long it then waits for its microbatches
to end, and after how long a quiet it stops waiting for its round. The first two together have to stay below
FAREWELL_SECONDS of shared/token_option.py and below the stop_grace_period of compose.yaml."""


class PeerServer:
    def __init__(self, membership: Membership, blocks: Mapping[Block, ServerOptions], tasks: asyncio.TaskGroup) -> None:
        """`blocks` are the options of each block that is to be served."""
        config, clock = membership.config, membership.clock
        blocks = {block: dataclasses.replace(own, events=own.events.of(block)) for block, own in blocks.items()}
        self._options = options = next(iter(blocks.values()))
        # The channels are closed with this server, because at another stage the peer has other neighbours.
        channels = ChannelPool(
            insecure=options.insecure, identity=membership.identity, clock=clock, points=membership.channels.points
        )
        self._membership = membership = dataclasses.replace(membership, channels=channels)
        least = options.max_in_flight or config.stages.num_stages + 2
        limits = StageLimits(max_in_flight=least, largest_in_flight=options.max_in_flight or LARGEST_NUM_SLOTS)
        most = max(limits.max_in_flight, limits.largest_in_flight)
        max_training_bytes = sum(max_kept_bytes(request_specs(config, block.stage), most) for block in blocks)
        self.callers = Callers(clock, max_training_bytes=max_training_bytes)
        self._process = OwnProcess(membership, options, self.callers)
        membership.known.hop_within([block for block in blocks if {*config.neighbours(block, -1)} & blocks.keys()])
        if config.lora.is_on:
            # The state that is downloaded from peers of the stage does not include frozen base weights.
            for block, own in blocks.items():
                require_weights(config, block, own.resume)
        stagings = {device: staging_of(device) for device in dict.fromkeys(own.device for own in blocks.values())}
        self._runtimes = {
            device: Runtime(queue_capacity=1024, stopwatch=staging.stopwatch) for device, staging in stagings.items()
        }
        self._served: list[ServedBlock] = []
        self.blocks = {
            block: ServedBlock(
                membership, block, backend, self._runtimes[blocks[block].device], tasks, blocks[block], limits,
                self._process,
            )
            for block, backend in own_backends(config, blocks, stagings).items()
        }  # fmt: skip

    @asynccontextmanager
    async def serving(self, listen: Listening) -> AsyncIterator[Announced]:
        """Get the blocks' states, one after another, and serve the blocks inside. Yields the addresses that others are
        told.

        If a later block cannot be served, the peer first leaves those that it serves already; see leave_early.

        Raises ValueError if the port is in use, what OwnState.begin does, and in a group NotReady if a block's state
        could not be downloaded from the peers that hold it.
        """
        for runtime in self._runtimes.values():
            runtime.start()
        try:
            async with AsyncExitStack() as stack:
                first, *others = self.blocks.values()
                await first.begin()
                dispatch, turns = await stack.enter_async_context(self._server(listen))
                await stack.enter_async_context(first.serving(dispatch, turns))
                self._served.append(first)
                try:
                    for block in others:
                        await block.begin()
                        await stack.enter_async_context(block.serving(dispatch, turns))
                        self._served.append(block)
                except (SwarmError, OSError, ValueError, ExceptionGroup):
                    await self.leave_early()
                    raise
                run = self._membership.config.run_id
                self._options.own_figures.follow(
                    *((block.figures, {"run": run, "stage": str(name)}) for name, block in self.blocks.items())
                )
                yield self._process.announced
        finally:
            for block in self.blocks.values():
                block.stage.end()
            await asyncio.gather(*(block.settle() for block in self.blocks.values()))
            await self._membership.channels.close()
            for runtime in self._runtimes.values():
                runtime.stop(timeout_seconds=2.0)

    @asynccontextmanager
    async def _server(self, listen: Listening) -> AsyncIterator[tuple[Dispatch, Turns]]:
        """Have this peer's port inside the block, and serve there what does not belong to a stage. Yields what the
        blocks add themselves to."""
        identity, clock, process = self._membership.identity, self._membership.clock, self._process
        guard = Guard(
            authority=identity.authority, callers=self.callers, clock=clock, stage=lambda: dispatch.first.stage
        )
        dispatch = Dispatch(guard.require_right)
        credentials = None if self._options.insecure else tls.server_credentials(identity)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard])
        async with listen.held(), asyncio.TaskGroup() as tasks:
            process.listens(partial(listen.announced, bind_server(server, listen.host, listen.port, credentials)))
            turns = Turns(clock, is_training=process.is_busy)
            server.add_generic_rpc_handlers((dispatch,))
            add_services_of(process, self._membership, self._options, turns, server)
            measuring = tasks.create_task(process.loop_lag.run())
            try:
                await start_server(server)
                yield dispatch, turns
            finally:
                measuring.cancel()
                self._options.own_figures.follow()
                for block in self.blocks.values():
                    block.stage.end()
                await server.stop(grace=1.0)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def gives_up(self) -> None:
        """Return once some block cannot go on, because it lacks memory."""
        waiting = [asyncio.create_task(block.stage.admission.gives_up()) for block in self.blocks.values()]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def rates(self) -> dict[Block, float]:
        """The samples per second that each block would manage alone, of those that have computed."""
        seconds = {name: block.stage.seconds_per_sample for name, block in self.blocks.items()}
        return {name: 1.0 / each for name, each in seconds.items() if each}

    @property
    def fault(self) -> Fatal | None:
        faults = (block.stage.admission.fault for block in self.blocks.values())
        return next((fault for fault in faults if fault is not None), None)

    def will_leave(self) -> None:
        """See Presence.will_leave."""
        for block in self._served:
            block.presence.will_leave()

    async def end_of_round(self, seconds: float, *, quiet_seconds: float) -> None:
        """Serve until every block's round has ended; see ServedBlock.end_of_round. A block that is done takes no more,
        since what it took would be lost with this peer."""

        async def one(block: ServedBlock) -> None:
            await block.end_of_round(seconds, quiet_seconds=quiet_seconds)
            if len(self.blocks) > 1:
                block.stage.admission.close()

        await asyncio.gather(*map(one, self._served))

    async def drain(self, seconds: float) -> bool:
        """See ServedBlock.drain."""
        return all(await asyncio.gather(*(block.drain(seconds) for block in self._served)))

    async def go_on(self) -> None:
        for block in self._served:
            await block.go_on()

    async def leave(self) -> None:
        """See ServedBlock.leave."""
        for block in self._served:
            await block.leave()

    async def leave_early(self) -> None:
        """Leave the blocks that are served while others are not yet: after their round, in LAST_ROUND_SECONDS and
        LAST_DRAIN_SECONDS at most."""
        if not self._served:
            return
        names = ", ".join(str(block.stage.block) for block in self._served)
        logger.info("leaving stage %s after this round, in %.0f s at most", names, LAST_ROUND_SECONDS)
        self.will_leave()
        await self.end_of_round(LAST_ROUND_SECONDS, quiet_seconds=LAST_QUIET_SECONDS)
        await self.drain(LAST_DRAIN_SECONDS)
        await self.leave()
        for block in self._served:
            self._options.events.write(Leave(), block.stage.block)
