"""Runs a stage peer's server: with its first blocks, and then with those to which it moves.

A peer that moves waits for the end of a round, drains, withdraws, and begins at the new blocks like any joiner. Blocks
that it keeps are served on meanwhile. A peer that cannot begin at the new blocks goes back. It never serves a block
without the block's state, and never moves away from a block that no other peer serves.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peers.reach.listen import Announced, Listening
from peers.shared import stopping
from peers.shared.network import LOOK_SECONDS
from peers.shared.room import named
from peers.shared.stopping import leaves
from peers.stage_peer.rebalancer import Rebalancer
from peers.stage_peer.served_block import ServedBlock
from peers.stage_peer.server import LAST_DRAIN_SECONDS, LAST_QUIET_SECONDS, LAST_ROUND_SECONDS, PeerServer
from swarm.errors import Fatal, SwarmError
from swarm.machine.clock import Clock
from swarm.machine.out_of_memory import SMALLER, is_out_of_memory, what_was_asked
from swarm.rebalancing.layout import Span
from swarm.types import Block

logger = logging.getLogger(__name__)

ROUND_SECONDS, DRAIN_SECONDS, QUIET_SECONDS = 600.0, 60.0, 30.0
"""How long a moving peer goes on serving until its round is committed; if the commit takes longer, its microbatches of
the round are lost. Then, how long it waits for its microbatches to end; it stays if they take longer. And it stops
waiting for its round once nothing has been under way for so long, because then no trainer trains."""
COMMIT_SECONDS = 5.0
"""How long another peer of the stage may take to commit the round that this one has committed."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 2.0, 60.0
"""Wait after a block could not be entered, doubled each time."""


@dataclass(frozen=True, kw_only=True)
class Move:
    before: Span
    after: Span
    since: float
    """When it began to drain, on the monotonic clock."""

    @property
    def left(self) -> list[Block]:
        return [block for block in self.before if block not in self.after]

    @property
    def entered(self) -> list[Block]:
        return [block for block in self.after if block not in self.before]

    def back(self) -> "Move":
        return Move(before=self.after, after=self.before, since=self.since)


