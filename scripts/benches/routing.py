"""What it costs to know many peers: the CPU time of a choice, the memory of the table, the directory's traffic.

sides/routing_dht.py measures what real DHT nodes use.
"""

import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scripts.benches.shared.common import OutputOptions, say
from scripts.benches.sides import routing_dht
from scripts.benches.sides.routing_dht import REPLICAS, simple_record
from scripts.benches.simulate.timeline import Timeline
from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.types import Block, PeerId

NUM_SAMPLES, NUM_CHOICES = 4, 20_000
SEED = 0  # Of the peers' speeds, of the router's chance, and of when each peer begins


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Measure what a choice among many peers costs, and what it costs to know them."""

    sizes: tuple[int, ...] = (100, 1000, 10000)
    """Peers of a stage; the first and the last are compared."""
    repetitions: int = 7
    """Repetitions over which medians are taken."""
    dht_sizes: tuple[int, ...] = (2, 8, 25, 100)
    """Numbers of peers with a DHT node each, from few to many. Larger swarms are computed from the last number, whose
    nodes must not use all of the CPU."""
    dht_seconds: float = 30.0
    """How long the DHT is observed, at each size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(larger <= size for size, larger in pairwise((0, *self.dht_sizes))):
            raise ValueError("--dht-sizes must grow from one to the next")
        if self.dht_sizes[-1] <= REPLICAS:
            raise ValueError(f"the last of --dht-sizes must be above {REPLICAS}: with fewer peers each keeps all keys")


def run(options: Options) -> dict[str, Any]:
    tables = {size: _Table(size) for size in options.sizes}
    seconds: dict[int, list[float]] = {size: [] for size in options.sizes}
    updates: dict[int, list[float]] = {size: [] for size in options.sizes}
    for table in tables.values():
        table.choose(max(NUM_CHOICES, 2 * table.size))
    for repetition in range(options.repetitions):
        for size, table in tables.items():
            seconds[size].append(table.choose(NUM_CHOICES) / NUM_CHOICES)
            updates[size].append(table.update() / size)
        say(f"repetition {repetition + 1} of {options.repetitions}")
    first, last = options.sizes[0], options.sizes[-1]
    choice = {size: statistics.median(values) for size, values in seconds.items()}
    return {
        f"cost_{last}_over_{first}": choice[last] / choice[first],
        "choice_microseconds": {str(size): 1e6 * value for size, value in choice.items()},
        "update_microseconds_per_peer": {
            str(size): 1e6 * statistics.median(values) for size, values in updates.items()
        },
        "table_bytes_per_peer": {str(size): _table_bytes(size) / size for size in options.sizes},
        **routing_dht.measure(options.dht_sizes, seconds=options.dht_seconds, seed=SEED),
    }


class _Table:
    def __init__(self, size: int) -> None:
        self.size = size
        rng = random.Random(SEED)
        self._clock = Timeline()
        self._router = Router(self._clock, random.Random(SEED + 1))
        self._seconds = {f"{number:040x}": rng.uniform(0.2, 2.0) for number in range(size)}
        self._records = list(map(simple_record, self._seconds))
        self._router.update(Block(0), self._records)

    def choose(self, count: int) -> float:
        """Make this many choices, and report the outcome of each to the router. Return the CPU seconds."""
        router, clock, all_seconds = self._router, self._clock, self._seconds
        began = time.process_time()
        for _ in range(count):
            record = router.choose(Block(0), NUM_SAMPLES)
            assert record is not None, "a peer serves"
            clock.run(clock.monotonic() + 1e-4)
            router.succeeded(
                Block(0),
                PeerId(record.peer_id),
                Observation(
                    num_samples=NUM_SAMPLES, busy_seconds=all_seconds[record.peer_id], link_seconds=0.05, queue_length=1
                ),
            )
        return time.process_time() - began

    def update(self) -> float:
        """Give the router the whole directory, as happens every few seconds. Return the CPU seconds."""
        began = time.process_time()
        self._router.update(Block(0), self._records)
        return time.process_time() - began


def _table_bytes(size: int) -> int:
    tracemalloc.start()
    try:
        table = _Table(size)
        table.choose(size)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
