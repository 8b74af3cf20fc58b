"""Is training starved while a round is exchanged over slow links?

Two stages with two peers each and a trainer are real processes over TLS. Each is behind a home line of so many Mb/s up
and as many down (shared/throttle.py). They train the same model in three ways, in turn. Computing is a pause of fixed
length (sides/paced_stage.py), so the bench measures the lines and not the processor:

    normal      rounds so long that none ends
    overlap     round after round is averaged, and the peers go on training meanwhile
    wait        likewise, with peers that take no inner step while a round is exchanged

When a round is committed, the next one is already complete, so an exchange is under way most of the time. Tokens/s
count the microbatches that the peers of stage 0 committed, without start-up and warm-up. Delays are those of a short
call, like a heartbeat, from a further line of the same kind to every peer.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peers.shared import cli
from scripts.benches.shared.common import BenchOptions, SwarmProcesses, say, with_corpus
from scripts.benches.shared.judged import MORE
from scripts.benches.shared.lines import NEVER, Lines, serve
from scripts.benches.shared.probe import LEAST_SECONDS, Watched, longest_gap, watch
from scripts.benches.shared.throttle import Throttle
from swarm.config import (
    AveragingConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    RoundsConfig,
    RunConfig,
    StagesConfig,
    WireConfig,
)

STAGES = (0, 1, 0, 1)

JUDGED = {"ratio_to_normal": MORE}

Arm = Literal["normal", "overlap", "wait"]
Sample = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare training while rounds are exchanged over slow links with training alone."""

    megabits: float = 50.0
    """Mb/s of each process's line, up and down."""
    parameters: int = 6_000_000
    """Parameters of each stage."""
    d_model: int = 256
    """Width of the activations. With the default, sending a sample takes about as long as its pause in
    sides/paced_stage.py."""
    microbatch_size: int = 8
    """Samples in a microbatch, of 128 tokens."""
    codec: Literal["fp32", "fp16", "int8"] = "int8"
    """How pseudo-gradients travel."""
    round_samples: int = 64
    """Samples of a round."""
    overlap_steps: int = 1000
    """Inner steps that a peer may take while a round is exchanged."""
    arms: tuple[Arm, ...] = ("normal", "overlap", "wait")
    """Ways to measure; the ratios need `normal`."""
    warm_up_seconds: float = 10.0
    """Training before each measurement."""
    seconds: float = 60.0
    """Length of each measurement."""
    repetitions: int = 3
    """How many turns each arm has."""

    def __post_init__(self) -> None:
        counts = ("parameters", "d_model", "microbatch_size", "round_samples", "overlap_steps", "repetitions")
        cli.require_positive(self, ("megabits", *counts))
        if self.seconds < LEAST_SECONDS:
            raise ValueError(f"--seconds must be at least {LEAST_SECONDS:g}, not {self.seconds}")
        cli.require_distinct(self, ["arms"])


