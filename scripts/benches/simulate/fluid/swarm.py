"""A swarm without microbatches: a stage's throughput is the sum of its peers', and a pipeline's the weakest stage's.

Newcomers download whatever the rule, so two optima are computed: one counts them while they download, one does not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.benches.simulate.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The work that was done, and that could have been done, in units of one peer's throughput times seconds."""

    done: float
    best: float  # The optimum that counts newcomers once they can serve, if they begin to download as they come
    best_of_present: float  # The optimum that counts newcomers as soon as they come

    @property
    def percent(self) -> float:
        return 100.0 * self.done / self.best if self.best else 100.0

    @property
    def percent_of_present(self) -> float:
        """The throughput in per cent of an optimum in which newcomers need no download."""
        return 100.0 * self.done / self.best_of_present if self.best_of_present else 100.0

    def since(self, earlier: "Kept") -> "Kept":
        return Kept(
            done=self.done - earlier.done,
            best=self.best - earlier.best,
            best_of_present=self.best_of_present - earlier.best_of_present,
        )


@dataclass(eq=False)
class FluidSwarm:
    """Which peers serve which stage, in the order in which they came, and how much work that has amounted to so far."""

    timeline: Timeline
    num_stages: int
    download_seconds: float
    stage_of: dict[int, int] = field(default_factory=dict)
    peers: list[dict[int, None]] = field(default_factory=list)
    present: set[int] = field(default_factory=set)
    num_moves: int = 0
    _ready: set[int] = field(default_factory=set)  # The present peers that can serve by now
    _counted_until: float = 0.0
    _done: float = 0.0
    _best: float = 0.0
    _best_of_present: float = 0.0

    def __post_init__(self) -> None:
        self.peers = [{} for _ in range(self.num_stages)]

    @property
    def num_serving(self) -> list[int]:
        return [len(peers) for peers in self.peers]

    def kept(self) -> Kept:
        self._count()
        return Kept(done=self._done, best=self._best, best_of_present=self._best_of_present)

    def start(self, peer: int, stage: int) -> None:
        self._count()
        self.present.add(peer)
        self._ready.add(peer)
        self._serve(peer, stage)

    def come(self, peer: int) -> None:
        self._count()
        self.present.add(peer)
        self.timeline.after(self.download_seconds, lambda: self._can_serve(peer))

    def join(self, peer: int, stage: int, then: Callable[[], object] = lambda: None) -> None:
        """Let a newcomer download a stage's state and serve the stage. `then` is called when it serves."""
        self.timeline.after(self.download_seconds, lambda: self._arrive(peer, stage, then))

    def move(self, peer: int, stage: int, then: Callable[[], object] = lambda: None) -> None:
        """Let a peer leave its stage, download another stage's state and serve that one. `then` is called when it
        serves."""
        self._count()
        del self.peers[self.stage_of.pop(peer)][peer]
        self.num_moves += 1
        self.timeline.after(self.download_seconds, lambda: self._arrive(peer, stage, then))

    def leave(self, peer: int) -> None:
        self._count()
        self.present.discard(peer)
        self._ready.discard(peer)
        stage = self.stage_of.pop(peer, None)
        if stage is not None:
            del self.peers[stage][peer]

    def _can_serve(self, peer: int) -> None:
        if peer in self.present:
            self._count()
            self._ready.add(peer)

    def _arrive(self, peer: int, stage: int, then: Callable[[], object]) -> None:
        if peer in self.present:
            self._serve(peer, stage)
            then()

    def _serve(self, peer: int, stage: int) -> None:
        self._count()
        self.stage_of[peer] = stage
        self.peers[stage][peer] = None

    def _count(self) -> None:
        now = self.timeline.monotonic()
        seconds, self._counted_until = now - self._counted_until, now
        self._done += seconds * min(self.num_serving)
        self._best += seconds * (len(self._ready) // self.num_stages)
        self._best_of_present += seconds * (len(self.present) // self.num_stages)
