"""Scripted faults: one fault at a chosen moment of a round, from which the group has to recover.

Used by the tests of faults. A trial commits one round without faults. In the next round it causes a fault at a moment
that is named after its event. Then it repairs what can be repaired, and goes on feeding microbatches. It ends when all
living peers have committed a round. It runs in virtual time.
"""

import asyncio
import contextvars
import itertools
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from swarm.errors import PeerUnavailable
from tests.averaging.doubles import Network, Peer, peer_id, until
from tests.averaging.fake_stage import make_config
from tests.averaging.witness import Testimony, WitnessStage, check_same_step
from tests.support.virtual_time import PROCESS, virtual_loop

ROUND_MICROBATCHES = 6
TICK_SECONDS = 0.05
TICKS_PER_FEED = 4
PATIENCE_SECONDS = 30.0
AVOIDED_SECONDS = 8.0
"""If the first fault has not happened after this time, it never will, because the second fault has killed its
victim."""
STANDSTILL_SECONDS = 3.0


class Kind(StrEnum):
    """The kinds of faults."""

    KILL = "kill"
    """The victim is gone for good."""
    FREEZE = "freeze"
    """The victim does nothing for a while, as after SIGSTOP."""
    TAKEOVER = "takeover"
    """The victim is frozen until others have committed a round without it; then its messages arrive."""
    PARTITION = "partition"
    """For a while, no message reaches the victim, and none of its own arrives."""
    REFUSE = "refuse"
    """For a while connections to and from the victim break at once."""
    LOSE = "lose"
    """This message is lost. Its sender gets no error."""
    BREAK = "break"
    """This message is lost, and its sender knows at once."""
    DELAY = "delay"
    """This message is late, but in time."""
    OUTLIVE = "outlive"
    """This message arrives after its sender gave up."""


OF_MESSAGE = (Kind.LOSE, Kind.BREAK, Kind.DELAY, Kind.OUTLIVE)


