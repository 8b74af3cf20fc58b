"""Is a simulated swarm as fast as a real one, whose computing is a pause of fixed length?

Half of the settings are saturated: the peers of the slowest stage are always busy. In the others the trainer keeps few
microbatches in flight, and the choice of peers, credits, queues and the length of the lines all matter. The time to
hand a microbatch on is measured before; the simulation gets no other figure of the real swarm.
"""

import asyncio
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peers.local.supervisor import Supervisor
from peers.shared import option_checks
from scripts.benches.shared.common import BenchOptions, say, with_corpus
from scripts.benches.shared.probe import LEAST_SECONDS, Watched, rate_between_commits, watch
from scripts.benches.shared.swarm import NEVER, Lines, SwarmProcesses, serve
from scripts.benches.shared.throttle import Throttle
from scripts.benches.sides.paced_stage import PACE
from scripts.benches.simulate.microbatches.choosers import Answer, Ours
from scripts.benches.simulate.microbatches.hop import SimulatedTrainer
from scripts.benches.simulate.microbatches.machine import Machine
from scripts.benches.simulate.microbatches.pipeline import SimulatedPipeline, View
from scripts.benches.simulate.timeline import Timeline
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.pipeline.window import MOST_IN_FLIGHT
from swarm.stage.slots import LARGEST_NUM_SLOTS
from swarm.types import PeerId

MICROBATCH_SIZE = 4
DIRECTORY_SECONDS = 2.0
SIMULATED_SECONDS = 400.0
GOAL_PERCENT = 10.0

SettingName = Literal["unequal", "equal", "slow-peer", "unequal-few", "equal-long-line", "slow-peer-long-line"]
Work = tuple[tuple[float, ...], ...]
"""The share of its stage's microbatches that each peer committed, by stage and peer."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A swarm to compare."""

    paces: tuple[tuple[float, ...], ...]  # Seconds of computing for a sample, forward and backward, by stage and peer
    max_in_flight: int = MOST_IN_FLIGHT  # The most microbatches in flight of the trainer
    round_trip_seconds: float = 0.0
    """The time that the length of the lines adds to a call and its answer, between any two processes."""

    @property
    def limit(self) -> float:
        """Microbatches per second that the peers can compute."""
        return min(sum(1 / (pace * MICROBATCH_SIZE) for pace in stage) for stage in self.paces)


UNEQUAL = ((0.05, 0.1, 0.15),)
EQUAL = ((0.08, 0.08), (0.08, 0.08))
SLOW_PEER = ((0.06, 0.06), (0.06, 0.18), (0.06, 0.06))
SETTINGS: dict[SettingName, Setting] = {
    "unequal": Setting(paces=UNEQUAL), "equal": Setting(paces=EQUAL), "slow-peer": Setting(paces=SLOW_PEER),
    "unequal-few": Setting(paces=UNEQUAL, max_in_flight=2),
    "equal-long-line": Setting(paces=EQUAL, max_in_flight=4, round_trip_seconds=0.1),
    "slow-peer-long-line": Setting(paces=SLOW_PEER, max_in_flight=4, round_trip_seconds=0.1),
}  # fmt: skip
ALONE = Setting(paces=((0.05,),), max_in_flight=1)
"""A swarm with one microbatch at a time. Its time besides computing is that of handing on."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare the simulator with real local swarms."""

    settings: tuple[SettingName, ...] = tuple(SETTINGS)
    """Swarms to compare."""
    warm_up_seconds: float = 15.0
    """Training before each measurement."""
    seconds: float = 30.0
    """Length of each measurement."""
    repetitions: int = 3
    """Times that each real swarm is measured; medians are compared."""
    seed: int = 0
    """Seed of the simulated swarm."""

    def __post_init__(self) -> None:
        option_checks.require_positive(self, ("warm_up_seconds", "repetitions"))
        if self.seconds < LEAST_SECONDS:
            raise ValueError(f"--seconds must be at least {LEAST_SECONDS:g}, not {self.seconds}")
        option_checks.require_distinct(self, ["settings"])


