"""Does every peer do as much as it can, if peers are unequal and come and go?

Two stages of three peers and a trainer are real processes over TLS on this machine. Computing is a pause of fixed
length (sides/paced_stage.py), so that each peer has a capacity of its own. At each stage one peer is three times slower
than the other two. The peers of stage 1 are twice as fast as those of stage 0. So stage 0 always limits the swarm,
whose possible throughput rises and falls with the peers of stage 0. The microbatches that these commit are counted
three times in a row:

    all         all peers that were there at the start
    joined      from the moment that another peer serves stage 0, without waiting for anything
    left        from the moment that a peer of stage 0 is told to leave

The three measurements are made with the project's queue, and then with processes that choose peers in turn or at random
(sides/routing_program.py). Slots and Busy answers are the same with all three.
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from peers.local.supervisor import Supervisor
from peers.shared import cli
from scripts.benches.shared.common import BenchOptions, ServingPeer, SwarmProcesses, fail_on_exit, say, with_corpus
from scripts.benches.shared.judged import LESS, MORE
from scripts.benches.shared.lines import NEVER
from scripts.benches.shared.probe import LEAST_SECONDS, watch
from scripts.benches.sides.paced_stage import PACE
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.errors import DeadlineExceeded

SLOWNESS = 3.0
"""How many times slower the slow peer of a stage is."""
ADVANTAGE = 2.0
"""How many times faster the peers of stage 1 are. They stay faster even when a peer joins stage 0."""
SAMPLES = 2
"""Samples of a microbatch."""
GOAL = 0.95
"""The share of the capacity that is to be reached."""
LEAST_WORK, MOST_WORK = 0.75, 1.3
"""The bounds of a peer's work, relative to its share by capacity. A peer with less is starved: for a quarter of the
time it has no work while the others have. A peer with a third more does work for which others were waiting. Narrower
bounds would fail because of rounding (a slow peer does about a hundred microbatches), and because it takes seconds
until a new peer is known."""

JUDGED = {"passed": MORE, "share_of_capacity": MORE, "work_over_capacity_min": MORE, "work_over_capacity_max": LESS}

Policy = Literal["queue", "round_robin", "random"]
PHASES = ("all", "joined", "left")


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare the throughput of unequal peers with the sum of their capacities."""

    microbatch_seconds: float = 0.3
    """Computing of one microbatch at a peer of stage 0 that is not slow."""
    policies: tuple[Policy, ...] = ("queue", "round_robin", "random")
    """How peers are chosen; the shares of work are those of `queue`."""
    warm_up_seconds: float = 20.0
    """Training before the first of the three measurements."""
    seconds: float = 30.0
    """Length of each measurement."""
    repetitions: int = 1
    """How many turns each policy has."""

    def __post_init__(self) -> None:
        cli.require_positive(self, ("microbatch_seconds", "warm_up_seconds", "repetitions"))
        if self.seconds < LEAST_SECONDS:
            raise ValueError(f"--seconds must be at least {LEAST_SECONDS:g}, not {self.seconds}")
        cli.require_distinct(self, ["policies"])


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer and its capacity."""

    serving: ServingPeer
    microbatches_per_second: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one peer of the slowest stage in one of the three measurements."""

    peer: str
    capacity: float
    rate: float
    """The peer's rate in microbatches per second, like the capacity."""


def run(options: Options) -> dict[str, Any]:
    """Measure all policies in turn, and return the figures."""
    measured: dict[Policy, list[list[list[Work]]]] = {policy: [] for policy in options.policies}
    with tempfile.TemporaryDirectory(prefix="bench-heterogeneous-") as name:
        for repetition in range(options.repetitions):
            for policy in options.policies:
                measured[policy].append(_measure(options, policy, Path(name) / f"{policy}-{repetition}"))
                phases = ", ".join(f"{share_of_capacity([phase]):.3f}" for phase in measured[policy][-1])
                say(f"{policy}: {phases} of the capacity")
    shares = {policy: statistics.median(map(share_of_capacity, runs)) for policy, runs in measured.items()}
    return {
        **judge(
            shares.get("queue"), [ratio for phases in measured.get("queue", []) for ratio in work_over_capacity(phases)]
        ),
        "round_robin": shares.get("round_robin"),
        "random": shares.get("random"),
        "phases": {
            policy: {
                phase: statistics.median(share_of_capacity([phases[number]]) for phases in runs)
                for number, phase in enumerate(PHASES)
            }
            for policy, runs in measured.items()
        },
    }


def judge(share: float | None, ratios: Sequence[float]) -> dict[str, Any]:
    """The figures of the queue, and whether they reach the goal; None for each if the queue was not measured."""
    least, most = min(ratios, default=None), max(ratios, default=None)
    passed = None
    if share is not None and least is not None and most is not None:
        passed = share >= GOAL and least >= LEAST_WORK and most <= MOST_WORK
    return {
        "share_of_capacity": share,
        "work_over_capacity_min": least,
        "work_over_capacity_max": most,
        "passed": passed,
    }