@dataclass(frozen=True)
class Event:
    """A moment of a round: the n-th time that something is about to happen, or has happened."""

    name: str
    source: int
    target: int
    moment: str
    nth: int

    @property
    def is_message(self) -> bool:
        """Whether the event is a message between two peers, and not something inside one peer."""
        return self.source != self.target

    def __str__(self) -> str:
        return f"{self.moment} {self.name} {self.source}-{self.target} #{self.nth}"


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, its moment, its victim, and how long it lasts."""

    kind: Kind
    event: Event
    victim: int = 0
    seconds: float = 1.2

    def __str__(self) -> str:
        return f"{self.kind} {self.victim or ''} {self.event}"


@dataclass(frozen=True)
class Scenario:
    """The group in which faults happen, or one group for each stage."""

    size: int
    """The number of members of each stage; they are numbered from 1, stage by stage."""
    setting: str = "synchronous"
    quorum: str = "available"
    codec: str = "fp32"
    num_stages: int = 1

    @property
    def numbers(self) -> range:
        """The numbers of all peers."""
        return range(1, self.num_stages * self.size + 1)

    def stage_of(self, number: int) -> int:
        """The stage that a peer serves."""
        return (number - 1) // self.size

    @property
    def is_synchronous(self) -> bool:
        """Whether the setting is synchronous, so that a round is made of certain microbatches."""
        return self.setting == "synchronous"


@dataclass
class Trial:
    """One run of a scenario with some faults. `events` has the moments at which faults could happen."""

    scenario: Scenario
    faults: tuple[Fault, ...] = ()
    events: list[Event] = field(default_factory=list)
    stood_still: bool = False
    """Whether less than a majority of the last members is alive, so that the group must not go on."""
    was_overtaken: bool = False
    """Whether others committed a round while a member was frozen."""

    def __post_init__(self) -> None:
        config = make_config(
            self.scenario.setting, microbatches=ROUND_MICROBATCHES, codec=self.scenario.codec,
            quorum=self.scenario.quorum, stages=self.scenario.num_stages,
        )  # fmt: skip
        self.network = Network(config, WitnessStage)
        self.network.before, self.network.after = self._before, self._after
        self.network.delivers_late = any(fault.kind in (Kind.OUTLIVE, Kind.TAKEOVER) for fault in self.faults)
        self._armed = False
        self._counts: Counter[tuple[str, int, int, str]] = Counter()
        self._waiting = list(self.faults)
        self._lasting: dict[Fault, float] = {}
        """The faults that last, and when each ends."""
        self._changed = asyncio.Event()
        self._fresh = itertools.count()

    # -- the course of events ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until the group has recovered, or cannot recover any more. Raises AssertionError for a broken promise."""
        for number in self.scenario.numbers:
            context = contextvars.copy_context()
            context.run(PROCESS.set, number)
            stage = self._stage(context.run(self.network.add, number, self.scenario.stage_of(number)))
            stage.gate = lambda name, moment, number=number: self._at_stage(number, name, moment)  # type: ignore[misc]
        try:
            await self._undisturbed_round(0)
            self._armed = True
            self._share_out(1)
            await asyncio.sleep(2 * TICK_SECONDS)
            if self.faults:
                await self._go_on()
        finally:
            await self.network.stop()
        self._check()

    async def _undisturbed_round(self, round_number: int) -> None:
        await until(lambda: self._all_stand_at(round_number))
        self._share_out(round_number)
        await until(lambda: self._all_stand_at(round_number + 1))

    def _all_stand_at(self, round_number: int) -> bool:
        firsts = self.scenario.numbers[:: self.scenario.size]
        views = [self._peer(number).averager.view() for number in firsts]
        return all(view.round == round_number and len(view.progress) == self.scenario.size for view in views)

    async def _go_on(self) -> None:
        """Feed what is missing until all living peers have committed a round together."""
        healed_at: int | None = None
        majority_at = 0.0
        for tick in range(int(PATIENCE_SECONDS / TICK_SECONDS)):
            if tick % TICKS_PER_FEED == 0:
                self._feed()
            self._mend()
            await asyncio.sleep(TICK_SECONDS)
            waits = self.faults[0] in self._waiting and tick * TICK_SECONDS < AVOIDED_SECONDS
            if self._lasting or waits:
                continue
            groups = self.groups
            latest = max(peer.stage.round for peer in self.living)
            if healed_at is None:
                healed_at, majority_at = latest, self._now
            if all(group.together_since(healed_at) for group in groups):
                return
            if self.scenario.quorum == "available" or all(group.has_majority for group in groups):
                majority_at = self._now
            elif self._now >= majority_at + STANDSTILL_SECONDS:
                self.stood_still = True
                return
        raise AssertionError(self._describe())

    # -- microbatches ------------------------------------------------------------------------------------------------

    def _share_out(self, round_number: int) -> None:
        start = round_number * ROUND_MICROBATCHES
        for index in range(start, start + ROUND_MICROBATCHES):
            for number in self.scenario.numbers[index % self.scenario.size :: self.scenario.size]:
                self._peer(number).stage.learn(index if self.scenario.is_synchronous else self._new())

    def _feed(self) -> None:
        """Let each peer that believes that it leads hand out the microbatches that its members lack, as stage 0 and its
        trainers do."""
        for leader in self.awake:
            view = leader.averager.view()
            if not view.is_leader or view.complete:
                continue
            takers = [peer for peer in self.awake if peer.record.peer_id in view.progress and not peer.stage.closed]
            takers = [peer for peer in takers if peer.stage.round == view.round]
            start = view.round * ROUND_MICROBATCHES
            wanted = [i for i in range(start, start + ROUND_MICROBATCHES) if i not in view.shown]
            for nth, taker in enumerate(takers):
                if not self.scenario.is_synchronous:
                    taker.stage.learn(self._new())
                else:
                    taker.stage.learn(*wanted[nth :: len(takers)])

    def _new(self) -> int:
        return next(self._fresh)

    # -- faults ------------------------------------------------------------------------------------------------------

    async def _before(self, name: str, source: int, target: int) -> None:
        await self._at(name, source, target, "before")

    async def _after(self, name: str, source: int, target: int) -> None:
        await self._at(name, source, target, "after")

    async def _at_stage(self, number: int, name: str, moment: str) -> None:
        await self._at(name, number, number, moment)

    async def _at(self, name: str, source: int, target: int, moment: str) -> None:
        if self._armed:
            key = name, source, target, moment
            event = Event(*key, self._counts[key])
            self._counts[key] += 1
            self.events.append(event)
            for fault in [fault for fault in self._waiting if fault.event == event]:
                self._waiting.remove(fault)
                await self._begin(fault)
        while self._is_parted(Kind.PARTITION, source, target):
            await self._changed.wait()
        if self._is_parted(Kind.REFUSE, source, target):
            raise PeerUnavailable("the connection broke", is_unreachable=True)

    async def _begin(self, fault: Fault) -> None:
        match fault.kind:
            case Kind.LOSE:
                await asyncio.Event().wait()
            case Kind.BREAK:
                raise PeerUnavailable("lost", is_unreachable=True)
            case Kind.DELAY:
                await asyncio.sleep(0.2)
            case Kind.OUTLIVE:
                await asyncio.sleep(fault.seconds)
            case Kind.KILL if not self._peer(fault.victim).dead.is_set():
                self.network.kill(fault.victim)
                if fault.victim in (fault.event.source, fault.event.target):
                    await asyncio.Event().wait()
            case Kind.PARTITION | Kind.REFUSE:
                self._lasting[fault] = self._now + fault.seconds
            case Kind.FREEZE | Kind.TAKEOVER:
                self._lasting[fault] = self._now + fault.seconds
                self.network.freeze(fault.victim)
                virtual_loop().stop_process(fault.victim)
                await asyncio.sleep(0)

    def _mend(self) -> None:
        for fault, ends_at in list(self._lasting.items()):
            if fault.kind is Kind.TAKEOVER:
                frozen = self._peer(fault.victim)
                others = [peer.stage for peer in self.awake if peer.record.stage == frozen.record.stage]
                overtaken = any(stage.round > frozen.stage.round for stage in others)
                self.was_overtaken |= overtaken
                is_over = overtaken or self._now >= ends_at + 2.0
            else:
                is_over = self._now >= ends_at
            if is_over:
                del self._lasting[fault]
                if fault.kind in (Kind.FREEZE, Kind.TAKEOVER):
                    self.network.thaw(fault.victim)
                    virtual_loop().continue_process(fault.victim)
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_parted(self, kind: Kind, source: int, target: int) -> bool:
        victims = [fault.victim for fault in self._lasting if fault.kind is kind]
        return source != target and any(victim in (source, target) for victim in victims)

    # -- readings ----------------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Peer]:
        """The peers that were not killed."""
        return [peer for peer in self.network.peers.values() if not peer.dead.is_set()]

    @property
    def awake(self) -> list[Peer]:
        """The living peers that are not frozen."""
        return [peer for peer in self.living if peer.thawed.is_set()]

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def groups(self) -> list[Testimony]:
        """For each stage, the record of what its members have done."""
        living = frozenset(peer.record.peer_id for peer in self.living)
        stages: list[dict[str, WitnessStage]] = [{} for _ in range(self.scenario.num_stages)]
        for own_id, peer in self.network.peers.items():
            stages[peer.record.stage][own_id] = self._stage(peer)
        return [Testimony(group, living & group.keys()) for group in stages]

    def _peer(self, number: int) -> Peer:
        return self.network.peers[peer_id(number)]

    def _stage(self, peer: Peer) -> WitnessStage:
        assert isinstance(peer.stage, WitnessStage)
        return peer.stage

    def _check(self) -> None:
        groups = self.groups
        for group in groups:
            group.check(round_microbatches=ROUND_MICROBATCHES if self.scenario.is_synchronous else None)
            if self.scenario.quorum == "majority":
                assert not group.forks
            if not self.stood_still:
                assert len({group.stages[own_id].digest for own_id in group.living}) == 1
            if not self.scenario.is_synchronous:
                group.check_nothing_lost()
        if self.scenario.is_synchronous and not any(group.forks for group in groups):
            check_same_step(groups)

    def _describe(self) -> str:
        lines = [f"{self.scenario} {[str(fault) for fault in self.faults]}: no round of all for {PATIENCE_SECONDS} s"]
        for peer in self.network.peers.values():
            view = peer.averager.view()
            lines.append(
                f"{peer.number}: dead={peer.dead.is_set()} round={peer.stage.round} lineage={peer.stage.lineage[:8]} "
                f"closed={peer.stage.closed} indices={sorted(peer.stage.indices)} leader={view.leader_id[-4:]} "
                f"members={[p[-4:] for p in view.progress]} {peer.averager.counters()}"
            )
        return "\n".join(lines)
