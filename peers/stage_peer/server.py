"""The server of a stage peer: its port, its compute threads, its devices, and the blocks that it serves on them.

One process has one of it. The blocks begin one after another, each as served_block.py says. As the peer moves, the
server gives up some blocks, perhaps all, and begins others; those that stay notice nothing.
"""

import asyncio
import dataclasses
import gc
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import grpc

from peers.reach.listen import Announced, Listening
from peers.shared import stopping
from peers.shared.network import Membership
from peers.stage_peer.contents import Contents
from peers.stage_peer.own_process import OwnProcess
from peers.stage_peer.own_room import dealt
from peers.stage_peer.own_stage import ServerOptions, own_backends
from peers.stage_peer.resume import require_weights
from peers.stage_peer.served_block import ServedBlock
from swarm.checkpoint import file
from swarm.config import WireConfig
from swarm.errors import Fatal, SwarmError
from swarm.events import Leave
from swarm.rpc import tls
from swarm.rpc.callers import Callers
from swarm.rpc.channels import ChannelPool
from swarm.rpc.dispatch import Dispatch
from swarm.rpc.guard import Guard
from swarm.rpc.serving import SERVER_OPTIONS, bind_server, start_server
from swarm.rpc.transfers import Turns
from swarm.stage.admission import LARGEST_NUM_SLOTS
from swarm.stage.boundary import request_specs
from swarm.stage.call import max_kept_bytes
from swarm.stage.context import StageLimits
from swarm.stage.runtime import Runtime
from swarm.stage.staging import staging_of
from swarm.types import Block

logger = logging.getLogger(__name__)

LAST_ROUND_SECONDS, LAST_DRAIN_SECONDS, LAST_QUIET_SECONDS = 60.0, 15.0, 5.0
"""How long a peer that ends goes on serving until its round is committed, how long it then waits for its microbatches
to end, and after how long a quiet it stops waiting for its round. The first two together have to stay below
FAREWELL_SECONDS of shared/stopping.py and below the stop_grace_period of compose.yaml."""


