"""The context that every part of one peer's averaging gets: which peer it is, and the configuration, clock and
directory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from swarm.averaging.agreement.rules import Timing
from swarm.averaging.wire.transport import OwnBlock, Transport
from swarm.config import RunConfig, Timeline
from swarm.errors import NotReady
from swarm.events import Events
from swarm.machine.clock import Clock, spawn, wait
from swarm.machine.waits import Waits
from swarm.rpc.ask import address_of
from swarm.rpc.transfers import Turns
from swarm.rpc.v1.stage_pb2 import Address
from swarm.training.run_rounds import RunRounds
from swarm.training.tally import Sign
from swarm.types import Block, PeerId, PeerRecord, PeerState

_NOT_YET = "this peer does not average yet"


class Tasks:
    """The tasks of one peer's averaging. They can be started only while `running` is entered."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let tasks start while the block runs. At its end all tasks are awaited. An error in one cancels the
        others."""
        async with asyncio.TaskGroup() as self._group:
            yield

    def require_running(self) -> None:
        """Raise NotReady if this peer does not average yet."""
        if self._group is None:
            raise NotReady(_NOT_YET)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task that outlives the call that asked for it. Raises NotReady."""
        if self._group is None:
            work.close()
            raise NotReady(_NOT_YET)
        return spawn(self._group, work)


class Changes:
    """Signals between the parts of one peer's averaging: something has changed, or a report is due.

    The reporter waits for something to report, other parts for a change of the round.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._progressed_at = clock.monotonic()
        self._report_due = asyncio.Event()
        self.next = asyncio.Event()
        """Set at the next change, and then replaced by a new event."""
        self.version = 0
        """Counts the changes of this peer's report."""

    @property
    def quiet_seconds(self) -> float:
        return self._clock.monotonic() - self._progressed_at

    def signal(self) -> None:
        """Wake all that wait for a change: the state of a round may have changed."""
        self.next.set()
        self.next = asyncio.Event()

    def progressed(self) -> None:
        """Note that a member has more of the round than before, or less."""
        self._progressed_at = self._clock.monotonic()
        self.signal()

    def notify(self) -> None:
        """Note that this peer has something new to report."""
        self.version += 1
        self._report_due.set()

    def report_again(self) -> None:
        """Have the same report sent once more, for example to another leader."""
        self._report_due.set()

    async def until_report_due(self, seconds: float) -> None:
        """Wait until there is something to report, but no longer than `seconds`."""
        await wait(self._report_due, seconds)
        self._report_due.clear()


@dataclass(frozen=True, kw_only=True)
class Context:
    """One peer's surroundings.

    Attributes:
        own: this peer's record, of which the block, the endpoints and the certificate are used.
        peers: gives the directory's last known view of a block.
        endpoints: gives this peer's present endpoints, if those in `own` may become out of date.
        turns: decide which peers may download from this one now; None if all may at the same time.
        own_block: gives another block that this process serves; None if it does not serve that one.
        sign: signs the block's tally with this peer's key; None if it has none.
        known_amendments: the timeline that the block's weights follow; None if nothing else follows one.
    """

    config: RunConfig
    own: PeerRecord
    peers: Callable[[Block], Sequence[PeerRecord]]
    transport: Transport
    clock: Clock
    timing: Timing = field(default_factory=Timing)
    events: Events = field(default_factory=Events)
    tasks: Tasks = field(default_factory=Tasks)
    endpoints: Callable[[], Sequence[str]] | None = None
    waits: Waits = field(default_factory=Waits)
    turns: Turns | None = None
    own_block: Callable[[Block], OwnBlock | None] = lambda _: None
    sign: Sign | None = None
    known_amendments: Timeline | None = None

    @cached_property
    def timeline(self) -> Timeline:
        return self.known_amendments or Timeline(self.config)

    @cached_property
    def changes(self) -> Changes:
        return Changes(self.clock)

    @property
    def own_id(self) -> PeerId:
        return PeerId(self.own.peer_id)

    @property
    def present(self) -> PeerRecord:
        endpoints = tuple(self.endpoints()) if self.endpoints is not None else self.own.endpoints
        if endpoints == self.own.endpoints:
            return self.own
        return self.own.model_copy(update={"endpoint": endpoints[0], "other_endpoints": endpoints[1:]})

    @property
    def other_blocks(self) -> RunRounds:
        blocks = set(self.config.blocks) - {self.own.block}
        return RunRounds.of(
            {block: [peer.round for peer in self.peers(block) if peer.state is PeerState.SERVING] for block in blocks}
        )

    @property
    def address(self) -> Address:
        return self.address_of(self.own.block)

    def address_of(self, block: Block) -> Address:
        return address_of(self.config.run_id, block)
