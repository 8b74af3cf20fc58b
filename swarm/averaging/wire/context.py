"""What every part of one peer's averaging gets: the peer, configuration, clock and directory, and who else is there.

With the addresses in messages a group goes on when the directory is out of reach. The number of peers is bounded, so a
peer that sends messages in the name of invented peers does not fill the memory.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.timing import Timing
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

MOST_UNLISTED = 64
"""The most remembered peers that the directory does not list. Far fewer peers join within the seconds that a record
takes to spread."""
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

    def starts(self) -> Mapping[str, str]:
        """By peer of this block, what changes when the peer's process begins anew, or comes back from another block."""
        return {peer.peer_id: f"{peer.nonce} {peer.moves}" for peer in self.peers(self.own.block) if peer.nonce}

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

    def serving(self, block: Block) -> dict[str, PeerRecord]:
        """The peers that serve a block, by the directory, in the order of their ids."""
        serving = (record for record in self.peers(block) if record.state is PeerState.SERVING)
        return {record.peer_id: record for record in sorted(serving, key=lambda record: record.peer_id)}

    @property
    def other_blocks(self) -> RunRounds:
        blocks = set(self.config.blocks) - {self.own.block}
        return RunRounds.of({block: [peer.round for peer in self.serving(block).values()] for block in blocks})

    @property
    def address(self) -> Address:
        return self.address_of(self.own.block)

    def address_of(self, block: Block) -> Address:
        return address_of(self.config.run_id, block)


class Contacts:
    def __init__(self, context: Context) -> None:
        self._own_id = context.own_id
        self._directory = partial(context.peers, context.own.block)
        self._clock = context.clock
        self._timing = context.timing
        self._heard_of: dict[PeerId, tuple[PeerRecord, float]] = {}
        """The record of each peer by its own messages, and the time of its last sign of life."""
        self._listed_at: dict[str, float] = {}
        """When each peer was last seen in the directory."""

    # -- news --------------------------------------------------------------------------------------------------------

    def add(self, record: PeerRecord) -> bool:
        """Remember a peer that gave a sign of life. Returns whether other peers were forgotten to make room."""
        peer_id = PeerId(record.peer_id)
        if peer_id == self._own_id:
            return False
        # Making room is slow, so it is done only for newcomers: reports come many times a second.
        is_new = peer_id not in self._heard_of
        num_forgotten = self._make_room(peer_id) if is_new and len(self._heard_of) >= MOST_UNLISTED else 0
        self._heard_of[peer_id] = record, self._clock.monotonic()
        return num_forgotten > 0

    def _make_room(self, peer_id: PeerId) -> int:
        """Forget the unlisted peers with the oldest signs of life, until there is room for one more. Returns how
        many."""
        self._see_listed()
        unlisted = sorted(self._heard_of.keys() - self._listed_at.keys(), key=lambda peer: self._heard_of[peer][1])
        num_needless = len(unlisted) + (peer_id not in self._listed_at) - MOST_UNLISTED
        needless = unlisted[: max(0, num_needless)]
        for peer in needless:
            del self._heard_of[peer]
        return len(needless)

    def answered(self, peer_id: PeerId) -> None:
        """Note a peer's sign of life. (A leader sends no reports, only answers.)"""
        if (known := self._heard_of.get(peer_id)) is not None:
            self._heard_of[peer_id] = known[0], self._clock.monotonic()

    def forget_the_gone(self) -> None:
        """Forget peers that gave no sign of life for long, because over weeks they would become many."""
        self._see_listed()
        oldest = self._clock.monotonic() - self._timing.forget_seconds
        self._heard_of = {peer: contact for peer, contact in self._heard_of.items() if contact[1] >= oldest}

    def _see_listed(self) -> None:
        """Remember which peers the directory lists, so that they count as listed while the directory is out of
        reach."""
        now = self._clock.monotonic()
        oldest = now - self._timing.forget_seconds
        self._listed_at = {peer: at for peer, at in self._listed_at.items() if at >= oldest}
        self._listed_at |= dict.fromkeys((record.peer_id for record in self._directory()), now)

    # -- questions ---------------------------------------------------------------------------------------------------

    def all(self) -> dict[PeerId, PeerRecord]:
        known = {peer_id: record for peer_id, (record, _) in self._heard_of.items()}
        known |= {PeerId(record.peer_id): record for record in self._directory()}
        known.pop(self._own_id, None)
        return known

    def serving(self) -> dict[PeerId, PeerRecord]:
        """The peers that announce that they serve, and those that gave a sign of life lately and do not announce that
        they leave."""
        serving = {peer_id: self._heard_of[peer_id][0] for peer_id in self.recent()}
        for record in self._directory():
            if record.state is PeerState.SERVING:
                serving[PeerId(record.peer_id)] = record
            elif record.state is PeerState.LEAVING:
                serving.pop(PeerId(record.peer_id), None)
        serving.pop(self._own_id, None)
        return serving

    def recent(self) -> Set[PeerId]:
        oldest = self._clock.monotonic() - self._timing.fresh_seconds
        return {peer_id for peer_id, (_, heard_at) in self._heard_of.items() if heard_at >= oldest}

    def is_recent(self, peer_id: PeerId) -> bool:
        """Whether the peer gave a sign of life lately. Fast, because it looks at one peer only."""
        known = self._heard_of.get(peer_id)
        return known is not None and known[1] >= self._clock.monotonic() - self._timing.fresh_seconds

    def record(self, peer_id: PeerId) -> PeerRecord | None:
        """A peer's record; None if it is not known."""
        return self.all().get(peer_id)

    def records(self, peer_ids: Iterable[PeerId]) -> dict[PeerId, PeerRecord]:
        known = self.all()
        return {peer_id: known[peer_id] for peer_id in peer_ids if peer_id in known}

    def standings_announced(self) -> dict[PeerId, Standing]:
        return {
            PeerId(record.peer_id): Standing(run_samples=record.samples, round=record.round, lineage=record.lineage)
            for record in self._directory()
            if record.peer_id != self._own_id
        }
