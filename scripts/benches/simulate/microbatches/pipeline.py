"""A pipeline of simulated peers, which come and die, and what its senders know of them."""

import random
from collections.abc import Callable, Sequence

from scripts.benches.simulate.microbatches.choosers import Chooser
from scripts.benches.simulate.microbatches.machine import Machine, SimulatedPeer
from scripts.benches.simulate.timeline import Timeline
from swarm.types import PeerId, PeerRecord


class View:
    """What one sender knows: its way to choose a peer, and its credits."""

    def __init__(self, chooser: Chooser, name: str = "trainer") -> None:
        self.chooser = chooser
        self.name = name  # The name by which peers tell this sender from others
        self.credits: set[PeerId] = set()  # Peers whose last answer granted room for one more microbatch


class SimulatedPipeline:
    """The peers of all stages. Each has a view of its own, if there is a way to make one; otherwise the view that a
    microbatch began with chooses at all stages, as SWARM's trainers do."""

    def __init__(
        self, timeline: Timeline, rng: random.Random, *, num_stages: int, num_samples: int, max_in_flight: int,
        largest_in_flight: int = 0, make_view: Callable[[Machine], View] | None = None,
    ) -> None:  # fmt: skip
        self.timeline = timeline
        self.num_stages = num_stages
        self.num_samples = num_samples
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.num_reroutes = 0
        self._rng = rng
        self._max_in_flight = max_in_flight
        self._largest_in_flight = largest_in_flight
        self._make_view = make_view
        self._views: dict[PeerId, View] = {}  # The views of the peers that hand microbatches on
        self._listed: dict[int, list[PeerRecord]] = {}
        """The directory's records of each stage, which newcomers read as well."""

    def start(self, machine: Machine) -> None:
        self.peers[machine.peer_id] = SimulatedPeer(
            machine, self.timeline, self._rng, num_samples=self.num_samples, max_in_flight=self._max_in_flight,
            largest_in_flight=self._largest_in_flight,
        )  # fmt: skip
        if self._make_view is not None and machine.stage + 1 < self.num_stages:
            self._views[machine.peer_id] = view = self._make_view(machine)
            view.chooser.update(machine.stage + 1, self._listed.get(machine.stage + 1, []))

    def kill(self, peer_id: PeerId) -> None:
        self._views.pop(peer_id, None)
        self.peers.pop(peer_id).die()

    def announce(self, views: Sequence[View]) -> None:
        """Let the senders with these views, and all peers that hand on, read the directory."""
        readers: dict[View, range] = dict.fromkeys(views, range(1 if self._make_view else self.num_stages))
        for peer_id, view in self._views.items():
            stage = self.peers[peer_id].machine.stage + 1
            readers[view] = range(stage, stage + 1)
        self._listed = {stage: [] for stage in range(self.num_stages)}
        for peer in self.peers.values():
            self._listed[peer.machine.stage].append(peer.record())
        for view, stages in readers.items():
            for stage in stages:
                view.chooser.update(stage, self._listed[stage])

    def view_of(self, peer: SimulatedPeer, began_with: View) -> View:
        return self._views.get(peer.peer_id, began_with)

    def rerouted(self) -> None:
        self.num_reroutes += 1
