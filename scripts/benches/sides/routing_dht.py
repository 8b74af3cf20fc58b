"""What the directory costs each peer, for swarms of several sizes: bytes, CPU and memory of real DHT nodes.

Bytes are those that pass through each p2pd, as the kernel counts them. Here all peers share one process, so each record
is checked only once for all of them.
"""

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import swarm
from peers.shared.network import REFRESH_SECONDS, KnownPeers
from peers.stage_peer.program import published
from scripts.benches.shared import proc
from scripts.benches.shared.common import say
from scripts.benches.simulate.microbatches.directory import ListedKey, Listing
from scripts.benches.simulate.timeline import Timeline
from swarm.config import RunConfig, StagesConfig
from swarm.credentials import identity
from swarm.dht import keys
from swarm.dht import node as dht_node
from swarm.dht.directory import NUM_RENEWALS, RENEW_SECONDS, Announcement, Directory, stretch
from swarm.dht.node import DhtNode
from swarm.dht.split_key import NUM_HEIRS, SPLIT, SplitKey
from swarm.errors import IntegrityError
from swarm.machine.clock import SystemClock
from swarm.routing.router import Router
from swarm.types import Block, PeerRecord, PeerState

SETTLE_SECONDS = (NUM_RENEWALS + 2) * RENEW_SECONDS
"""After this time all peers have announced themselves, and records at nodes that are no longer among the nearest to
their key have expired. (Copies of the configuration last longer, but there are few.)"""
REPLICAS = 5  # The number of nodes that keep a key: hivemind's default, which we use, too
COMPUTED = (100, 1000, 10000)
COUNTED_SECONDS, NUM_COUNTED = 600, 20  # For how long, and of how many members, records are counted


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the peers have used until now, or within a period. A p2pd writes what came from its process to other nodes,
    and what came from them to its process, so `passed_bytes` are those that each peer has sent and received."""

    seconds: float
    process_cpu_seconds: float
    p2pd_cpu_seconds: float
    passed_bytes: tuple[int, ...]

    def since(self, before: "Counters") -> "Counters":
        return Counters(
            seconds=self.seconds - before.seconds,
            process_cpu_seconds=self.process_cpu_seconds - before.process_cpu_seconds,
            p2pd_cpu_seconds=self.p2pd_cpu_seconds - before.p2pd_cpu_seconds,
            passed_bytes=tuple(now - then for now, then in zip(self.passed_bytes, before.passed_bytes, strict=True)),
        )


class Peer:
    """The part of a stage peer that uses its DHT node."""

    def __init__(self, node: DhtNode, config: RunConfig, rng: random.Random) -> None:
        self._clock = SystemClock()
        self._who = identity.generate()
        self._config = config
        node.belong_to(keys.of_run(config.run_id, config.blocks), None)
        self._record = full_record(self._who, dht_address=node.addresses()[0])
        self._rng = rng
        self._directory = Directory(node, self._who, config.run_id, self._clock)
        self._known = KnownPeers(Router(self._clock, rng), own_id=self._who.peer_id)

    @property
    def num_known(self) -> int:
        return sum(map(len, self._known.records.values()))

    async def serve(self) -> None:
        announcement = Announcement(
            self._directory, "a peer", self._present, self._clock, every_seconds=RENEW_SECONDS, level=logging.WARNING
        )
        configuration = published(self._directory, self._who.peer_id, self._config, self._clock)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._later(announcement.keep()))
            tasks.create_task(self._later(self._directory.watch([Block(0)], self._known.update, REFRESH_SECONDS)))
            tasks.create_task(self._later(configuration.keep()))

    async def _later(self, work: Coroutine[Any, Any, None]) -> None:
        # Peers begin at random moments. Otherwise all of them would ask the same nodes at the same time.
        with contextlib.closing(work):
            await asyncio.sleep(self._rng.uniform(0.0, RENEW_SECONDS))
            await work

    def _present(self) -> PeerRecord:
        return self._record.model_copy(update={"announced_at": self._clock.time()})


def full_record(who: identity.Identity, *, dht_address: str) -> PeerRecord:
    return PeerRecord(
        peer_id=who.peer_id, name="a-machine-of-the-usual-name-12345", software_version=swarm.__version__,
        announced_at=1.7e9 + 0.123456, stage=0, endpoint="192.0.2.101:50051", certificate_pem=who.certificate_pem,
        state=PeerState.SERVING, samples_per_second=12.345678901234567, queue_length=3, round=1234, samples=1234567,
        lineage="0123456789abcdef" * 4, movable=True, moves=1, dht_address=dht_address, device="cuda:0",
    )  # fmt: skip


def measure(sizes: Sequence[int], *, seconds: float, seed: int) -> dict[str, Any]:
    """Measure swarms of one stage of these sizes, and return the figures. The swarm grows: newcomers join until it has
    the next size."""
    config, rng = RunConfig(stages=StagesConfig(num_stages=1)), random.Random(seed)
    peers: list[Peer] = []
    used: dict[int, Counters] = {}
    p2pd_bytes: dict[str, float] = {}
    with contextlib.ExitStack() as nodes:
        entrance: list[str] = []
        for size in sizes:
            while len(peers) < size:
                node = dht_node.start(clock=SystemClock(), host="127.0.0.1", initial_peers=entrance)
                nodes.callback(node.shutdown)
                entrance = entrance or node.addresses()
                peers.append(Peer(node, config, rng))
            used[size] = asyncio.run(_observe(peers, seconds))
            p2pd_bytes[str(size)] = statistics.mean(map(proc.resident_bytes, _p2pds()))
            say(f"a DHT of {size} nodes has been observed")
    return {**traffic(used), "dht_p2pd_bytes": p2pd_bytes}


async def _observe(peers: Sequence[Peer], seconds: float) -> Counters:
    async with asyncio.TaskGroup() as tasks:
        serving = [tasks.create_task(peer.serve()) for peer in peers]
        await asyncio.sleep(SETTLE_SECONDS)
        before = _count()
        await asyncio.sleep(seconds)
        used = _count().since(before)
        for task in serving:
            task.cancel()
    expected = min(len(peers), SPLIT)  # Of more peers each knows the first SPLIT ones, and some others
    if any(peer.num_known < expected for peer in peers):
        known = sorted(peer.num_known for peer in peers)
        raise IntegrityError(
            f"of {len(peers)} peers some know only {known[0]}, not {expected}: is the machine busy with other work?"
        )
    return used


def _count() -> Counters:
    p2pds = _p2pds()
    return Counters(
        seconds=time.monotonic(), process_cpu_seconds=time.process_time(),
        p2pd_cpu_seconds=sum(map(proc.cpu_seconds_of_all, p2pds)), passed_bytes=tuple(map(proc.written_bytes, p2pds)),
    )  # fmt: skip


def traffic(used: Mapping[int, Counters]) -> dict[str, Any]:
    """Figures for each measured number of peers, and computed ones for larger numbers."""

    def by_size(value: Callable[[int], float], sizes: Iterable[int] = used) -> dict[str, float]:
        return {str(size): value(size) for size in sizes}

    # What one peer sends, another one receives. So sent bytes and received bytes are each half of those that pass.
    sent = {size: statistics.mean(u.passed_bytes) / 2 / u.seconds for size, u in used.items()}
    # All peers receive about the same number of bytes.
    busiest = {size: max(u.passed_bytes) / u.seconds - sent[size] for size, u in used.items()}
    last = max(used)
    read = {size: records_per_second(size) for size in (last, *COMPUTED)}
    return {
        "dht_bytes_per_second": by_size(lambda size: sent[size]),
        "dht_busiest_bytes_per_second": by_size(lambda size: busiest[size]),
        "dht_computed_bytes_per_second": by_size(lambda size: sent[last] * read[size].all / read[last].all, COMPUTED),
        "dht_computed_busiest_bytes_per_second": by_size(
            # The nodes that keep the first key, which all peers of the stage read.
            lambda size: busiest[last] * (size * read[size].first) / (last * read[last].first), COMPUTED
        ),
        "dht_process_cpu_seconds_per_second": by_size(
            lambda size: used[size].process_cpu_seconds / used[size].seconds / size
        ),
        "dht_p2pd_cpu_seconds_per_second": by_size(
            lambda size: used[size].p2pd_cpu_seconds / used[size].seconds / size
        ),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Records:
    """How many records a second a usual member of a stage reads and announces in all (each at REPLICAS nodes), and how
    many it reads under the stage's first key."""

    all: float
    first: float