def run(options: Options) -> dict[str, Any]:
    link_seconds = handing_on_seconds(_real(options, "alone", ALONE)[0])
    say(f"to hand a microbatch on takes {1000 * link_seconds:.1f} ms")
    settings = {}
    for name in options.settings:
        setting = SETTINGS[name]
        rates, work = _real(options, name, setting)
        simulated, simulated_work = simulate(
            setting, options.seed, link_seconds=link_seconds, warm_up_seconds=options.warm_up_seconds,
            seconds=SIMULATED_SECONDS,
        )  # fmt: skip
        median = statistics.median(rates)
        settings[name] = {
            "real": median, "real_lowest": min(rates), "real_highest": max(rates), "simulated": simulated,
            "limit": setting.limit, "difference_percent": 100.0 * (simulated / median - 1.0),
            "work_difference_points": largest_difference_points(work, simulated_work),
        }  # fmt: skip
        say(f"{name}: {median:.2f} microbatches/s, simulated {simulated:.2f}")
    largest = max(abs(setting["difference_percent"]) for setting in settings.values())
    return {
        "largest_difference_percent": largest,
        "largest_work_difference_points": max(setting["work_difference_points"] for setting in settings.values()),
        "passed": largest <= GOAL_PERCENT, "link_seconds": link_seconds, "settings": settings,
    }  # fmt: skip


def exit_code(figures: Mapping[str, Any]) -> int:
    return int(not figures["passed"])


def handing_on_seconds(rates: Sequence[float]) -> float:
    """The time to hand a microbatch on and get the answer, without computing, from the rates of the swarm `ALONE`."""
    return max(0.0, 1 / statistics.median(rates) - ALONE.paces[0][0] * MICROBATCH_SIZE)


def largest_difference_points(one: Work, other: Work) -> float:
    """The largest difference of a peer's share of its stage's work, in percentage points."""
    return max(
        100.0 * abs(share - other_share)
        for stage, other_stage in zip(one, other, strict=True)
        for share, other_share in zip(stage, other_stage, strict=True)
    )


# -- simulated -------------------------------------------------------------------------------------------------------


class Counting(Ours):
    """Counts the answers of each peer."""

    def __init__(self, timeline: Timeline, rng: random.Random, num_answers: Counter[PeerId]) -> None:
        super().__init__(timeline, rng)
        self.num_answers = num_answers

    def succeeded(self, peer_id: PeerId, answer: Answer) -> None:
        self.num_answers[peer_id] += 1
        super().succeeded(peer_id, answer)


def simulate(
    setting: Setting, seed: int, *, link_seconds: float, warm_up_seconds: float, seconds: float
) -> tuple[float, Work]:
    """Microbatches per second of a simulated swarm with one trainer, and each peer's share of them."""
    timeline = Timeline()
    num_answers: Counter[PeerId] = Counter()

    def make_view(machine: Machine | None = None) -> View:
        who = "trainer" if machine is None else machine.peer_id
        return View(Counting(timeline, random.Random(f"{seed} {who}"), num_answers), who)

    pipeline = SimulatedPipeline(
        timeline, random.Random(seed), num_stages=len(setting.paces), num_samples=MICROBATCH_SIZE,
        max_in_flight=len(setting.paces) + 2, largest_in_flight=LARGEST_NUM_SLOTS, make_view=make_view,
    )  # fmt: skip
    peers = machines(setting, link_seconds)
    for machine in peers:
        pipeline.start(machine)
    view = make_view()

    def read_directory() -> None:
        pipeline.announce([view])
        timeline.after(DIRECTORY_SECONDS, read_directory)

    read_directory()
    trainer = SimulatedTrainer(pipeline, view, max_in_flight=setting.max_in_flight)
    trainer.fill()
    timeline.run(warm_up_seconds)
    before, answers_before = trainer.num_done, num_answers.copy()
    timeline.run(warm_up_seconds + seconds)
    answers = [
        [num_answers[machine.peer_id] - answers_before[machine.peer_id] for machine in peers if machine.stage == stage]
        for stage in range(len(setting.paces))
    ]
    return (trainer.num_done - before) / seconds, shares(answers)


