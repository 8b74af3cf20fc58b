"""Ends computations: they are acknowledged, or undone.

    acknowledged    the microbatch counts here from now on, and the acknowledgement is passed on downstream
    abandoned       its call is gone: it is kept for a while, for a retry, and then discarded
    discarded       it is removed from the ledger at once, stopped here and downstream, and then undone
    undone          on the compute thread: its gradient, if there is one, is taken out of the sum

Begins no computation. Runs on the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress

from swarm.errors import NotReady
from swarm.events import Ack
from swarm.stage.computation import Computation
from swarm.stage.context import StageContext
from swarm.stage.ledger import Entry, EntryState
from swarm.stage.settings.setting import Setting

MOST_KEPT = 8
"""The microbatches of which tensors are kept for spot checks, where computations are not. A check begins at once."""
_ACKNOWLEDGED = object()
"""The subscriber of a computation that no call will ask for again."""


class Endings:
    def __init__(self, context: StageContext, setting: Setting) -> None:
        self._context = context
        self._setting = setting
        self._records = context.records
        self._undoing: set[asyncio.Task[None]] = set()
        self._waiting: set[asyncio.Task[None]] = set()
        """One task for each answer that waits for a retry."""
        self._has_ended = False
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Wake everything that waits for gradients to be acknowledged, used in a step or taken out."""
        self._setting.look()
        self._changed.set()

    async def report_changes(self, notify: Callable[[], None]) -> None:
        """Call `notify` whenever what counts towards the round may have changed, until cancelled. Only one caller at a
        time."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            notify()

    # -- acknowledged ------------------------------------------------------------------------------------------------

    def acknowledge(self, computation: Computation) -> None:
        """Count a microbatch here from now on, and pass the acknowledgement of its answer on downstream."""
        computation.subscribe(_ACKNOWLEDGED)
        holder = computation.adopts or computation
        holder.subscribe(_ACKNOWLEDGED)
        microbatch, ledger = computation.microbatch, self._records.ledger
        self._records.exchanged.pop(microbatch.index, None)  # Whoever asks again may have sent other activations.
        entry = ledger.find(microbatch.index)
        # The microbatch may have been taken out of the round in the meantime, because another member counts it too.
        if entry is not None and entry.computation is holder and entry.state is EntryState.TENTATIVE:
            self._setting.acknowledged(microbatch)
            self._records.counters["committed"] += 1
            self._context.events.write(Ack(microbatch=microbatch.index))
            if entry.computation is None and computation is holder:
                self._keep_exchanged(computation)
            if not microbatch.is_replay:  # A replay takes less time.
                self._records.seconds_per_sample.observe(computation.result().busy_seconds / microbatch.num_samples)
            self._pass_on(self._settle(holder, keep_answer=entry.computation is not None))
        if computation.adopts is not None:
            computation.adopts.close_downstream()
        self._pass_on(computation.acknowledge_downstream())

    def _keep_exchanged(self, computation: Computation) -> None:
        kept, exchanged = self._records.exchanged, computation.exchanged()
        if exchanged is not None and self._context.config.rounds.check_share:
            kept[computation.microbatch.index] = exchanged
            if len(kept) > MOST_KEPT:
                del kept[next(iter(kept))]

    async def _settle(self, computation: Computation, *, keep_answer: bool) -> None:
        await computation.settle(keep_answer=keep_answer)
        self.changed()

    def _pass_on(self, consequence: Coroutine[None, None, None]) -> None:
        self._records.answers.settle(self._context.spawn(consequence))

    # -- abandoned ---------------------------------------------------------------------------------------------------

    def abandon(self, computation: Computation, subscriber: object) -> None:
        """Undo a computation, because the call that waited for it is gone. If a retry can use it, keep it for a while
        first."""
        if computation.subscriber is subscriber:
            # A call may end after its peer has ended. Then there is no sum any more.
            with suppress(NotReady):
                self._context.spawn(self._expire(computation, computation.orphan()))

    def end(self) -> None:
        """Stop waiting for retries, because this peer admits nothing from now on."""
        self._has_ended = True
        for waiting in self._waiting:
            waiting.cancel()

    async def _expire(self, computation: Computation, orphan: object) -> None:
        if not self._has_ended and not computation.failed and self._setting.may_be_joined(computation):
            # The peer that takes the dead neighbour's place has its own computation to do before it asks.
            own_seconds = (self._records.seconds_per_sample.value or 0.0) * computation.microbatch.num_samples
            seconds = max(self._context.limits.orphan_seconds, 3 * own_seconds)
            waiting = self._context.spawn(self._context.clock.sleep(seconds))
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
            await asyncio.wait([waiting])
        if computation.subscriber is orphan:
            self.discard(computation)
            if computation.adopts is not None and computation.adopts.subscriber is computation:
                self.discard(computation.adopts)

    # -- undone ------------------------------------------------------------------------------------------------------

    def discard(self, *computations: Computation) -> None:
        """Begin to undo computations that will not be acknowledged.

        They are forgotten at once, so that a retry in the meantime starts afresh and does not adopt one of them.
        """
        ledger = self._records.ledger
        for computation in computations:
            entry = ledger.find(computation.microbatch.index)
            if entry is not None and entry.computation is computation:
                self._records.counters["rolled_back"] += entry.state is not EntryState.RUNNING
                ledger.forget(computation.microbatch.index)
            computation.stop()
        undoing = self._context.spawn(self._undo(computations))
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)

    async def discard_all(self, entries: Iterable[Entry[Computation]]) -> None:
        """Undo these computations, and wait until no computation is being undone any more."""
        computations = [entry.computation for entry in entries if entry.computation is not None]
        if computations:
            self.discard(*computations)
        if self._undoing:
            # This includes earlier ones: the ledger has forgotten them, but their gradients are still in the sum.
            await asyncio.wait(set(self._undoing))

    async def _undo(self, computations: Sequence[Computation]) -> None:
        backend = self._context.backend
        for computation in computations:
            await computation.stopped()

        def undo() -> None:
            given_up = [computation.give_up() for computation in computations]
            backend.roll_back([accumulated for accumulated in given_up if accumulated is not None])

        # There is only one compute thread, so this runs after any task of these computations that is still running.
        await self._context.runtime.control(undo)
        # Checked here, because the tasks of these computations are cancelled, and so cannot report a failed step.
        backend.weights.require_sound()
        self.changed()