def run(options: Options) -> dict[str, Any]:
    """Measure all arms in turn, and return the figures."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-link-") as name,
        Throttle(options.megabits * 1e6 / 8) as throttle,
        Lines(Path(name) / "logs", throttle) as children,
    ):
        runs = {arm: _start(options, arm, children, Path(name) / arm) for arm in options.arms}
        samples: dict[Arm, list[Sample]] = {arm: [] for arm in options.arms}
        for repetition in range(options.repetitions):
            for arm, swarm in runs.items():
                samples[arm].append(_measure(options, swarm, f"trainer-{repetition}"))
                figures = ", ".join(f"{name} {value:.3g}" for name, value in samples[arm][-1].items())
                say(f"{arm}, {repetition + 1} of {options.repetitions}: {figures}")
        warnings = {arm: _warnings(children.folder, arm) for arm in options.arms}
        for arm, lines in warnings.items():
            for line in lines[:10]:
                say(f"{arm}: {line}")
        for swarm in runs.values():
            swarm.stop()
    return {
        "ratio_to_normal": _ratio(samples, "overlap"),
        "ratio_to_normal_without_overlap": _ratio(samples, "wait"),
        "arms": {arm: _summary(samples[arm]) | {"warnings": len(warnings[arm])} for arm in options.arms},
        "megabits": options.megabits,
        "codec": options.codec,
    }


def _config(options: Options, arm: Arm) -> RunConfig:
    return RunConfig(
        run=f"bench-link-{arm}",
        model=ModelConfig(
            num_layers=2,
            d_model=options.d_model,
            num_heads=4,
            d_ff=options.parameters // options.d_model,
            custom_class="scripts.benches.sides.paced_stage:Paced",
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(
            dataset=options.dataset, sequence_length=128, microbatch_size=options.microbatch_size, max_tokens=4_000_000
        ),
        rounds=RoundsConfig(
            setting="diloco",
            inner_batch_samples=2 * options.microbatch_size,
            # Peers should always have something to compute, because the bench measures the lines, not what is learnt.
            max_staleness=3,
            round_samples=NEVER * options.microbatch_size if arm == "normal" else options.round_samples,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        outer=OuterConfig(learning_rate=0.7, momentum=0.9),
        averaging=AveragingConfig(codec=options.codec, overlap_steps=options.overlap_steps if arm == "overlap" else 0),
        wire=WireConfig(dtype="bf16"),
    )


def _start(options: Options, arm: Arm, children: Lines, folder: Path) -> SwarmProcesses:
    config, _ = with_corpus(_config(options, arm))
    swarm = SwarmProcesses(config, children, folder)
    say(f"{arm}: 2 x 2 peers start")
    swarm.start_peers(STAGES)
    serve(swarm, swarm.peers)
    return swarm


def _measure(options: Options, swarm: SwarmProcesses, name: str) -> Sample:
    """Let a trainer feed the swarm for a while, and measure meanwhile."""
    trainer = swarm.launch_trainer(name, NEVER)
    watched = asyncio.run(watch(swarm, warm_up_seconds=options.warm_up_seconds, seconds=options.seconds))
    swarm.children.kill9(trainer)
    return _sample(options, swarm.config.data.tokens_per_microbatch, watched)


def _sample(options: Options, tokens: int, watched: Sequence[Watched]) -> Sample:
    first = [one for one in watched if one.stage == 0]
    rounds = [report for one in watched for report in one.rounds.values()]
    delays = sorted(delay for one in watched for delay in one.delays)
    line = options.megabits * 1e6 / 8
    counted = {
        name: float(sum(getattr(one.last.counters, name) - getattr(one.first.counters, name) for one in watched))
        for name in ("rolled_back", "rerouted_backwards", "busy_replies")
    }
    return {
        "tokens_per_second": tokens * sum(one.microbatches_per_second for one in first),
        "longest_gap_seconds": longest_gap(first),
        "exchange_share": sum(report.exchange_seconds for report in rounds) / (len(watched) * options.seconds),
        "exchange_seconds": statistics.median(report.exchange_seconds for report in rounds) if rounds else 0.0,
        "round_seconds": options.seconds * len(watched) / len(rounds) if rounds else 0.0,
        "round_samples": statistics.median(report.num_samples for report in rounds) if rounds else 0.0,
        "wait_seconds": statistics.median(report.wait_seconds for report in rounds) if rounds else 0.0,
        "up_use": statistics.mean(one.up for one in watched) / line,
        "down_use": statistics.mean(one.down for one in watched) / line,
        "median_delay_seconds": statistics.median(delays),
        "longest_delay_seconds": delays[-1],
        "missed_deadlines": float(sum(one.num_missed for one in watched)),
        "aborted": float(
            sum(sum(one.last.averaging.aborted.values()) - sum(one.first.averaging.aborted.values()) for one in watched)
        ),
        **counted,
    }


def _summary(samples: Sequence[Sample]) -> Sample:
    """The median of each figure over the samples. Counts of faults are summed up instead, and for longest times the
    longest is taken."""
    summary = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if name.startswith("longest"):
            summary[name] = max(values)
        elif name in ("missed_deadlines", "aborted", "rolled_back", "rerouted_backwards", "busy_replies"):
            summary[name] = sum(values)
        else:
            summary[name] = statistics.median(values)
    return summary


def _ratio(samples: Mapping[Arm, Sequence[Sample]], arm: Arm) -> float | None:
    """The arm's tokens/s over those of `normal`: the median over the repetitions."""
    if not {arm, "normal"} <= samples.keys():
        return None
    pairs = zip(samples[arm], samples["normal"], strict=True)
    return statistics.median(one["tokens_per_second"] / normal["tokens_per_second"] for one, normal in pairs)


def _warnings(folder: Path, arm: Arm) -> list[str]:
    """The warnings of an arm's peers and trainers."""
    logs = sorted(folder.glob(f"{arm}-*.log"))
    lines = [line for log in logs for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return [line for line in lines if " WARNING: " in line or " ERROR: " in line or "Traceback" in line]
