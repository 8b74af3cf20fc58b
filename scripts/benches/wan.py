"""How much of its throughput does a swarm keep over long and slow lines, for layers of three sizes?

Two stages of one peer and a trainer are real processes over TLS. Each is behind a line with a rate in each direction
(shared/throttle.py). The lines add a fixed time to a call and its answer between any two of them. Computing is a pause
of fixed length (sides/paced_stage.py). The trainer and the peers find out themselves how many microbatches to keep in
flight. One swarm goes through all round trips, the shortest first, so that it has never learnt to keep more in flight
than the next round trip needs.

The rows are those of the SWARM paper's table of GPU utilisation over round trips (arXiv 2301.11913, at 500 Mb/s and
without overlap). Their compute and transfer times are those that the study `utilisation` reads off the table
(simulate/studies/utilisation.py).

This machine's CPU must not be the limit. So in the two rows whose lines would be too fast for it, lines carry only a
fraction of the row's bytes, at the same fraction of the speed. Also, several microbatches are merged into one, in
SWARM's share as well: a microbatch with as many times more samples.
"""

import asyncio
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peers.shared import cli
from scripts.benches.shared.common import BenchOptions, SwarmProcesses, say, with_corpus
from scripts.benches.shared.judged import MORE, MORE_OF_DIFFERENCE
from scripts.benches.shared.lines import NEVER, Lines, serve
from scripts.benches.shared.probe import LEAST_SECONDS, rate_between_commits, watch
from scripts.benches.shared.throttle import Throttle
from scripts.benches.sides.paced_stage import PACE, Narrow
from scripts.benches.simulate.studies.utilisation import GPU_UTILISATION, ROUND_TRIPS_MS, Layers, read_off
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig

ACTIVATION_BYTES = 2
"""Bytes of one element on the wire."""
SAMPLES, TOKENS = 4, 32
"""Samples and tokens of a microbatch. They are few, because the width makes up the bytes on the wire."""
ENOUGH = 100
"""About how many microbatches to count at least, so that one more or less changes a rate by a hundredth."""

JUDGED = {"gpt3_share_at_100ms": MORE, "worst_over_swarm": MORE_OF_DIFFERENCE, "rows.*.share": MORE}

RowName = Literal["base", "xxlarge", "gpt3"]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare throughput over long and slow lines with that over lines without length."""

    rows: tuple[RowName, ...] = ("base", "xxlarge", "gpt3")
    """SWARM's rows to measure."""
    megabits: tuple[float, ...] = (500.0, 200.0, 80.0)
    """Mb/s of each process's line, up and down."""
    round_trips_ms: tuple[int, ...] = (0, 20, 100, 200)
    """Milliseconds that are added to a call and its answer. 0 must be among them, because the others are compared with
    it."""
    warm_up_seconds: float = 25.0
    """Training before each measurement, in which the trainer finds out how many microbatches to keep in flight."""
    seconds: float = 20.0
    """Length of each measurement. It is longer if that is needed for a hundred microbatches."""
    repetitions: int = 1
    """How many turns each row and line has."""

    def __post_init__(self) -> None:
        cli.require_positive(self, ("warm_up_seconds", "repetitions"))
        if self.seconds < LEAST_SECONDS:
            raise ValueError(f"--seconds must be at least {LEAST_SECONDS:g}, not {self.seconds}")
        cli.require_distinct(self, ("rows", "megabits", "round_trips_ms"))
        if min(self.megabits) <= 0:
            raise ValueError(f"--megabits must be positive, not {min(self.megabits)}")
        if 0 not in self.round_trips_ms or min(self.round_trips_ms) < 0:
            raise ValueError("--round-trips-ms must contain 0, which the others are compared with, and none below it")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The size of a microbatch in one of the rows."""

    layers: Layers
    num_merged: int = 1
    """How many of SWARM's microbatches are merged into one of ours."""
    scale: float = 1.0
    """By how many times the lines' rate, and the bytes that go over them, are smaller than in the paper's row."""

    @property
    def compute_seconds(self) -> float:
        """How long a stage computes for a microbatch, forward and backward."""
        return self.num_merged * self.layers.compute_seconds

    @property
    def tensor_bytes(self) -> float:
        """The bytes of a microbatch's activations, and of their gradient."""
        return self.num_merged * self.layers.tensor_bytes

    def share(self, megabits: float, round_trip_seconds: float) -> float:
        """The share of its throughput that SWARM, without overlap, keeps with this round trip."""
        seconds = self.compute_seconds + 2 * self.tensor_bytes * 8 / (megabits * 1e6)
        return seconds / (seconds + round_trip_seconds)

    def limit(self, megabits: float) -> float:
        """The most microbatches per second: then the processor, or the line in one direction, is always busy."""
        return min(1 / self.compute_seconds, megabits * 1e6 / 8 / self.tensor_bytes)


def _layers(column: str) -> Layers:
    return read_off(GPU_UTILISATION[column])


ROWS: dict[RowName, Row] = {
    "base": Row(layers=_layers("base"), num_merged=8, scale=4.0),
    "xxlarge": Row(layers=_layers("xxlarge"), num_merged=2, scale=4.0),
    # GPT-3's row sends little, so its lines are as fast as SWARM's. If HTTP/2's windows were too small, this row would
    # show it.
    "gpt3": Row(layers=_layers("GPT-3")),
}
SWARM_BEST = Row(layers=_layers("Ours"))
"""The paper's own model, whose layers share their parameters, with activations of 8 bits. It keeps the most in the
paper's table."""


