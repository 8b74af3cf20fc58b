"""Does everybody do as much as he can, when peers are unequal and come and go?

Two stages of three peers and a trainer, real processes over TLS on this machine. Computing is a pause of fixed length
(paced_stage.py), so that each peer has a capacity of its own: at either stage one is three times slower than its mates.
Three times in a row it is counted what the peers commit:

    all         everybody who was there at the start
    joined      from the moment that another peer serves stage 0, and nobody waits for anything
    left        from the moment that a peer of stage 0 is told to leave

The swarm's capacity is that of the stage that has least. All of it is done by the queue of the project and, in turn, by
processes that choose peers in turn or at random (routing_program.py); slots and Busy answers are the same in all three.
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from peers.supervisor import Supervisor
from scripts.benches.common import BenchOptions, ServingPeer, SwarmProcesses, say, with_corpus
from scripts.benches.lines import NEVER
from scripts.benches.paced_stage import PACE
from scripts.benches.probe import watch
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.errors import PeerUnavailable

SLOWNESS = 3.0
"""Of the slow one of a stage."""
SAMPLES = 2
"""Of a microbatch."""

Policy = Literal["queue", "round_robin", "random"]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare the throughput of unequal peers with the sum of what each of them manages."""

    microbatch_seconds: float = 0.3
    """Computing of one microbatch at a peer that is not slow."""
    policies: tuple[Policy, ...] = ("queue", "round_robin", "random")
    """How peers are chosen; the shares of work are those of `queue`."""
    warm_up_seconds: float = 20.0
    """Training before the first of the three measurements."""
    seconds: float = 30.0
    """Length of each of them."""
    repetitions: int = 1
    """Times that each policy has its turn."""

    def __post_init__(self) -> None:
        for name in ("microbatch_seconds", "warm_up_seconds", "seconds", "repetitions"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        if not self.policies:
            raise ValueError("--policies needs at least one")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer, and how much it manages."""

    serving: ServingPeer
    microbatches_per_second: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one peer did in one of the three measurements."""

    stage: int
    capacity: float
    rate: float
    """Like the capacity, in microbatches per second."""


def run(options: Options) -> dict[str, Any]:
    """Measure all policies in turn; gives the figures."""
    measured: dict[Policy, list[list[list[Work]]]] = {policy: [] for policy in options.policies}
    with tempfile.TemporaryDirectory(prefix="bench-heterogeneous-") as name:
        for repetition in range(options.repetitions):
            for policy in options.policies:
                measured[policy].append(_measure(options, policy, Path(name) / f"{policy}-{repetition}"))
                phases = ", ".join(f"{share_of_capacity([phase]):.3f}" for phase in measured[policy][-1])
                say(f"{policy}: {phases} of the capacity")
    shares = {policy: statistics.median(map(share_of_capacity, runs)) for policy, runs in measured.items()}
    ratios = [ratio for phases in measured.get("queue", []) for phase in phases for ratio in work_over_capacity(phase)]
    return {
        "share_of_capacity": shares.get("queue"),
        "round_robin": shares.get("round_robin"),
        "random": shares.get("random"),
        "work_over_capacity_min": min(ratios, default=None),
        "work_over_capacity_max": max(ratios, default=None),
    }


def share_of_capacity(phases: Sequence[Sequence[Work]]) -> float:
    """Microbatches of the last stage, whose peers stay, over what the poorest stage could have done."""
    last = max(work.stage for work in phases[0])
    done = sum(work.rate for phase in phases for work in phase if work.stage == last)
    possible = sum(
        min(sum(work.capacity for work in phase if work.stage == stage) for stage in range(last + 1))
        for phase in phases
    )
    return done / possible


def work_over_capacity(phase: Sequence[Work]) -> list[float]:
    """Of each peer, its share of its stage's work over its share of its stage's capacity."""
    ratios = []
    for work in phase:
        mates = [other for other in phase if other.stage == work.stage]
        share = work.rate / sum(mate.rate for mate in mates)
        ratios.append(share / (work.capacity / sum(mate.capacity for mate in mates)))
    return ratios


def _config(options: Options, policy: Policy) -> RunConfig:
    return RunConfig(
        run=f"bench-heterogeneous-{policy.replace('_', '-')}",
        model=ModelConfig(
            num_layers=2, d_model=64, num_heads=4, d_ff=32, custom_class="scripts.benches.paced_stage:Narrow"
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(dataset=options.dataset, sequence_length=64, microbatch_size=SAMPLES, max_tokens=4_000_000),
        rounds=RoundsConfig(setting="diloco", inner_batch_samples=16 * SAMPLES, round_samples=NEVER * SAMPLES),
    )  # fmt: skip


def _measure(options: Options, policy: Policy, folder: Path) -> list[list[Work]]:
    """The three measurements."""
    config, _ = with_corpus(_config(options, policy))
    paces = (1.0, 1.0, 1.0, 1.0, SLOWNESS, SLOWNESS)
    with Supervisor(folder / "logs") as children:
        swarm = SwarmProcesses(config, children, folder, program=partial(_program, policy))
        say(f"{policy}: 2 x 3 peers start")
        swarm.start_peers((0, 1, 0, 1, 0, 1), [_environment(options, slowness) for slowness in paces])
        rates = [1 / (options.microbatch_seconds * slowness) for slowness in paces]
        peers = [
            Peer(serving=serving, microbatches_per_second=rate)
            for serving, rate in zip(swarm.peers, rates, strict=True)
        ]
        swarm.launch_trainer("trainer", NEVER)
        phases = [_watch(options, swarm, peers, options.warm_up_seconds)]
        joining = swarm.launch_peer(0, environment=_environment(options, 1.0))
        joined = Peer(serving=swarm.until_ready(joining, 0), microbatches_per_second=rates[0])
        phases.append(_watch(options, swarm, [*peers, joined], 0.0))
        # Not the first one: it is by whom the others came to know each other.
        leaving = peers.pop(2)
        os.kill(leaving.serving.child.pid, signal.SIGTERM)
        phases.append(_watch(options, swarm, [*peers, joined], 0.0, leaving.serving.child.name))
        return phases


def _watch(
    options: Options, swarm: SwarmProcesses, peers: Sequence[Peer], warm_up_seconds: float, leaving: str = ""
) -> list[Work]:
    def check() -> None:
        for end in swarm.children.exits():
            if end.name != leaving:
                raise PeerUnavailable(f"{end.name} ended early: {end.reason}")

    watched = asyncio.run(
        watch(
            swarm, [peer.serving for peer in peers], warm_up_seconds=warm_up_seconds, seconds=options.seconds,
            check=check,
        )
    )  # fmt: skip
    return [
        Work(stage=one.stage, capacity=peer.microbatches_per_second, rate=one.microbatches_per_second)
        for peer, one in zip(peers, watched, strict=True)
    ]


def _environment(options: Options, slowness: float) -> dict[str, str]:
    return {PACE: str(options.microbatch_seconds * slowness / SAMPLES)}


def _program(policy: Policy, name: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "scripts.benches.routing_program", policy, name, *arguments]
