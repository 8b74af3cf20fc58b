"""What knowing many peers costs: the CPU time of a choice, the memory of the table, the bytes of the directory.

The router is the one that trainers and stage peers use, with as many peers as a stage might have; sizes take turns, and
each choice is followed by what its outcome teaches. Nothing is sent: bytes are those of a record as it is signed for
the DHT, times how often it is renewed and read.
"""

import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

import swarm
from peers.network import REFRESH_SECONDS
from peers.stage_server import ANNOUNCE_SECONDS
from scripts.benches.common import say
from scripts.benches.judged import LESS
from swarm import identity
from swarm.clock import ManualClock
from swarm.dht.records import seal
from swarm.routing.router import Router
from swarm.types import PeerId, PeerRecord, PeerState

NUM_SAMPLES = 4
JUDGED = {"cost_*_over_*": LESS}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a choice among many peers costs, and what it costs to know them."""

    json: bool = False
    """Print one JSON object as the last line of stdout, instead of a table."""
    sizes: tuple[int, ...] = (100, 1000, 10000)
    """Peers of a stage; the first and the last are compared."""
    num_choices: int = 20000
    """In each repetition, at each size."""
    repetitions: int = 7
    """Medians are taken over these."""
    seed: int = 0
    """Of the peers' speeds and of the router's chance."""

    def __post_init__(self) -> None:
        if not self.sizes or min(*self.sizes, self.num_choices, self.repetitions) < 1:
            raise ValueError("--sizes, --num-choices and --repetitions must be at least 1")


def run(options: Options) -> dict[str, Any]:
    """The bench's figures."""
    me = identity.generate()
    tables = {size: _Table(size, options.seed) for size in options.sizes}
    seconds: dict[int, list[float]] = {size: [] for size in options.sizes}
    updates: dict[int, list[float]] = {size: [] for size in options.sizes}
    for table in tables.values():
        table.choose(max(options.num_choices, 2 * table.size))
    for repetition in range(options.repetitions):
        for size, table in tables.items():
            seconds[size].append(table.choose(options.num_choices) / options.num_choices)
            updates[size].append(table.update() / size)
        say(f"repetition {repetition + 1} of {options.repetitions}")
    first, last = options.sizes[0], options.sizes[-1]
    choice = {size: statistics.median(values) for size, values in seconds.items()}
    record_bytes = len(seal(me, "run.0123456789abcdef.stage.0", _record(me), 1e9))
    return {
        f"cost_{last}_over_{first}": choice[last] / choice[first],
        "choice_microseconds": {str(size): 1e6 * value for size, value in choice.items()},
        "update_microseconds_per_peer": {
            str(size): 1e6 * statistics.median(values) for size, values in updates.items()
        },
        "table_bytes_per_peer": {str(size): _table_bytes(size, options.seed) / size for size in options.sizes},
        "record_bytes": record_bytes,
        "announce_bytes_per_second": record_bytes / ANNOUNCE_SECONDS,
        "read_bytes_per_second": {str(size): size * record_bytes / REFRESH_SECONDS for size in options.sizes},
    }


class _Table:
    """A router that knows the peers of one stage."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._rng = random.Random(seed)
        self._clock = ManualClock()
        self._router = Router(self._clock, random.Random(seed + 1))
        self._seconds = {f"{number:040x}": self._rng.uniform(0.2, 2.0) for number in range(size)}
        self._records = [_simple_record(peer_id) for peer_id in self._seconds]
        self._router.update(0, self._records)

    def choose(self, count: int) -> float:
        """Make so many choices, and report how each went; gives the CPU seconds."""
        router, clock, all_seconds = self._router, self._clock, self._seconds
        began = time.process_time()
        for _ in range(count):
            record = router.choose(0, NUM_SAMPLES)
            assert record is not None, "somebody serves"
            clock.advance(1e-4)
            router.succeeded(
                PeerId(record.peer_id), num_samples=NUM_SAMPLES, busy_seconds=all_seconds[record.peer_id],
                link_seconds=0.05, queue_length=1,
            )  # fmt: skip
        return time.process_time() - began

    def update(self) -> float:
        """Take over the whole directory again, as every few seconds; gives the CPU seconds."""
        began = time.process_time()
        self._router.update(0, self._records)
        return time.process_time() - began


def _table_bytes(size: int, seed: int) -> int:
    """Memory of a router that knows so many peers, with what it was told of them."""
    tracemalloc.start()
    try:
        table = _Table(size, seed)
        table.choose(size)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _simple_record(peer_id: str) -> PeerRecord:
    return PeerRecord(
        peer_id=peer_id, announced_at=0.0, stage=0, endpoint="192.0.2.1:50051", state=PeerState.SERVING,
        samples_per_second=4.0,
    )  # fmt: skip


def _record(who: identity.Identity) -> PeerRecord:
    """As full as a serving peer's is."""
    return PeerRecord(
        peer_id=who.peer_id, name="a-machine-of-the-usual-name-12345", software_version=swarm.__version__,
        announced_at=1.7e9 + 0.123456, stage=0, endpoint="192.0.2.101:50051", certificate_pem=who.certificate_pem,
        state=PeerState.SERVING, samples_per_second=12.345678901234567, queue_length=3, round=1234, samples=1234567,
        lineage="0123456789abcdef" * 4, movable=True, moves=1,
        dht_address="/ip4/192.0.2.101/tcp/40001/p2p/12D3KooWAbcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRST",
    )  # fmt: skip