class Mover:
    def __init__(
        self, server: PeerServer, rebalancer: Rebalancer, *, listen: Listening, clock: Clock, stop: asyncio.Event,
        on_serving: Callable[[Span, Announced], None],
    ) -> None:  # fmt: skip
        """`on_serving` is called whenever the peer serves its blocks, and `stop` is set when it is to leave the run."""
        self._server = server
        self._rebalancer = rebalancer
        self._listen = listen
        self._clock = clock
        self._stop = stop
        self._on_serving = on_serving
        self._span: Span = ()
        """The blocks that it serves."""

    async def run(self, span: Span) -> None:
        """Serve these blocks, and then those to which the peer moves, until `stop` is set, which also ends the attempt
        to enter a block. Raises in a group what the server raised."""
        try:
            async with self._server.serving(self._listen):
                if await self._begin(span, moved=False):
                    self._span = span
                    await self._arrived(span)
                    self._on_serving(span, self._server.announced)
                    await self._stay()
                else:
                    await self._gives_up(span)
        except* (RuntimeError, MemoryError) as errors:
            error = next(leaves(errors))
            if not is_out_of_memory(error):
                raise
            raise Fatal(
                f"{named(self._span or span)} ran out of memory (no room for {what_was_asked(error)}): take a smaller "
                f"--graph-memory-mib or --max-in-flight, {SMALLER}, more stages, or another --device"
            ) from None

    async def _gives_up(self, span: Span, *, before: Span = ()) -> None:
        """Give up the claim to blocks that were not entered before the peer was told to leave."""
        logger.info("leaving: %s was not entered yet", named(span))
        await self._rebalancer.gave_up(span, before=before)

    async def _turns(self, span: Span, other: Span, failure: str, retry_seconds: float) -> bool:
        """Claim other blocks, because the peer could not begin at these, and wait a little. Returns whether the peer
        goes there: not if it is to leave the run."""
        logger.warning("cannot begin at %s: %s; trying %s", named(span), failure, named(other))
        await self._rebalancer.gave_up(span, before=other)
        await self._rebalancer.goes(other, before=span)
        await stopping.before(self._stop.wait(), self._clock.sleep(retry_seconds))
        if self._stop.is_set():
            await self._rebalancer.gave_up(other, before=span)
        return not self._stop.is_set()

    async def _begin(self, blocks: Sequence[Block], *, moved: bool) -> bool:
        """Begin at blocks. Returns whether they are served: not if the peer is told to leave the run before. Raises
        what PeerServer.enter does."""

        async def begin() -> bool:
            await self._server.enter(blocks, moves=moved)
            return True

        async def end() -> None:
            await self._stop.wait()
            await self._server.leave_early(blocks)

        return await stopping.before(end(), begin()) or False

    async def _arrived(self, span: Span, move: Move | None = None) -> None:
        if move is None or span != move.after:
            await self._rebalancer.arrived(span)
            if move is not None:
                logger.info("back at %s", named(span))
            return
        seconds = self._clock.monotonic() - move.since
        await self._rebalancer.arrived(span, move_seconds=seconds)
        logger.info("moved from %s to %s in %.1f s", named(move.before), named(span), seconds)

    async def _stay(self) -> None:
        """Stay at the blocks, and at those to which the peer moves, until it has left the run. Raises Fatal if it has
        left because it cannot go on."""
        while True:
            target = await stopping.before(
                stopping.before(self._stop.wait(), self._server.gives_up()),
                self._rebalancer.next_move(self._span, self._server.rates),
            )
            if target is None:
                if (fault := self._server.fault) is not None:
                    logger.error("this peer cannot go on: %s", fault)
                logger.info(
                    "leaving after this round, in %.0f s at most; another Ctrl-C ends it now", LAST_ROUND_SECONDS
                )
                self._server.will_leave()
                deadline = self._clock.monotonic() + LAST_ROUND_SECONDS
                await asyncio.gather(*(self._hand_over(block, deadline) for block in self._server.blocks.values()))
                await self._server.end_of_round(deadline - self._clock.monotonic(), quiet_seconds=LAST_QUIET_SECONDS)
                logger.info("leaving: finishing what is in flight")
                await self._server.drain(LAST_DRAIN_SECONDS)
                await self._server.leave()
                self._server.has_left(self._server.blocks)
                if (fault := self._server.fault) is not None:
                    raise fault
                return
            if (move := await self._leave_for(target)) is not None:
                self._span = await self._change(move)
                if not self._span:
                    return
                self._on_serving(self._span, self._server.announced)

    async def _leave_for(self, target: Span) -> Move | None:
        """Leave those of the blocks that are not in the target. None if the peer stays at all of them."""
        span = self._span
        move = Move(before=span, after=target, since=self._clock.monotonic())
        logger.info("moving from %s to %s%s", named(span), named(target), " after this round" if move.left else "")
        if not move.left:
            return move
        ending = self._server.end_of_round(ROUND_SECONDS, quiet_seconds=QUIET_SECONDS, of=move.left)
        await stopping.before(self._stop.wait(), ending)
        if not self._stop.is_set():
            move = Move(before=span, after=target, since=self._clock.monotonic())
            is_drained = await stopping.before(self._stop.wait(), self._server.drain(DRAIN_SECONDS, of=move.left))
            if is_drained and all([await self._can_spare(block) for block in move.left]):
                await self._server.leave(of=move.left)
                return move
        if not self._stop.is_set():
            reason = (
                "too few others serve it with its state" if is_drained else f"not done within {DRAIN_SECONDS:.0f} s"
            )
            logger.warning("stays at %s: %s", named(span), reason)
            await self._server.go_on(of=move.left)
        await self._rebalancer.gave_up(target, before=span)
        return None

    async def _change(self, move: Move) -> Span:
        """Have the server give up the blocks that the peer has left, and begin at the new ones, while it serves those
        that stay. Returns the blocks that it serves then: the former ones if the new ones could not be entered, or only
        those that stay if the peer is to leave the run."""
        await self._server.remove(move.left)
        self._server.has_left(move.left)
        way, retry_seconds = move, RETRY_SECONDS
        failure = await self._enter(way.entered)
        while failure and await self._turns(way.after, way.before, failure, retry_seconds):
            self._server.has_left(way.entered)
            way, retry_seconds = way.back(), min(2 * retry_seconds, MAX_RETRY_SECONDS)
            failure = await self._enter(way.entered)
        if failure != "":  # The peer is to leave the run.
            self._server.has_left(way.entered)
            await self._gives_up(way.after, before=way.before)
            return tuple(block for block in move.before if block in move.after)
        if way.after == move.after:
            await self._server.has_moved()
        await self._arrived(way.after, move)
        return way.after

    async def _enter(self, blocks: Sequence[Block]) -> str | None:
        """Begin at new blocks. Returns why the peer could not begin there, or nothing; None if it is told to leave."""
        failure: str | None = ""
        try:
            if blocks and not await self._begin(blocks, moved=True):
                failure = None
        except* (SwarmError, OSError, ValueError) as faults:
            failure = str(next(leaves(faults))) or "no reason is known"
        return failure

    async def _hand_over(self, block: ServedBlock, deadline: float) -> None:
        """Go on serving, until the deadline, while a peer on its way here can get the block's state only from this
        peer. At round 0 every peer can make the initial state itself."""
        name, has_said = block.stage.block, False
        while block.stage.round > 0 and self._clock.monotonic() < deadline:
            try:
                if not await self._rebalancer.is_awaited(
                    name, round_number=block.stage.round, lineage=block.member.progress().lineage
                ):
                    return
            except SwarmError as error:
                logger.debug("nobody to be asked: %s", error)
                return
            if not has_said:
                logger.info("a peer is on its way to stage %s: serving on until it has the state", name)
                has_said = True
            await self._clock.sleep(LOOK_SECONDS)

    async def _can_spare(self, name: Block) -> bool:
        block, deadline = self._server.blocks[name], self._clock.monotonic() + COMMIT_SECONDS
        while True:
            try:
                if await self._rebalancer.can_spare(
                    name,
                    round_number=block.stage.round,
                    lineage=block.member.progress().lineage,
                    last_members=block.averager.last_members,
                ):
                    return True
            except SwarmError as error:
                logger.debug("nobody to be asked: %s", error)
            if self._clock.monotonic() >= deadline:
                return False
            await self._clock.sleep(LOOK_SECONDS)
