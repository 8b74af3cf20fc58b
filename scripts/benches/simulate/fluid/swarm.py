"""A swarm without microbatches: a stage's throughput is the sum of its peers', and a pipeline's the weakest stage's.

A peer serves adjacent stages, each with its capacity divided by their number, and no faster than its line carries,
unless it serves all stages. Where stages have variants, each variant is a stage here, and its throughput is divided by
the share of the samples that pass it. Newcomers download whatever the rule, so two optima are computed: one counts
them while they download, one does not.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import truediv

from scripts.benches.simulate.timeline import Timeline
from swarm.rebalancing.layout import Paths, shares_of
from swarm.types import Block


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
    """Which peers serve which stages, in the order in which they came, and how much work that has amounted to so far.

    `best` gives what some peers can do at most. `capacity` is a peer's throughput at one stage, 1 if it has none there,
    and `line` what each peer's line carries, as a multiple of its capacity.
    """

    timeline: Timeline
    num_stages: int
    download_seconds: float
    best: Callable[[Collection[int]], float]
    capacity: dict[int, float] = field(default_factory=dict)
    line: float = math.inf
    paths: Paths = field(default_factory=dict)  # Those through its stages, which are blocks; empty: one through all
    span_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    peers: list[dict[int, None]] = field(default_factory=list)
    present: set[int] = field(default_factory=set)
    throughput: list[float] = field(default_factory=list)
    num_moves: int = 0
    num_entered: int = 0  # How many stages peers have entered in these moves
    _rates: dict[int, float] = field(default_factory=dict)  # What each peer adds to each of its stages
    _ready: set[int] = field(default_factory=set)  # The present peers that can serve by now
    _counted_until: float = 0.0
    _done: float = 0.0
    _best: float = 0.0
    _best_of_present: float = 0.0

    def __post_init__(self) -> None:
        self.peers = [{} for _ in range(self.num_stages)]
        self.throughput = [0.0] * self.num_stages
        self.paths = self.paths or {tuple(map(Block, range(self.num_stages))): 1.0}
        self.blocks = sorted({block for path in self.paths for block in path})
        self.shares = list(shares_of(self.blocks, self.paths).values())

    @property
    def loads(self) -> list[float]:
        """How many peers serve each stage, for all samples of the run."""
        return list(map(truediv, self.num_serving, self.shares))

    @property
    def num_serving(self) -> list[int]:
        return [len(peers) for peers in self.peers]

    def rate(self, peer: int, num_stages: int) -> float:
        """What a peer adds to each of so many stages."""
        carries = math.inf if num_stages == self.num_stages else self.line
        return self.capacity.get(peer, 1.0) * min(carries, 1.0 / num_stages)

    def kept(self) -> Kept:
        self._count()
        return Kept(done=self._done, best=self._best, best_of_present=self._best_of_present)

    def start(self, peer: int, *stages: int) -> None:
        self._count()
        self.present.add(peer)
        self._ready.add(peer)
        self._serve(peer, stages)

    def come(self, peer: int) -> None:
        self._count()
        self.present.add(peer)
        self.timeline.after(self.download_seconds, lambda: self._can_serve(peer))

    def join(self, peer: int, *stages: int, then: Callable[[], object] = lambda: None) -> None:
        """Let a newcomer download stages' states and serve the stages. `then` is called when it serves."""
        self.timeline.after(self.download_seconds, lambda: self._arrive(peer, stages, then))

    def move(self, peer: int, *stages: int, then: Callable[[], object] = lambda: None) -> None:
        """Let a peer leave those of its stages that are not among these, download the states of the new ones, and serve
        these. Those that it keeps are served all the time. `then` is called when it serves all."""
        self._count()
        kept = tuple(stage for stage in self.span_of[peer] if stage in stages)
        self._serve(peer, kept, self._rates[peer])
        num_entered = len(stages) - len(kept)
        self.num_moves += 1
        self.num_entered += num_entered
        self.timeline.after(self.download_seconds if num_entered else 0.0, lambda: self._arrive(peer, stages, then))

    def leave(self, peer: int) -> None:
        self._count()
        self.present.discard(peer)
        self._ready.discard(peer)
        self._serve(peer, ())

    def _can_serve(self, peer: int) -> None:
        if peer in self.present:
            self._count()
            self._ready.add(peer)

    def _arrive(self, peer: int, stages: tuple[int, ...], then: Callable[[], object]) -> None:
        if peer in self.present:
            self._count()
            self._serve(peer, stages)
            then()

    def _serve(self, peer: int, stages: tuple[int, ...], rate: float = 0.0) -> None:
        """Let a peer serve these stages and no others, each at this rate, or at what its capacity allows."""
        for stage in self.span_of.pop(peer, ()):
            del self.peers[stage][peer]
            self.throughput[stage] -= self._rates[peer]
        self._rates.pop(peer, None)
        if stages:
            self.span_of[peer] = stages
            self._rates[peer] = rate = rate or self.rate(peer, len(stages))
            for stage in stages:
                self.peers[stage][peer] = None
                self.throughput[stage] += rate

    def _count(self) -> None:
        now = self.timeline.monotonic()
        seconds, self._counted_until = now - self._counted_until, now
        self._done += seconds * min(map(truediv, self.throughput, self.shares))
        self._best += seconds * self.best(self._ready)
        self._best_of_present += seconds * self.best(self.present)
