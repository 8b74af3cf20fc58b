"""LOOP 3: keeps one stage's peers at the same weights, round by round.

Started by the stage peer's program. Three things go on at once: this peer reports its progress to the peer
that it believes leads; when that is itself, it watches the reports and leads the attempts; and when it finds
itself behind, it downloads. Never touches weights: the stage does, when it is told to.
"""

from collections.abc import Collection

from swarm.averaging.changes import wait
from swarm.averaging.parts import Parts
from swarm.averaging.view import AveragingStatistics, GroupView


class Averager:
    """One peer's part in its stage's rounds, as the rest of the peer sees it.

    Attributes:
        handlers: what it answers to other peers.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._place = parts.place
        self._roster = parts.roster
        self.handlers = parts.handlers

    async def run(self) -> None:
        """Take part until cancelled. Leaving needs no farewell: the others go on without this peer."""
        tasks = self._parts.context.tasks
        async with tasks.running():
            tasks.spawn(self._parts.reporter.run())
            tasks.spawn(self._parts.lead_loop.run())
            tasks.spawn(self._parts.donor.run())

    def notify(self) -> None:
        """The stage's progress changed."""
        self._parts.changes.notify()

    async def join(self) -> None:
        """Ask every known peer where the run is, and download its state if this peer is behind; needs `run`."""
        await self._parts.reporter.ask_all()

    async def changed(self, seconds: float) -> None:
        """Wait until the view, or the state of a round, may have changed, but no longer than `seconds`."""
        await wait(self._parts.changes.next, seconds)

    def view(self) -> GroupView:
        """The round as this peer knows it."""
        return self._parts.watch.view()

    @property
    def is_behind(self) -> bool:
        """Whether the group is at a later round, and its state is being had."""
        return self._place.is_catching_up

    @property
    def last_members(self) -> Collection[str]:
        """Ids of those that took part in the round before; empty where this peer does not know them."""
        return self._place.last_members

    def misses_member(self) -> bool:
        """See Roster.misses_member."""
        return self._roster.misses_member(self._place.standing)

    def awaits_reports(self) -> bool:
        """Whether a serving peer, alive as far as this one knows, has not told yet what it has of the round."""
        return self._roster.awaits_reports(self._place.standing)

    def statistics(self) -> AveragingStatistics:
        """A reading of the counters."""
        times, loop = self._parts.leader.times, self._parts.lead_loop
        return AveragingStatistics(
            num_attempts=loop.num_attempts,
            aborted=dict(loop.aborted),
            exchange_seconds=times.total_exchange_seconds,
            barrier_seconds=times.total_barrier_seconds,
            num_downloads=self._parts.catch_up.num_downloads,
            num_members=len(self._place.last_members),
            num_alive=max(self._parts.reporter.num_alive, len(self._roster.alive())),
            refusals=self._place.branches.refusals,
        )
