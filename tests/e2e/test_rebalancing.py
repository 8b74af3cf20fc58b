"""Nine peers that chose their stages themselves; two of one stage die for good, and another one comes to help."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.local.supervisor import Supervisor
from peers.shared.needs import of_stages
from peers.shared.network import agree_on_config
from peers.shared.room import together
from scripts.benches.sides.paced_stage import PACE
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.dht import node as dht_node
from swarm.dht.directory import Directory
from swarm.machine.clock import SystemClock
from swarm.types import Block, PeerState
from tests.support.swarm import RealPeer, RealSwarm, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]

NUM_STAGES, PEERS_PER_STAGE = 3, 3
SECONDS_PER_SAMPLE = 0.4
PERIOD_SECONDS = 40.0
MEASURED_SECONDS = 90.0
LEAST_SHARE = 0.85
CUSTOM_CLASS = "scripts.benches.sides.paced_stage:PacedTransformer"
CHANGES = {
    "num_layers = 2": f'num_layers = 3\ncustom_class = "{CUSTOM_CLASS}"',
    "num_stages = 2": f"num_stages = {NUM_STAGES}",
    "round_samples = 64": "round_samples = 60",
    "inner_batch_samples = 8": "inner_batch_samples = 12",
}

logger = logging.getLogger(__name__)


class Swarm(RealSwarm):
    """Peers that all take the same time for a sample, most of it asleep."""

    start_seconds = 300.0

    def __init__(self, folder: Path, children: Supervisor, setting: str) -> None:
        super().__init__(folder, children, setting=setting, changes=CHANGES)

    def rate(self, trainer: str, seconds: float) -> float:
        """Samples per second of the whole swarm, over the steps that a trainer logs in so many seconds."""
        first = len(self.steps(trainer))
        time.sleep(seconds)
        rows = self.steps(trainer)[first + 1 :]
        tokens = sum(row["train/tokens_per_sec"] * row["train/step_time"] for row in rows)
        return float(tokens / sum(row["train/step_time"] for row in rows) / 32)


class Watch:
    """Reads the DHT's records all the time, in a thread: how many living peers serve each stage."""

    def __init__(self, address: str) -> None:
        self.readings: list[tuple[float, dict[int, set[str]]]] = []
        """When, and who served which stage, whether alive or not."""
        self.dead: dict[str, float] = {}
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read()))

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _read(self) -> None:
        clock = SystemClock()
        node = await asyncio.to_thread(
            lambda: dht_node.start(clock=clock, initial_peers=[self._address], client_mode=True)
        )
        try:
            config = await agree_on_config(node, None, [self._address], clock, None)
            directory = Directory(node, generate(), config.run_id, clock)
            while not self._stop.is_set():
                rows = {stage: await directory.peers(Block(stage)) for stage in range(NUM_STAGES)}
                serving = {s: {r.peer_id for r in row if r.state is PeerState.SERVING} for s, row in rows.items()}
                self.readings.append((time.monotonic(), serving))
                await clock.sleep(0.5)
        finally:
            await asyncio.to_thread(node.shutdown)

    def living(self) -> dict[int, set[str]]:
        """Who serves each stage now."""
        _, serving = self.readings[-1]
        return {stage: peers - self.dead.keys() for stage, peers in serving.items()}

    def least(self) -> int:
        """The smallest number of living peers that any stage ever had."""
        return min(
            len([peer for peer in peers if self.dead.get(peer, at) >= at])
            for at, serving in self.readings
            for peers in serving.values()
        )


@pytest.fixture(params=["diloco", "synchronous"])
def swarm(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    monkeypatch.setenv(PACE, str(SECONDS_PER_SAMPLE))
    with Supervisor(tmp_path / "logs", grace_seconds=0.0) as children:
        yield Swarm(tmp_path, children, request.param)


def _by_id(swarm: RealSwarm) -> dict[str, RealPeer]:
    return {peer.ready["peer_id"]: peer for peer in swarm.peers}


def _room_for_one(path: Path) -> int:
    """Bytes for any stage, and for no two: those of a stage are fewer, the more peers it has."""
    config = configs.load(path)
    most = max(one.least for one in of_stages(config, on_gpu=False).values())
    many = of_stages(config, on_gpu=False, num_peers=NUM_STAGES * PEERS_PER_STAGE)
    fewest = min(together(many, range(first, first + 2)).least for first in range(NUM_STAGES - 1))
    assert most < fewest
    return (most + fewest) // 2


def test_a_peer_moves_to_the_stage_that_lost_two(swarm: Swarm) -> None:
    options = ["--rebalance-every", str(PERIOD_SECONDS), "--allow-class", CUSTOM_CLASS]
    options += ["--memory", str(_room_for_one(swarm.config))]
    swarm.start_peers(["auto"], *options)
    swarm.start_peers(["auto"] * (NUM_STAGES * PEERS_PER_STAGE - 1), *options)
    with Watch(swarm.address) as watch:
        wait_until(lambda: watch.readings, 60, "a first look at the DHT")
        wait_until(lambda: sum(map(len, watch.living().values())) == 9, 60, "nine peers in the DHT")
        counts = [len(watch.living()[stage]) for stage in range(NUM_STAGES)]
        assert counts == [PEERS_PER_STAGE] * NUM_STAGES, "newcomers spread by themselves"
        del watch.readings[:-1]

        trainer = swarm.start_trainer("trainer", steps=100_000)
        # By then the trainer's window has grown to what nine peers can take.
        swarm.wait_for_steps("trainer", 12, 500)
        whole = swarm.rate("trainer", MEASURED_SECONDS)
        assert whole > 0.5 * PEERS_PER_STAGE / SECONDS_PER_SAMPLE, "the machine has to keep up with its peers"

        victims = [peer for peer in watch.living()[1] if _by_id(swarm)[peer] is not swarm.peers[0]][:2]
        killed_at = time.monotonic()
        for peer in victims:
            watch.dead[peer] = killed_at
            swarm.kill(_by_id(swarm)[peer])
        wait_until(lambda: len(watch.living()[1]) == 2, 2 * PERIOD_SECONDS + 30, "somebody to move")
        took = time.monotonic() - killed_at
        # The trainer's window shrank while one peer did the work of three: four rounds later it has grown again.
        swarm.wait_for_steps("trainer", len(swarm.steps("trainer")) + 4, 300)
        recovered = swarm.rate("trainer", MEASURED_SECONDS)
        time.sleep(PERIOD_SECONDS)
        counts = [len(watch.living()[stage]) for stage in range(NUM_STAGES)]
        least = watch.least()
    # Of seven peers none can be placed so that the weakest stage has more than two.
    share = recovered / (whole * 2 / PEERS_PER_STAGE)
    logger.info(json.dumps({"whole": whole, "recovered": recovered, "share": share, "took": took}))
    assert sorted(counts) == [2, 2, 3], "one moved, and nobody else"
    assert took <= 2 * PERIOD_SECONDS
    assert share >= LEAST_SHARE
    assert least >= 1, "no stage was ever empty"
    moves: list[dict[str, Any]] = [peer for row in swarm.status()["stages"] for peer in row["peers"] if peer["moves"]]
    assert [peer["moves"] for peer in moves] == [1]
    swarm.interrupt(trainer)
    report = swarm.audit()
    assert report["violations"] == [], "a move makes nothing count twice"
    swarm.assert_no_tracebacks()