@functools.cache
def records_per_second(size: int) -> Records:
    """Count what a member of a stage of this size does in COUNTED_SECONDS, once all have announced themselves."""
    timeline, ids = Timeline(), [hashlib.sha1(b"%d" % number).hexdigest() for number in range(size)]
    listing = Listing()
    listing.update(list(map(simple_record, ids)))
    num_all, num_first, members = 0, 0, sorted(ids)[min(NUM_HEIRS, size - 1) :: 1 + size // NUM_COUNTED]

    async def live(member: str) -> None:
        nonlocal num_all, num_first
        keys: list[ListedKey] = []

        def known(key: str) -> Any:
            keys.append(ListedKey(listing, key))
            return keys[-1]

        split, next_read = SplitKey(known, "stage", member, timeline), 0.0
        for second in range(COUNTED_SECONDS):
            timeline.run(began + second)
            if second % RENEW_SECONDS == 0:
                num_all += len(await split.places()) * REPLICAS
            if second >= next_read:
                await split.sample(is_own=True, partly=True)
                next_read = second + REFRESH_SECONDS * stretch(split.num_known)
        num_all += sum(key.num_read for key in keys)
        num_first += sum(key.num_read for key in keys if not key.bits)

    for member in members:
        began = timeline.monotonic()
        asyncio.run(live(member))
    per_second = 1.0 / (len(members) * COUNTED_SECONDS)
    return Records(all=num_all * per_second, first=num_first * per_second)


def simple_record(peer_id: str) -> PeerRecord:
    return PeerRecord(
        peer_id=peer_id, announced_at=0.0, stage=0, endpoint="192.0.2.1:50051", state=PeerState.SERVING,
        samples_per_second=4.0,
    )  # fmt: skip


def _p2pds() -> list[int]:
    return sorted(pid for pid, name in proc.children(os.getpid()).items() if name == "p2pd")
