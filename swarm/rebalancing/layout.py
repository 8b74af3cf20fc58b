"""Which peers work at which stage, and each stage's throughput: the input of a decision.

claims makes it from the DHT's records, and simulations from their own peers. Pure, and never changed once made, so that
many decisions may share one.
"""

import statistics
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One peer, as a layout counts it."""

    peer_id: PeerId
    stage: int
    """The stage where the peer counts. A peer on its way counts where it goes."""
    speed: float = 0.0
    """Samples per second at a stage of relative cost 1; 0 if unmeasured, which counts as the others' median."""
    serving: bool = True
    """Whether the peer serves that stage already, and stays."""
    movable: bool = False
    """Whether the peer moves if that is called for; a peer that is on its way does not."""


class Layout:
    """All peers of a run, by stage.

    Attributes:
        costs: relative cost of a sample, by stage.
        workers: the peers, by id.
        throughput: samples per second of each stage: the sum over its peers.
        squares: by stage: the sum of the squares of its peers' samples per second.
        num_workers: how many peers count at each stage.
        num_serving: how many of these serve it already.
        movable: by stage, (speed, peer id) of the peers that may move, the slowest first.
        usual_speed: the median of the measured speeds; 1 if no peer is measured.
        total_speed: the speed of all peers together.
    """

    def __init__(self, workers: Iterable[Worker], costs: Sequence[float]) -> None:
        self.costs = tuple(costs)
        self.workers = {worker.peer_id: worker for worker in workers}
        measured = [worker.speed for worker in self.workers.values() if worker.speed > 0]
        self.usual_speed = statistics.median(measured) if measured else 1.0
        self.throughput = [0.0] * len(costs)
        self.squares = [0.0] * len(costs)
        self.num_workers = [0] * len(costs)
        self.num_serving = [0] * len(costs)
        self.movable: list[list[tuple[float, PeerId]]] = [[] for _ in costs]
        self.total_speed = 0.0
        for worker in self.workers.values():
            speed = self.speed(worker)
            rate = speed / self.costs[worker.stage]
            self.total_speed += speed
            self.throughput[worker.stage] += rate
            self.squares[worker.stage] += rate * rate
            self.num_workers[worker.stage] += 1
            self.num_serving[worker.stage] += worker.serving
            if worker.movable and worker.serving:
                insort(self.movable[worker.stage], (speed, worker.peer_id))

    def speed(self, worker: Worker) -> float:
        """A peer's samples per second at a stage of cost 1; if unmeasured, the usual speed."""
        return worker.speed if worker.speed > 0 else self.usual_speed

    @property
    def pipeline_throughput(self) -> float:
        """The samples per second that pass all stages, which are the weakest stage's."""
        return min(self.throughput)
