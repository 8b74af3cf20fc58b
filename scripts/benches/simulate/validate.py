"""Is a simulated swarm as fast as a real one?

Real peers and a trainer, processes of their own over TLS on this machine, whose computing is a pause of fixed length
(../paced_stage.py), so that they need few cores; and the same swarm in virtual time, with the same pauses. Compared are
microbatches per second that the peers of stage 0 commit while no round ends.
"""

import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.resume import describe
from peers.supervisor import Supervisor
from scripts.benches.common import START_SECONDS, BenchOptions, SwarmProcesses, fail_on_exit, program, say, with_corpus
from scripts.benches.paced_stage import PACE
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.errors import DeadlineExceeded
from swarm.rpc.channels import ChannelPool
from swarm.simulation.choosers.chooser import Ours
from swarm.simulation.machine import Machine
from swarm.simulation.pipeline import SimulatedPipeline, View
from swarm.simulation.timeline import Timeline
from swarm.simulation.trainer import SimulatedTrainer
from swarm.stage.slots import LARGEST
from swarm.types import PeerId

MICROBATCH_SIZE = 4
NEVER = 1_000_000_000
"""Microbatches of a round that does not end, and steps of a trainer that does not."""
LINK_SECONDS = 0.004
"""Round trip within one machine, with what gRPC does to a message."""
POLL_SECONDS = 0.2
DIRECTORY_SECONDS = 2.0

SETTINGS: dict[str, tuple[tuple[float, ...], ...]] = {
    "1 stage, 3 unequal peers": ((0.05, 0.1, 0.15),),
    "2 stages x 2 equal peers": ((0.08, 0.08), (0.08, 0.08)),
    "3 stages x 2, one peer slow": ((0.06, 0.06), (0.06, 0.18), (0.06, 0.06)),
}
"""By stage and peer, seconds of computing for a sample, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare the simulator with real local swarms."""

    warm_up_seconds: float = 15.0
    """Training before each measurement."""
    seconds: float = 40.0
    """Length of each measurement."""
    repetitions: int = 3
    """Times that each real swarm is measured; medians are compared."""
    seed: int = 0
    """Of the simulated swarm."""

    def __post_init__(self) -> None:
        if min(self.warm_up_seconds, self.seconds, self.repetitions) <= 0:
            raise ValueError("--warm-up-seconds, --seconds and --repetitions must be positive")


def run(options: Options) -> dict[str, Any]:
    """The figures: by setting, microbatches per second there and here."""
    settings = {}
    for name, paces in SETTINGS.items():
        real = _real(options, name, paces)
        simulated = simulate(paces, options.seed, warm_up_seconds=options.warm_up_seconds, seconds=400.0)
        median = statistics.median(real)
        settings[name] = {
            "real": median, "real_lowest": min(real), "real_highest": max(real), "simulated": simulated,
            "limit": min(sum(1 / (pace * MICROBATCH_SIZE) for pace in stage) for stage in paces),
            "difference_percent": 100.0 * (simulated / median - 1.0),
        }  # fmt: skip
        say(f"{name}: {median:.2f} microbatches/s, simulated {simulated:.2f}")
    largest = max(abs(setting["difference_percent"]) for setting in settings.values())
    return {"largest_difference_percent": largest, "passed": largest <= 10.0, "settings": settings}


def simulate(
    paces: tuple[tuple[float, ...], ...], seed: int, *, warm_up_seconds: float, seconds: float
) -> float:  # fmt: skip
    """Microbatches per second of a simulated swarm with one trainer."""
    timeline = Timeline()
    pipeline = SimulatedPipeline(
        timeline, random.Random(seed), num_stages=len(paces), num_samples=MICROBATCH_SIZE,
        max_in_flight=len(paces) + 2, largest_in_flight=LARGEST,
    )  # fmt: skip
    for stage, peers in enumerate(paces):
        for number, pace in enumerate(peers):
            pipeline.start(
                Machine(
                    peer_id=PeerId(f"{100 * stage + number:040x}"), stage=stage, busy_seconds=pace * MICROBATCH_SIZE,
                    link_seconds=LINK_SECONDS, jitter=0.0,
                )
            )  # fmt: skip
    view = View(Ours(timeline, random.Random(seed + 1)))

    def read_directory() -> None:
        pipeline.announce([view])
        timeline.after(DIRECTORY_SECONDS, read_directory)

    read_directory()
    trainer = SimulatedTrainer(pipeline, view)
    trainer.fill()
    timeline.run(warm_up_seconds)
    before = trainer.num_done
    timeline.run(warm_up_seconds + seconds)
    return (trainer.num_done - before) / seconds


def _config(options: Options, num_stages: int) -> RunConfig:
    return RunConfig(
        run="validate",
        model=ModelConfig(
            num_layers=num_stages, d_model=32, num_heads=2, custom_class="scripts.benches.paced_stage:Paced"
        ),
        stages=StagesConfig(num_stages=num_stages),
        data=DataConfig(
            dataset=options.dataset, sequence_length=32, microbatch_size=MICROBATCH_SIZE, max_tokens=1_000_000
        ),
        rounds=RoundsConfig(
            setting="diloco", inner_batch_samples=2 * MICROBATCH_SIZE, round_samples=NEVER * MICROBATCH_SIZE
        ),
    )  # fmt: skip


def _real(options: Options, name: str, paces: tuple[tuple[float, ...], ...]) -> list[float]:
    """Microbatches per second of a real swarm, each time that it was measured."""
    config, _ = with_corpus(_config(options, len(paces)))
    with tempfile.TemporaryDirectory(prefix="validate-") as folder, Supervisor(Path(folder) / "logs") as children:
        swarm = SwarmProcesses(config, children, Path(folder) / "run")
        say(f"{name}: peers start")
        stages = [stage for stage, peers in enumerate(paces) for _ in peers]
        swarm.start_peers(stages, [{PACE: str(pace)} for peers in paces for pace in peers])
        arguments = [
            "--steps", str(NEVER), "--output", str(swarm.folder / "trainer"), "--name", "trainer",
            "--evaluate-every", "0", "--initial-peers", *(peer.dht_address for peer in swarm.peers[:4]),
        ]  # fmt: skip
        trainer = children.start("trainer", program("trainer", arguments))
        rates = asyncio.run(_watch(options, swarm, children))
        children.kill9(trainer)
        swarm.stop()
    return rates


async def _watch(options: Options, swarm: SwarmProcesses, children: Supervisor) -> list[float]:
    first = [peer.record for peer in swarm.peers if peer.record.stage == 0]
    channels = ChannelPool()

    async def committed() -> tuple[float, int]:
        while True:
            replies = await describe(swarm.config, first, channels)
            if len(replies) == len(first):
                return time.monotonic(), sum(reply.counters.committed for reply in replies)
            fail_on_exit(children)

    try:
        deadline = time.monotonic() + START_SECONDS
        while (await committed())[1] == 0:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no microbatch in {START_SECONDS:.0f} s: is the machine busy with other work?")
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(options.warm_up_seconds)
        rates = []
        for _ in range(options.repetitions):
            began_at, before = await committed()
            await asyncio.sleep(options.seconds)
            ended_at, after = await committed()
            rates.append((after - before) / (ended_at - began_at))
            fail_on_exit(children)
        return rates
    finally:
        await channels.close()