@dataclass
class Measured:
    """One setting of one row."""

    megabits: float
    round_trip_ms: int
    tokens_per_second: list[float] = field(default_factory=list)
    share_of_line: list[float] = field(default_factory=list)
    """How busy the busiest line was in its busiest direction, in each measurement."""


def run(options: Options) -> dict[str, Any]:
    """Measure all rows in turn, and return the figures."""
    figures = {name: _figures(ROWS[name], _measure_row(options, name)) for name in options.rows}
    return {
        "gpt3_share_at_100ms": _at_100ms(figures.get("gpt3", [])),
        "swarm_gpt3_share_at_100ms": _printed_at_100ms("GPT-3"),
        "swarm_best_share_at_100ms": _printed_at_100ms("Ours"),
        "worst_over_swarm": _worst([row for rows in figures.values() for row in rows], "swarm_share"),
        "gpt3_worst_over_swarm_best": _worst(figures.get("gpt3", []), "swarm_best_share"),
        "rows": figures,
    }


def _at_100ms(rows: list[dict[str, float]]) -> float | None:
    """The share at 100 ms, with the fastest lines that were measured."""
    found = [row for row in rows if row["round_trip_ms"] == 100]
    return max(found, key=lambda row: row["megabits"])["share"] if found else None


def _printed_at_100ms(column: str) -> float:
    cells = dict(zip(ROUND_TRIPS_MS, GPU_UTILISATION[column], strict=True))
    return cells[100] / cells[0]


def _worst(rows: list[dict[str, float]], other: str) -> float | None:
    """The smallest difference of our share minus the `other` share, over all rows with a round trip."""
    return min((row["share"] - row[other] for row in rows if row["round_trip_ms"]), default=None)


def _figures(row: Row, measured: list[Measured]) -> list[dict[str, float]]:
    rows = []
    for one in measured:
        (base,) = (other for other in measured if other.megabits == one.megabits and other.round_trip_ms == 0)
        seconds = one.round_trip_ms / 1000
        tokens_per_second = statistics.median(one.tokens_per_second)
        rows.append(
            {
                "megabits": one.megabits,
                "round_trip_ms": one.round_trip_ms,
                "tokens_per_second": tokens_per_second,
                "share": tokens_per_second / statistics.median(base.tokens_per_second),
                "swarm_share": row.share(one.megabits, seconds),
                "swarm_best_share": SWARM_BEST.share(one.megabits, seconds),
                "share_of_limit": tokens_per_second / (SAMPLES * TOKENS * row.limit(one.megabits)),
                "share_of_line": statistics.median(one.share_of_line),
            }
        )
    return rows


def _config(options: Options, name: RowName) -> RunConfig:
    row = ROWS[name]
    channels = row.tensor_bytes / row.scale / (ACTIVATION_BYTES * SAMPLES * TOKENS)
    return RunConfig(
        run=f"bench-wan-{name}",
        model=ModelConfig(
            num_layers=2,
            d_model=max(1, round(channels / Narrow.WIDTH)) * Narrow.WIDTH,
            num_heads=4,
            d_ff=32,
            custom_class="scripts.benches.sides.paced_stage:Narrow",
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(dataset=options.dataset, sequence_length=TOKENS, microbatch_size=SAMPLES, max_tokens=4_000_000),
        rounds=RoundsConfig(
            setting="diloco",
            inner_batch_samples=64 * SAMPLES,
            round_samples=NEVER * SAMPLES,
            # Peers should always have something to compute, because the bench measures the lines, not what is learnt.
            max_staleness=1,
        ),
        wire=WireConfig(dtype="bf16"),
    )


def _measure_row(options: Options, name: RowName) -> list[Measured]:
    config, _ = with_corpus(_config(options, name))
    lines = {
        megabits: [Measured(megabits=megabits, round_trip_ms=ms) for ms in sorted(options.round_trips_ms)]
        for megabits in options.megabits
    }
    for _ in range(options.repetitions):
        for settings in lines.values():
            with tempfile.TemporaryDirectory(prefix="bench-wan-") as folder:
                _measure(options, name, config, settings, Path(folder))
    return [setting for settings in lines.values() for setting in settings]


def _measure(options: Options, name: RowName, config: RunConfig, settings: list[Measured], folder: Path) -> None:
    """Measure all round trips over one line."""
    row, megabits = ROWS[name], settings[0].megabits
    bytes_per_second = megabits / row.scale * 1e6 / 8
    seconds = max(options.seconds, ENOUGH / row.limit(megabits))
    environment = {PACE: str(row.compute_seconds / SAMPLES)}
    with Throttle(bytes_per_second) as throttle, Lines(folder / "logs", throttle, environment) as children:
        swarm = SwarmProcesses(config, children, folder / "swarm")
        swarm.start_peers((0, 1))
        serve(swarm, swarm.peers)
        trainer = swarm.launch_trainer("trainer", NEVER)
        for setting in settings:
            throttle.round_trip_seconds = setting.round_trip_ms / 1000
            watched = asyncio.run(watch(swarm, warm_up_seconds=options.warm_up_seconds, seconds=seconds))
            rate = rate_between_commits([one for one in watched if one.stage == 0])
            setting.tokens_per_second.append(config.data.tokens_per_microbatch * rate)
            setting.share_of_line.append(max(max(one.up, one.down) for one in watched) / bytes_per_second)
            say(
                f"{name}, {megabits:g} Mb/s, {setting.round_trip_ms} ms: {setting.tokens_per_second[-1]:.0f} tokens/s, "
                f"{rate / row.limit(megabits):.2f} of the limit, {setting.share_of_line[-1]:.2f} of the line"
            )
        children.kill9(trainer)
        swarm.stop()
