"""A pipeline of simulated peers: one microbatch after another goes through its stages and comes back.

Used by the study `routing` and by `validate`. A microbatch is handed on as in swarm.hop: a peer is chosen, and asked
unless it gave a credit; if it is busy or fails, it is left alone and another one is chosen. Messages, and the time that
they take, are simulated; choices, slots and queues are the real classes', and so are the hop's pauses. The simulation
is simpler than the real thing: a microbatch whose peer failed is also computed again further downstream, and nothing is
ever lost for good.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

from swarm.errors import Overloaded
from swarm.hop.candidates import PAUSE_SECONDS, SHORTEST_WAIT_SECONDS
from swarm.hop.retries import HopLimits, most_sent_on
from swarm.simulation.choosers.chooser import Answer, Chooser
from swarm.simulation.machine import Machine, SimulatedPeer
from swarm.simulation.timeline import Timeline
from swarm.types import PeerId, PeerRecord

NOTICE_SECONDS = 1.0
"""The time from a peer's death until the senders of its microbatches know of it."""


class View:
    """What one sender knows: its way to choose a peer, and its credits."""

    def __init__(self, chooser: Chooser, name: str = "trainer") -> None:
        self.chooser = chooser
        self.name = name
        """The name by which peers tell this sender from others."""
        self.credits: set[PeerId] = set()
        """Peers whose last answer granted room for one more microbatch."""


class SimulatedPipeline:
    """The peers of all stages.

    Args:
        make_view: makes a view for each peer that starts, by which the peer chooses the next peer, as in this project.
            Without it the view that a microbatch began with chooses at all stages, as SWARM's trainers do.

    Attributes:
        peers: the live peers.
        num_reroutes: how many times a microbatch went to another peer because one failed.
    """

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        *,
        num_stages: int,
        num_samples: int,
        max_in_flight: int,
        largest_in_flight: int = 0,
        make_view: Callable[[Machine], View] | None = None,
    ) -> None:
        self.timeline = timeline
        self.num_stages = num_stages
        self.num_samples = num_samples
        self.peers: dict[PeerId, SimulatedPeer] = {}
        self.num_reroutes = 0
        self._rng = rng
        self._max_in_flight = max_in_flight
        self._largest_in_flight = largest_in_flight
        self._hops: dict[PeerId, dict[_Hop, None]] = {}
        """The hops that wait for each peer."""
        self._make_view = make_view
        self._views: dict[PeerId, View] = {}
        """The views of the peers that hand microbatches on."""
        self._listed: dict[int, list[PeerRecord]] = {}
        """The directory's records of each stage, which newcomers read as well."""

    def start(self, machine: Machine) -> None:
        """Add a peer that begins to serve."""
        self.peers[machine.peer_id] = SimulatedPeer(
            machine,
            self.timeline,
            self._rng,
            num_samples=self.num_samples,
            max_in_flight=self._max_in_flight,
            largest_in_flight=self._largest_in_flight,
        )
        self._hops[machine.peer_id] = {}
        if self._make_view is not None and machine.stage + 1 < self.num_stages:
            self._views[machine.peer_id] = view = self._make_view(machine)
            view.chooser.update(machine.stage + 1, self._listed.get(machine.stage + 1, []))

    def kill(self, peer_id: PeerId) -> None:
        """Remove a peer, with all that it was working on."""
        self.peers.pop(peer_id).is_gone = True
        self._views.pop(peer_id, None)
        for hop in self._hops.pop(peer_id):
            hop.lost(peer_id)

    def announce(self, views: Sequence[View]) -> None:
        """Have the senders with these views, and all peers that hand on, read the directory."""
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
        """The view by which the next peer is chosen for a microbatch that is at `peer`."""
        return self._views.get(peer.peer_id, began_with)

    def train(self, view: View, then: Callable[[int], object]) -> None:
        """Send a microbatch through all stages; `then` is told how many peers of the first stage were busy."""
        _Hop(self, view, 0, None, lambda hop: then(hop.num_busy)).attempt()

    def waits(self, hop: "_Hop", peer_id: PeerId) -> None:
        """Note that a hop waits for a peer, and has to be told if the peer dies."""
        self._hops[peer_id][hop] = None

    def waits_no_more(self, hop: "_Hop", peer_id: PeerId) -> None:
        """Note that the peer has answered the hop."""
        self._hops[peer_id].pop(hop, None)