def machines(setting: Setting, link_seconds: float) -> list[Machine]:
    """The peers of the simulated swarm. There a line belongs to a peer, the way between two peers is half of one line
    and half of the other, and the trainer has no line: so the lines of every second stage get the whole length."""
    return [
        Machine(
            peer_id=PeerId(f"{100 * stage + number:040x}"), stage=stage, busy_seconds=pace * MICROBATCH_SIZE,
            link_seconds=link_seconds + setting.round_trip_seconds if stage % 2 == 0 else 0.0, jitter=0.0,
        )
        for stage, peers in enumerate(setting.paces)
        for number, pace in enumerate(peers)
    ]  # fmt: skip


def shares(counts: Sequence[Sequence[int]]) -> Work:
    """The share of each peer in the work of its stage."""
    return tuple(tuple(count / max(1, sum(stage)) for count in stage) for stage in counts)


# -- real ------------------------------------------------------------------------------------------------------------


def _config(options: Options, num_stages: int) -> RunConfig:
    return RunConfig(
        run="validate",
        model=ModelConfig(
            num_layers=num_stages, d_model=32, num_heads=2, custom_class="scripts.benches.sides.paced_stage:Paced"
        ),
        stages=StagesConfig(num_stages=num_stages),
        data=DataConfig(
            dataset=options.dataset, sequence_length=32, microbatch_size=MICROBATCH_SIZE, max_tokens=1_000_000
        ),
        rounds=RoundsConfig(
            setting="diloco",
            inner_batch_samples=64 * MICROBATCH_SIZE,
            round_samples=NEVER * MICROBATCH_SIZE,
            # The simulator's peers take no steps, so they wait for none.
            max_staleness=1,
        ),
    )


def _real(options: Options, name: str, setting: Setting) -> tuple[list[float], Work]:
    """Microbatches per second of a real swarm, each time that it was measured, and each peer's share in all of them."""
    config, _ = with_corpus(_config(options, len(setting.paces)))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="validate-")))
        children = stack.enter_context(_children(setting, folder / "logs", stack))
        swarm = SwarmProcesses(config, children, folder / "run")
        say(f"{name}: peers start")
        stages = [stage for stage, peers in enumerate(setting.paces) for _ in peers]
        swarm.start_peers(stages, [{PACE: str(pace)} for peers in setting.paces for pace in peers])
        serve(swarm, swarm.peers)
        trainer = swarm.launch_trainer("trainer", NEVER, max_in_flight=setting.max_in_flight)
        runs: list[list[Watched]] = []
        for _ in range(options.repetitions):
            warm_up_seconds = 0.0 if runs else options.warm_up_seconds
            runs.append(asyncio.run(watch(swarm, warm_up_seconds=warm_up_seconds, seconds=options.seconds)))
        children.kill9(trainer)
        swarm.stop()
    rates = [rate_between_commits([one for one in watched if one.stage == 0]) for watched in runs]
    by_peer = list(zip(*runs, strict=True))
    counts = [
        [sum(one.num_committed for one in peer) for peer in by_peer if peer[0].stage == stage]
        for stage in range(len(setting.paces))
    ]
    return rates, shares(counts)


def _children(setting: Setting, log_folder: Path, stack: ExitStack) -> Supervisor:
    """The supervisor of child processes. They get lines of their own if the setting has long lines."""
    if not setting.round_trip_seconds:
        return Supervisor(log_folder)
    return Lines(log_folder, stack.enter_context(Throttle(setting.round_trip_seconds)))