class PeerServer:
    def __init__(self, membership: Membership, everywhere: Sequence[ServerOptions], contents: Contents) -> None:
        """`everywhere` are the options of each device, as far as they do not depend on the block. `contents` has the
        initial weights of blocks, and what is given to others."""
        config, clock = membership.config, membership.clock
        self._everywhere, self._options, self._contents = everywhere, everywhere[0], contents
        channels = ChannelPool(
            insecure=membership.channels.is_insecure, identity=membership.identity, clock=clock,
            points=membership.channels.points,
        )  # fmt: skip
        self._membership = membership = dataclasses.replace(membership, channels=channels)
        given = self._options.given.max_in_flight
        self._limits = StageLimits(
            max_in_flight=given or config.stages.num_stages + 2, largest_in_flight=given or LARGEST_NUM_SLOTS
        )
        self.callers = Callers(clock)
        self._process = OwnProcess(membership, self._options, self.callers)
        self._stagings = {own.device: staging_of(own.device) for own in everywhere}
        self._runtimes = {
            device: Runtime(queue_capacity=1024, stopwatch=staging.stopwatch)
            for device, staging in self._stagings.items()
        }
        self._tasks: asyncio.TaskGroup
        self._dispatch: Dispatch
        self._turns: Turns
        self._serving = dict[Block, asyncio.Task[None]]()
        """The task of each block that is served."""
        self.blocks = dict[Block, ServedBlock]()

    @property
    def announced(self) -> Announced:
        return self._process.announced

    def _has_changed(self) -> None:
        most = max(self._limits.max_in_flight, self._limits.largest_in_flight)
        config = self._membership.config
        if config.owner:  # It may amend the type on the wire, to the largest at most.
            config = dataclasses.replace(config, wire=WireConfig(dtype="fp32"))
        kept = (max_kept_bytes(request_specs(config, block.stage), most) for block in self.blocks)
        self.callers.kept[True].each = sum(kept)
        before = self._membership.config.neighbours
        self._membership.known.hop_within([block for block in self.blocks if {*before(block, -1)} & self.blocks.keys()])
        self._options.own_figures.follow(
            *(
                (self.blocks[name].figures, {"run": self._membership.config.run_id, "stage": str(name)})
                for name in self._serving
            )
        )

    @asynccontextmanager
    async def serving(self, listen: Listening) -> AsyncIterator[None]:
        """Have this peer's port inside, and serve the blocks that are entered. Raises in a group ValueError if the port
        is in use, and what the blocks' tasks raise."""
        async with asyncio.TaskGroup() as self._tasks:
            for runtime in self._runtimes.values():
                runtime.start()
            try:
                async with self._server(listen) as (self._dispatch, self._turns):
                    try:
                        yield
                    finally:
                        await self._end([*self._serving])
            finally:
                for block in self.blocks.values():
                    block.stage.end()
                await asyncio.gather(*(block.settle() for block in self.blocks.values()))
                await self._membership.channels.close()
                for runtime in self._runtimes.values():
                    runtime.stop(timeout_seconds=2.0)

    async def _serve(self, block: ServedBlock) -> None:
        """Serve a block, which has begun, by a task of its own. Returns once it is served. Raises what
        ServedBlock.serving does."""
        served = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            try:
                async with block.serving(self._dispatch, self._turns):
                    if not served.done():
                        served.set_result(None)
                    await asyncio.Event().wait()
            except Exception as error:
                if served.done():
                    raise
                served.set_exception(error)

        task = self._tasks.create_task(serve())
        try:
            await served
        except BaseException:
            task.cancel()
            await asyncio.wait([task])
            raise
        self._serving[block.stage.block] = task

    async def _end(self, blocks: Collection[Block]) -> None:
        """Serve these blocks no longer, of which the one that began last ends first."""
        for task in [task for block, task in reversed(self._serving.items()) if block in blocks]:
            task.cancel()
            await asyncio.wait([task])

    @asynccontextmanager
    async def _server(self, listen: Listening) -> AsyncIterator[tuple[Dispatch, Turns]]:
        """Have this peer's port inside the block, and serve there what does not belong to a stage. Yields what the
        blocks add themselves to."""
        identity, clock, process = self._membership.identity, self._membership.clock, self._process
        guard = Guard(
            authority=identity.authority, callers=self.callers, clock=clock, stage=lambda: dispatch.first.stage
        )
        dispatch = Dispatch(guard.require_right)
        credentials = None if self._membership.channels.is_insecure else tls.server_credentials(identity)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard])
        async with listen.held(), stopping.beside(process.loop_lag.run(), process.follow_amendments()):
            process.listens(partial(listen.announced, bind_server(server, listen.host, listen.port, credentials)))
            turns = Turns(clock, is_training=process.is_busy)
            server.add_generic_rpc_handlers((dispatch,))
            process.add_services(server, self._contents.shelves, turns)
            await process.tell_health()
            try:
                await start_server(server)
                yield dispatch, turns
            finally:
                self._options.own_figures.follow()
                for block in self.blocks.values():
                    block.stage.end()
                await server.stop(grace=1.0)

    # -- moves -----------------------------------------------------------------------------------------------------

    async def enter(self, blocks: Sequence[Block], *, moves: bool = False) -> None:
        """Get the states of these blocks, one after another, and serve them too. If one of them cannot be served, the
        peer first leaves those that it serves already, and then serves none of them. Raises what
        Contents.initial_weights, require_weights, own_backends, OwnState.begin and ServedBlock.serving do."""
        timeline, own = self._membership.timeline, await self._options_of(blocks, moves=moves)
        if timeline.config.lora.is_on:
            # The state that is downloaded from peers of the stage does not include frozen base weights.
            for block, options in own.items():
                require_weights(timeline.config, block, options.resume)
        budgets = [block.stage.context.backend.budget for block in self.blocks.values()]
        try:
            # Making models takes a while, in which the other blocks compute and average.
            backends = await asyncio.to_thread(own_backends, timeline, own, self._stagings, budgets)
            for block, options in own.items():
                self.blocks[block] = ServedBlock(
                    self._membership, block, backends.pop(block), self._runtimes[options.device], self._tasks, options,
                    self._limits, self._process,
                )  # fmt: skip
            self._has_changed()
            for block in blocks:
                await self.blocks[block].begin()
                await self._serve(self.blocks[block])
        except BaseException as error:
            if isinstance(error, SwarmError | OSError | ValueError | ExceptionGroup):
                await self.leave_early(blocks)
            await self.remove(blocks)
            raise
        self._has_changed()

    async def _options_of(self, blocks: Sequence[Block], *, moves: bool) -> dict[Block, ServerOptions]:
        """The options of blocks, made of those of their devices, once their initial weights are here."""
        given, numbers = self._options.given, dealt(self._membership.config, blocks, len(self._everywhere))
        resumes, own = given.resume is not None and bool(file.names(given.resume)), dict[Block, ServerOptions]()
        for block, number in zip(blocks, numbers, strict=True):
            weights = await self._contents.initial_weights(block, resumes=resumes)
            prefix = f"stage {block}: " if len(blocks) > 1 or given.rebalance_seconds > 0 else ""
            own[block] = dataclasses.replace(
                self._everywhere[number], prefix=prefix, weights=weights, moves=moves,
                events=self._options.events.of(block),
            )  # fmt: skip
        return own

    async def remove(self, blocks: Collection[Block]) -> None:
        """Serve these blocks no longer, and give back the memory that they take."""
        await self._end(blocks)
        for name in blocks:
            await self._forget(name)
        self._has_changed()
        gc.collect()

    async def _forget(self, name: Block) -> None:
        self._serving.pop(name, None)
        if (block := self.blocks.pop(name, None)) is not None:
            block.stage.end()
            await block.settle()
            block.stage.context.backend.budget.leave()

    async def has_moved(self) -> None:
        self._process.num_moves += 1
        await asyncio.gather(*(self.blocks[name].presence.announce() for name in self._serving))

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

    def will_leave(self, *, of: Collection[Block] | None = None) -> None:
        for block in self._some(of):
            block.presence.will_leave()

    async def end_of_round(self, seconds: float, *, quiet_seconds: float, of: Collection[Block] | None = None) -> None:
        """Serve until the round has ended of each block that is served, or of these; see ServedBlock.end_of_round. A
        block that is done takes no more, since what it took would be lost with this peer."""
        blocks = self._some(of)

        async def one(block: ServedBlock) -> None:
            await block.end_of_round(seconds, quiet_seconds=quiet_seconds)
            if len(blocks) > 1:
                block.stage.admission.close()

        await asyncio.gather(*map(one, blocks))

    async def drain(self, seconds: float, *, of: Collection[Block] | None = None) -> bool:
        """See ServedBlock.drain."""
        return all(await asyncio.gather(*(block.drain(seconds) for block in self._some(of))))

    async def go_on(self, *, of: Collection[Block] | None = None) -> None:
        for block in self._some(of):
            await block.go_on()

    async def leave(self, *, of: Collection[Block] | None = None) -> None:
        """See ServedBlock.leave."""
        for block in self._some(of):
            await block.leave()

    def _some(self, of: Collection[Block] | None) -> list[ServedBlock]:
        """The blocks that are served, or these of them."""
        return [self.blocks[name] for name in self._serving if of is None or name in of]

    async def leave_early(self, of: Collection[Block]) -> None:
        """Leave those of these blocks that are served, while others are not yet: after their round, in
        LAST_ROUND_SECONDS and LAST_DRAIN_SECONDS at most."""
        served = [block.stage.block for block in self._some(of)]
        if not served:
            return
        names = ", ".join(map(str, served))
        logger.info("leaving stage %s after this round, in %.0f s at most", names, LAST_ROUND_SECONDS)
        self.will_leave(of=served)
        await self.end_of_round(LAST_ROUND_SECONDS, quiet_seconds=LAST_QUIET_SECONDS, of=served)
        await self.drain(LAST_DRAIN_SECONDS, of=served)
        await self.leave(of=served)
        self.has_left(served)

    def has_left(self, blocks: Iterable[Block]) -> None:
        """Write to the event log that this peer has left these blocks."""
        for name in blocks:
            self._options.events.write(Leave(), name)
