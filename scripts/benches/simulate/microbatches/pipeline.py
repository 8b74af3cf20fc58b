"""A pipeline of simulated peers, which come and die, and what its senders know of them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from scripts.benches.simulate.microbatches.choosers import NUM_SAMPLES, Chooser
from scripts.benches.simulate.microbatches.directory import Directory
from scripts.benches.simulate.timeline import Timeline
from swarm.routing.throughput import MovingAverage
from swarm.stage.admission import LARGEST_NUM_SLOTS, SlotCount, Slots
from swarm.stage.runtime import Priority, TaskQueue
from swarm.types import PeerId, PeerRecord, PeerState

QUEUE_CAPACITY = 1024
BACKWARD_SHARE = 2 / 3  # The share of a microbatch's computing that its backward takes
JITTER = 0.1  # By which share a single computation takes longer or shorter at most


@dataclass(frozen=True, kw_only=True)
class Machine:
    peer_id: PeerId
    stage: int
    busy_seconds: float  # How long the peer computes for one microbatch, forward and backward
    link_seconds: float  # The round-trip time to any other peer, half of it each way


class Waiting(Protocol):
    def lost(self) -> None: ...


class SimulatedPeer:
    """A machine from its start to its death; when it comes back, there is another SimulatedPeer."""

    def __init__(self, machine: Machine, timeline: Timeline, rng: random.Random, *, max_in_flight: int) -> None:
        self.machine = machine
        self.is_gone = False
        self._timeline = timeline
        self._rng = rng
        self._queue = TaskQueue(QUEUE_CAPACITY)
        self._slot_count = SlotCount(max_in_flight, LARGEST_NUM_SLOTS, lambda: self.queue_length)
        self._slots = Slots(self._slot_count, timeline)
        self._seconds_per_sample = MovingAverage(0.1)
        self._is_running = False
        self._num_begun = 0
        self._waiting: dict[Waiting, None] = {}
        self._stalled: set[object] = set()
        self._endpoint = f"{machine.peer_id[:8]}:{rng.randrange(1, 65536)}"

    @property
    def peer_id(self) -> PeerId:
        return self.machine.peer_id

    @property
    def queue_length(self) -> int:
        return len(self._queue) + self._is_running

    def grants(self, *, has_others: bool = False) -> int:
        return self._slots.grants(has_others=has_others)

    def record(self) -> PeerRecord:
        seconds = self._seconds_per_sample.value
        return PeerRecord(
            peer_id=self.peer_id, announced_at=self._timeline.time(), stage=self.machine.stage, endpoint=self._endpoint,
            state=PeerState.SERVING, queue_length=self.queue_length,
            samples_per_second=1.0 / seconds if seconds else 0.0,
        )  # fmt: skip

    # -- life and death ----------------------------------------------------------------------------------------------

    def waits(self, caller: Waiting) -> None:
        self._waiting[caller] = None

    def waits_no_more(self, caller: Waiting) -> None:
        self._waiting.pop(caller, None)

    def die(self) -> None:
        self.is_gone = True
        waiting, self._waiting = self._waiting, {}
        self._stalled.clear()
        for caller in waiting:
            caller.lost()

    # -- slots -------------------------------------------------------------------------------------------------------

    def admit(self, caller: str, *, has_others: bool = False) -> None:
        """Take a slot for a caller's microbatch. Raises Overloaded if there is none."""
        seconds = (self._seconds_per_sample.value or 0.0) * NUM_SAMPLES
        idle = self._slot_count.lacks_work and not self._stalled
        self._slots.take(caller, busy_seconds=seconds, idle=idle, has_others=has_others)

    def give_back(self, caller: str) -> None:
        self._slots.give_back(caller)

    def stalls(self, microbatch: object) -> None:
        """Note that a microbatch waits here because all peers of the next stage that were asked are busy."""
        if not self.is_gone:
            self._stalled.add(microbatch)

    def goes_on(self, microbatch: object) -> None:
        self._stalled.discard(microbatch)

    # -- computing ---------------------------------------------------------------------------------------------------

    def begin(self, then: Callable[[float], None]) -> int:
        """Compute a forward, and return the microbatch's age here. `then` is called with the seconds that it took."""
        age = self._num_begun
        self._num_begun += 1
        self._submit(Priority.FORWARD, age, (1 - BACKWARD_SHARE) * self.machine.busy_seconds, then)
        return age

    def end(self, age: int, then: Callable[[float], None]) -> None:
        self._submit(Priority.BACKWARD, age, BACKWARD_SHARE * self.machine.busy_seconds, then)

    def both(self, then: Callable[[float], None]) -> None:
        self._num_begun += 1
        self._submit(Priority.FORWARD, self._num_begun - 1, self.machine.busy_seconds, then)

    def measured(self, busy_seconds: float) -> None:
        self._seconds_per_sample.observe(busy_seconds / NUM_SAMPLES)

    def _submit(self, priority: Priority, age: int, seconds: float, then: Callable[[float], None]) -> None:
        seconds *= 1.0 + JITTER * self._rng.uniform(-1.0, 1.0)
        self._queue.push(partial(self._run, seconds, then), priority=priority, age=age)
        if not self._is_running:
            self._next()

    def _next(self) -> None:
        task = self._queue.pop()
        self._is_running = task is not None
        if task is not None:
            task.work()

    def _run(self, seconds: float, then: Callable[[float], None]) -> None:
        self._timeline.after(seconds, partial(self._done, seconds, then))

    def _done(self, seconds: float, then: Callable[[float], None]) -> None:
        if self.is_gone:
            return
        # As in a compute thread, the next task begins before any caller learns that this one has ended.
        self._next()
        then(seconds)