class _Hop:
    """One microbatch on its way to one stage and back."""

    def __init__(
        self,
        pipeline: SimulatedPipeline,
        view: View,
        stage: int,
        origin: SimulatedPeer | None,
        then: Callable[["_Hop"], object],
    ) -> None:
        self.num_busy = 0
        self._pipeline = pipeline
        self._timeline = pipeline.timeline
        self._view = view
        self._credits = view.credits
        self._stage = stage
        self._origin = origin
        self._caller = view.name if origin is None else origin.peer_id
        self._then = then
        self._is_refused = False
        self._has_others = False
        self._num_sent_on = 0
        self._excluded: dict[PeerId, float] = {}
        self._attempt = 0
        """The number of the present attempt. Actions that were planned for an earlier attempt are dropped."""

    def attempt(self) -> None:
        """Choose a peer and ask it."""
        if self._origin is not None and self._origin.is_gone:
            return
        self._attempt += 1
        now = self._timeline.monotonic()
        self._excluded = {peer: until for peer, until in self._excluded.items() if until > now}
        peer_id = self._view.chooser.choose(self._stage, self._pipeline.num_samples, self._excluded.keys())
        if peer_id is None:
            waits = min([HopLimits.retry_seconds, *(until - now for until in self._excluded.values())])
            self._timeline.after(max(waits, SHORTEST_WAIT_SECONDS), self.attempt)
            return
        self._sent_at = now
        self._busy_seconds = self._downstream_seconds = 0.0
        self._is_eager = peer_id in self._credits
        self._credits.discard(peer_id)
        self._has_others = self._num_sent_on < most_sent_on(self._view.chooser.num_asked_around(self._stage))
        peer = self._pipeline.peers.get(peer_id)
        if peer is None:
            # The peer has died, and nothing answers there any more.
            self._timeline.after(NOTICE_SECONDS, partial(self._failed, peer_id, self._attempt, is_gone=True))
            return
        self._peer = peer
        self._one_way = (peer.machine.link_seconds + (self._origin.machine.link_seconds if self._origin else 0.0)) / 2
        self._pipeline.waits(self, peer_id)
        self._after(self._one_way, self._asked)

    def lost(self, peer_id: PeerId) -> None:
        """Note that the peer that this hop waits for has died."""
        self._attempt += 1
        self._timeline.after(NOTICE_SECONDS, partial(self._failed, peer_id, self._attempt, is_gone=False))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action later, unless the peer dies first."""
        self._timeline.after(seconds, partial(self._if_still, self._attempt, action))

    def _if_still(self, attempt: int, action: Callable[[], None]) -> None:
        if attempt == self._attempt:
            action()

    def _failed(self, peer_id: PeerId, attempt: int, *, is_gone: bool) -> None:
        if attempt != self._attempt or (self._origin is not None and self._origin.is_gone):
            return
        self._pipeline.num_reroutes += 1
        self._view.chooser.failed(peer_id, is_gone=is_gone)
        self._excluded[peer_id] = self._timeline.monotonic() + PAUSE_SECONDS
        self.attempt()

    # -- at the peer -------------------------------------------------------------------------------------------------

    def _asked(self) -> None:
        try:
            self._peer.admit(self._caller, has_others=self._has_others)
        except Overloaded as busy:
            self._after(self._one_way, partial(self._refused, busy.retry_after_seconds))
            return
        self._set_refused(False)
        # Without a credit, "accepted" goes back before the tensors come.
        self._after(0.0 if self._is_eager else 2 * self._one_way, self._begin)

    def _begin(self) -> None:
        attempt = self._attempt
        if self._stage + 1 == self._pipeline.num_stages:
            self._peer.both(lambda seconds: self._if_still(attempt, partial(self._done, seconds)))
            return
        self._age = self._peer.begin(lambda seconds: self._if_still(attempt, partial(self._forwarded, seconds)))

    def _forwarded(self, seconds: float) -> None:
        self._busy_seconds = seconds
        attempt, since = self._attempt, self._timeline.monotonic()

        def returned(_: _Hop) -> None:
            self._downstream_seconds = self._timeline.monotonic() - since
            self._if_still(attempt, self._returned)

        view = self._pipeline.view_of(self._peer, self._view)
        _Hop(self._pipeline, view, self._stage + 1, self._peer, returned).attempt()

    def _returned(self) -> None:
        attempt = self._attempt
        self._peer.end(self._age, lambda seconds: self._if_still(attempt, partial(self._done, seconds)))

    def _done(self, seconds: float) -> None:
        self._busy_seconds += seconds
        self._peer.measured(self._busy_seconds)
        # The answer's credits are decided before the microbatch's own slot is free.
        num_credits = self._peer.grants(has_others=self._has_others)
        self._peer.give_back(self._caller)
        self._after(self._one_way, partial(self._answered, self._peer.queue_length, num_credits))

    # -- the reply ---------------------------------------------------------------------------------------------------

    def _refused(self, retry_after_seconds: float) -> None:
        peer_id = self._peer.peer_id
        self._pipeline.waits_no_more(self, peer_id)
        if self._has_others:
            self._num_sent_on += 1
        else:
            self.num_busy += 1
            self._set_refused(True)
        self._view.chooser.busy(peer_id, retry_after_seconds)
        self._excluded[peer_id] = self._timeline.monotonic() + retry_after_seconds
        self.attempt()

    def _set_refused(self, is_refused: bool) -> None:
        if self._origin is not None:
            self._origin.num_refused += is_refused - self._is_refused
        self._is_refused = is_refused

    def _answered(self, queue_length: int, num_credits: int) -> None:
        peer_id = self._peer.peer_id
        self._pipeline.waits_no_more(self, peer_id)
        if self._origin is not None and self._origin.is_gone:
            return
        if num_credits:
            self._credits.add(peer_id)
        self._view.chooser.succeeded(
            peer_id,
            Answer(
                num_samples=self._pipeline.num_samples,
                busy_seconds=self._busy_seconds,
                queue_length=queue_length,
                link_seconds=2 * self._one_way,
                call_seconds=self._timeline.monotonic() - self._sent_at - self._downstream_seconds,
            ),
        )
        self._then(self)
