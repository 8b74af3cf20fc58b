"""One microbatch on its way from stage to stage, and back, as in swarm.hop.

Messages, and the time that they take, are simulated; choices, slots, queues and the hop's pauses are the real ones. A
microbatch whose peer failed is computed again further downstream as well, and nothing is ever lost for good.
"""

from collections.abc import Callable
from functools import partial

from scripts.benches.simulate.microbatches.choosers import NUM_SAMPLES, Answer
from scripts.benches.simulate.microbatches.pipeline import SimulatedPeer, SimulatedPipeline, View
from swarm.errors import Overloaded
from swarm.hop.retries import PAUSE_SECONDS, SHORTEST_WAIT_SECONDS, HopLimits, most_sent_on
from swarm.types import PeerId

NOTICE_SECONDS = 1.0  # The time from a peer's death until the senders of its microbatches know of it


def train(pipeline: SimulatedPipeline, view: View, then: Callable[[], object]) -> None:
    """Send a microbatch through all stages. `then` is called once it is back."""
    _Hop(pipeline, view, 0, None, then).attempt()


class _Hop:
    """A microbatch's way to one stage and back, from a peer or (None) the trainer, until a peer has answered."""

    def __init__(
        self, pipeline: SimulatedPipeline, view: View, stage: int, origin: SimulatedPeer | None,
        then: Callable[[], object],
    ) -> None:  # fmt: skip
        self.pipeline = pipeline
        self.timeline = pipeline.timeline
        self.view = view
        self.stage = stage
        self.origin = origin
        self._then = then
        self._num_sent_on = 0
        self._excluded: dict[PeerId, float] = {}  # Until when each peer that was busy or failed is left alone

    @property
    def caller(self) -> str:
        return self.view.name if self.origin is None else self.origin.peer_id

    def attempt(self) -> None:
        if self._is_abandoned:
            return
        now = self.timeline.monotonic()
        self._excluded = {peer: until for peer, until in self._excluded.items() if until > now}
        peer_id = self.view.chooser.choose(self.stage, self._excluded.keys())
        if peer_id is None:
            waits = min([HopLimits.retry_seconds, *(until - now for until in self._excluded.values())])
            self.timeline.after(max(waits, SHORTEST_WAIT_SECONDS), self.attempt)
            return
        is_eager = peer_id in self.view.credits
        self.view.credits.discard(peer_id)
        peer = self.pipeline.peers.get(peer_id)
        if peer is None:
            # The peer has died, and nothing answers there any more.
            self.timeline.after(NOTICE_SECONDS, partial(self.failed, peer_id, is_gone=True))
            return
        has_others = self._num_sent_on < most_sent_on(self.view.chooser.num_asked_around(self.stage))
        _Call(self, peer, is_eager=is_eager, has_others=has_others).ask()

    @property
    def _is_abandoned(self) -> bool:
        return self.origin is not None and self.origin.is_gone

    # -- how a call ended --------------------------------------------------------------------------------------------

    def failed(self, peer_id: PeerId, *, is_gone: bool) -> None:
        if self._is_abandoned:
            return
        self.pipeline.num_reroutes += 1
        self.view.chooser.failed(self.stage, peer_id, is_gone=is_gone)
        self._excluded[peer_id] = self.timeline.monotonic() + PAUSE_SECONDS
        self.attempt()

    def refused(self, peer_id: PeerId, retry_after_seconds: float, *, has_others: bool) -> None:
        """Call another peer because this one is busy, or leaves the microbatch to others."""
        if has_others:
            self._num_sent_on += 1
        elif self.origin is not None:
            self.origin.stalls(self)
        self.view.chooser.busy(self.stage, peer_id, retry_after_seconds)
        self._excluded[peer_id] = self.timeline.monotonic() + retry_after_seconds
        self.attempt()

    def accepted(self) -> None:
        if self.origin is not None:
            self.origin.goes_on(self)

    def answered(self, peer_id: PeerId, answer: Answer, num_credits: int) -> None:
        if self._is_abandoned:
            return
        if num_credits:
            self.view.credits.add(peer_id)
        self.view.chooser.succeeded(self.stage, peer_id, answer)
        self._then()


class _Call:
    """The call of a hop to one chosen peer, from the question whether it has room until its answer or its death."""

    def __init__(self, hop: _Hop, peer: SimulatedPeer, *, is_eager: bool, has_others: bool) -> None:
        """`is_eager`: the tensors go with the question, because the peer gave a credit. `has_others`: the peer may
        leave the microbatch to others."""
        self._hop = hop
        self._timeline = hop.timeline
        self._peer = peer
        self._is_eager = is_eager
        self._has_others = has_others
        self._one_way = (peer.machine.link_seconds + (hop.origin.machine.link_seconds if hop.origin else 0.0)) / 2
        self._sent_at = self._timeline.monotonic()
        self._busy_seconds = self._downstream_seconds = 0.0

    def ask(self) -> None:
        self._peer.waits(self)
        self._after(self._one_way, self._asked)

    def lost(self) -> None:
        self._timeline.after(NOTICE_SECONDS, partial(self._hop.failed, self._peer.peer_id, is_gone=False))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._timeline.after(seconds, partial(self._if_alive, action))

    def _if_alive(self, action: Callable[[], None]) -> None:
        if not self._peer.is_gone:
            action()

    # -- at the peer -------------------------------------------------------------------------------------------------

    def _asked(self) -> None:
        try:
            self._peer.admit(self._hop.caller, has_others=self._has_others)
        except Overloaded as busy:
            self._after(self._one_way, partial(self._refused, busy.retry_after_seconds))
            return
        self._hop.accepted()
        # Without a credit, "accepted" goes back before the tensors come.
        self._after(0.0 if self._is_eager else 2 * self._one_way, self._begin)

    def _begin(self) -> None:
        if self._hop.stage + 1 == self._hop.pipeline.num_stages:
            self._peer.both(self._done)
        else:
            self._age = self._peer.begin(self._forwarded)

    def _forwarded(self, seconds: float) -> None:
        self._busy_seconds = seconds
        pipeline = self._hop.pipeline
        view = pipeline.view_of(self._peer, self._hop.view)
        returned = partial(self._returned, self._timeline.monotonic())
        _Hop(pipeline, view, self._hop.stage + 1, self._peer, returned).attempt()

    def _returned(self, handed_on_at: float) -> None:
        self._downstream_seconds = self._timeline.monotonic() - handed_on_at
        self._peer.end(self._age, self._done)

    def _done(self, seconds: float) -> None:
        self._busy_seconds += seconds
        self._peer.measured(self._busy_seconds)
        # The answer's credits are decided before the microbatch's own slot is free.
        num_credits = self._peer.grants(has_others=self._has_others)
        self._peer.give_back(self._hop.caller)
        self._after(self._one_way, partial(self._answered, self._peer.queue_length, num_credits))

    # -- the reply ---------------------------------------------------------------------------------------------------

    def _refused(self, retry_after_seconds: float) -> None:
        self._peer.waits_no_more(self)
        self._hop.refused(self._peer.peer_id, retry_after_seconds, has_others=self._has_others)

    def _answered(self, queue_length: int, num_credits: int) -> None:
        self._peer.waits_no_more(self)
        answer = Answer(
            num_samples=NUM_SAMPLES, busy_seconds=self._busy_seconds, queue_length=queue_length,
            link_seconds=2 * self._one_way,
            call_seconds=self._timeline.monotonic() - self._sent_at - self._downstream_seconds,
        )  # fmt: skip
        self._hop.answered(self._peer.peer_id, answer, num_credits)