def share_of_capacity(phases: Sequence[Sequence[Work]]) -> float:
    """The work that the peers did, over the work that they could have done, in measurements of equal length."""
    done = sum(work.rate for phase in phases for work in phase)
    return done / sum(work.capacity for phase in phases for work in phase)


def work_over_capacity(phases: Sequence[Sequence[Work]]) -> list[float]:
    """The work of each peer over its share by capacity, in the measurements during which it was there.

    Raises:
        DeadlineExceeded: no peer did anything.
    """
    done: defaultdict[str, float] = defaultdict(float)
    part: defaultdict[str, float] = defaultdict(float)
    for phase in phases:
        if not (rate := sum(work.rate for work in phase)):
            raise DeadlineExceeded("no microbatch was committed: measure for longer; is the machine busy?")
        capacity = sum(work.capacity for work in phase)
        for work in phase:
            done[work.peer] += work.rate
            part[work.peer] += rate * work.capacity / capacity
    return [done[peer] / part[peer] for peer in done]


def _config(options: Options, policy: Policy) -> RunConfig:
    return RunConfig(
        run=f"bench-heterogeneous-{policy.replace('_', '-')}",
        model=ModelConfig(
            num_layers=2, d_model=64, num_heads=4, d_ff=32, custom_class="scripts.benches.sides.paced_stage:Narrow"
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(dataset=options.dataset, sequence_length=64, microbatch_size=SAMPLES, max_tokens=4_000_000),
        rounds=RoundsConfig(
            setting="diloco",
            inner_batch_samples=16 * SAMPLES,
            round_samples=NEVER * SAMPLES,
            # Peers should always have something to compute, because the bench measures which peer gets the work, not
            # what is learnt.
            max_staleness=3,
        ),
    )


def paces(options: Options) -> list[tuple[int, float]]:
    """The peers at the start: the stage of each, and its seconds for a microbatch."""
    slownesses = ((0, 1.0), (1, 1.0), (0, 1.0), (1, 1.0), (0, SLOWNESS), (1, SLOWNESS))
    advantages = (1.0, ADVANTAGE)
    return [(stage, options.microbatch_seconds * slowness / advantages[stage]) for stage, slowness in slownesses]


def _measure(options: Options, policy: Policy, folder: Path) -> list[list[Work]]:
    """Make the three measurements."""
    config, _ = with_corpus(_config(options, policy))
    with Supervisor(folder / "logs") as children:
        swarm = SwarmProcesses(config, children, folder, program=partial(_program, policy))
        say(f"{policy}: 2 x 3 peers start")
        start = paces(options)
        swarm.start_peers([stage for stage, _ in start], [_environment(seconds) for _, seconds in start])
        poor = [
            Peer(serving=serving, microbatches_per_second=1 / seconds)
            for serving, (stage, seconds) in zip(swarm.peers, start, strict=True)
            if stage == 0
        ]
        trainer = swarm.launch_trainer("trainer", NEVER)
        phases = [_watch(options, swarm, poor, warm_up_seconds=options.warm_up_seconds)]
        joining = swarm.launch_peer(0, environment=_environment(options.microbatch_seconds))
        swarm.peers.append(swarm.until_ready(joining, 0))
        poor.append(Peer(serving=swarm.peers[-1], microbatches_per_second=1 / options.microbatch_seconds))
        phases.append(_watch(options, swarm, poor))
        # The first peer is not the one that leaves, because the others found each other through it.
        leaving = poor.pop(1).serving
        swarm.peers.remove(leaving)
        os.kill(leaving.child.pid, signal.SIGTERM)
        phases.append(_watch(options, swarm, poor, leaving=leaving.child.name))
        children.kill9(trainer)
        swarm.stop()
    return phases


def _watch(
    options: Options, swarm: SwarmProcesses, peers: Sequence[Peer], *, warm_up_seconds: float = 0.0, leaving: str = ""
) -> list[Work]:
    watched = asyncio.run(
        watch(
            swarm,
            [peer.serving for peer in peers],
            warm_up_seconds=warm_up_seconds,
            seconds=options.seconds,
            check=partial(fail_on_exit, swarm.children, but=leaving),
        )
    )
    return [
        Work(peer=peer.serving.child.name, capacity=peer.microbatches_per_second, rate=one.microbatches_per_second)
        for peer, one in zip(peers, watched, strict=True)
    ]


def _environment(seconds: float) -> dict[str, str]:
    return {PACE: str(seconds / SAMPLES)}


def _program(policy: Policy, name: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "scripts.benches.sides.routing_program", policy, name, *arguments]