class View:
    """What one sender knows: its way to choose a peer, and its credits."""

    def __init__(self, chooser: Chooser, name: str = "trainer", *, knows_all: bool = False) -> None:
        """With `knows_all` the sender knows all peers, and otherwise those that swarm.dht samples for it."""
        self.chooser = chooser
        self.knows_all = knows_all
        self.name = name  # The name by which peers tell this sender from others
        self.under_way = 0  # Microbatches that this sender keeps in flight, as far as that is more than usual
        self.credits: set[PeerId] = set()  # Peers whose last answer granted room for one more microbatch


class SimulatedPipeline:
    """The peers of all stages. Each has a view of its own, if there is a way to make one; otherwise the view that a
    microbatch began with chooses at all stages, as SWARM's trainers do."""

    def __init__(
        self, timeline: Timeline, rng: random.Random, *, num_stages: int, make_view: Callable[[Machine], View] | None
    ) -> None:
        self.timeline = timeline
        self.num_stages = num_stages
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.num_reroutes = 0
        self._rng = rng
        self._make_view = make_view
        self._views: dict[PeerId, View] = {}  # The views of the peers that hand microbatches on
        self._directory = Directory(timeline, num_stages)

    def start(self, machine: Machine) -> None:
        peer = SimulatedPeer(machine, self.timeline, self._rng, max_in_flight=self.num_stages + 2)
        self.peers[machine.peer_id] = peer
        if self._make_view is not None and machine.stage + 1 < self.num_stages:
            self._views[machine.peer_id] = view = self._make_view(machine)
            self._read({view: range(machine.stage + 1, machine.stage + 2)})

    def kill(self, peer_id: PeerId) -> None:
        self._views.pop(peer_id, None)
        self.peers.pop(peer_id).die()

    def announce(self, views: Sequence[View]) -> None:
        """Let the senders with these views, and all peers that hand on, read the directory."""
        readers: dict[View, range] = dict.fromkeys(views, range(1 if self._make_view else self.num_stages))
        for peer_id, view in self._views.items():
            stage = self.peers[peer_id].machine.stage + 1
            readers[view] = range(stage, stage + 1)
        listed: dict[int, list[PeerRecord]] = {stage: [] for stage in range(self.num_stages)}
        for peer in self.peers.values():
            listed[peer.machine.stage].append(peer.record())
        for stage, records in listed.items():
            self._directory.update(stage, records)
        self._read(readers)

    def _read(self, readers: Mapping[View, range]) -> None:
        pairs = [(view, stage) for view, stages in readers.items() for stage in stages]
        samples = [(view.name, stage, view.under_way) for view, stage in pairs if not view.knows_all]
        rows = iter(self._directory.read(samples))
        for view, stage in pairs:
            view.chooser.update(stage, self._directory.all(stage) if view.knows_all else next(rows))

    def view_of(self, peer: SimulatedPeer, began_with: View) -> View:
        return self._views.get(peer.peer_id, began_with)
