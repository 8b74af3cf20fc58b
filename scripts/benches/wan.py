"""What is left of a swarm's throughput over long and slow lines, for layers of three sizes?

Two stages of one peer and a trainer, real processes over TLS, each behind a line of so many Mb/s up and as many down
(throttle.py), so long that a call and its answer between any two of them take so much longer. Computing is a pause of
fixed length (paced_stage.py). How many microbatches are in flight is what the trainer and the peers find out.

The rows are those of the SWARM paper's table of GPU utilisation over round trips (arXiv 2301.11913, at 500 Mb/s and
without overlap). All of its figures are within a twentieth of compute / (compute + transfer + round trip), which gives
the compute and the transfer of each row: those of one forward, or one backward, of one microbatch. Here a microbatch
is one of each. So that this machine's CPU is not what limits, the lines carry a fraction of the row's bytes at the same
fraction of the speed, and of the smallest row several microbatches make one: that is a microbatch of as many more
samples, in SWARM's share as well.
"""

import asyncio
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from scripts.benches.common import BenchOptions, SwarmProcesses, say, with_corpus
from scripts.benches.lines import NEVER, Lines, serve
from scripts.benches.paced_stage import PACE, Narrow
from scripts.benches.probe import watch
from scripts.benches.throttle import Throttle
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig

PAPER_MEGABITS = 500.0
UTILISATION = {
    "base": {0: 0.180, 10: 0.118, 50: 0.0488, 100: 0.0278, 200: 0.0153},
    "xxlarge": {0: 0.321, 10: 0.289, 50: 0.201, 100: 0.149, 200: 0.101},
    "gpt3": {0: 0.821, 10: 0.793, 50: 0.703, 100: 0.602, 200: 0.485},
}
"""SWARM's, by row and milliseconds of a round trip."""
NUM_MERGED = {"base": 4, "xxlarge": 1, "gpt3": 1}
"""SWARM's microbatches in one of ours."""
ACTIVATION_BYTES = 2
"""Of one element on the wire."""
SAMPLES, TOKENS = 4, 32
"""Of a microbatch: few, since what the wire carries is the width."""

RowName = Literal["base", "xxlarge", "gpt3"]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare throughput over long and slow lines with that over lines without length."""

    rows: tuple[RowName, ...] = ("base", "xxlarge", "gpt3")
    """SWARM's rows to measure."""
    megabits: tuple[float, ...] = (500.0, 200.0, 80.0)
    """Mb/s of each process's line, up and down."""
    round_trips_ms: tuple[int, ...] = (0, 20, 100, 200)
    """Milliseconds that a call and its answer take longer; 0 is what the others are compared with."""
    scale: float = 4.0
    """The lines, and what goes over them, are so many times smaller than that."""
    warm_up_seconds: float = 25.0
    """Training before each measurement: the trainer finds out how many microbatches to keep in flight."""
    seconds: float = 20.0
    """Length of each measurement."""
    repetitions: int = 1
    """Times that each setting has its turn."""

    def __post_init__(self) -> None:
        for name in ("scale", "warm_up_seconds", "seconds", "repetitions"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be positive, not {getattr(self, name)}")
        if not self.rows or not self.megabits or min(self.megabits) <= 0:
            raise ValueError("--rows and --megabits need at least one value, and all Mb/s must be positive")
        if 0 not in self.round_trips_ms or min(self.round_trips_ms) < 0:
            raise ValueError("--round-trips-ms must contain 0, which the others are compared with, and none below it")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one forward, or one backward, of a microbatch is in one of the rows."""

    compute_seconds: float
    transfer_bytes: float

    @classmethod
    def of(cls, name: str) -> "Row":
        """From the row's figures at 0 and 100 ms."""
        at_0, at_100 = UTILISATION[name][0], UTILISATION[name][100]
        compute_seconds = NUM_MERGED[name] * 0.1 / (1 / at_100 - 1 / at_0)
        return cls(
            compute_seconds=compute_seconds,
            transfer_bytes=compute_seconds * (1 / at_0 - 1) * PAPER_MEGABITS * 1e6 / 8,
        )

    def utilisation(self, megabits: float, round_trip_seconds: float) -> float:
        """SWARM's, without overlap."""
        transfer_seconds = self.transfer_bytes * 8 / (megabits * 1e6)
        return self.compute_seconds / (self.compute_seconds + transfer_seconds + round_trip_seconds)

    def share(self, megabits: float, round_trip_seconds: float) -> float:
        """What SWARM keeps of its throughput without a round trip."""
        return self.utilisation(megabits, round_trip_seconds) / self.utilisation(megabits, 0.0)

    def limit(self, megabits: float) -> float:
        """Microbatches per second at most: either the compute or the line, in either direction, is always busy."""
        return min(0.5 / self.compute_seconds, megabits * 1e6 / 8 / self.transfer_bytes)


@dataclass
class Measured:
    """One setting of one row."""

    megabits: float
    round_trip_ms: int
    tokens_per_second: list[float] = field(default_factory=list)
    share_of_line: list[float] = field(default_factory=list)
    """Of the busiest line in its busiest direction."""


def run(options: Options) -> dict[str, Any]:
    """Measure all rows in turn; gives the figures."""
    figures = {name: _figures(name, _measure_row(options, name)) for name in options.rows}
    shares = {name: _at_100ms(rows) for name, rows in figures.items()}
    return {
        "gpt3_share_at_100ms": shares.get("gpt3"),
        "swarm_gpt3_share_at_100ms": UTILISATION["gpt3"][100] / UTILISATION["gpt3"][0],
        "worst_over_swarm": min(
            (row["share"] - row["swarm_share"] for rows in figures.values() for row in rows if row["round_trip_ms"]),
            default=None,
        ),
        "rows": figures,
        "scale": options.scale,
    }


def _at_100ms(rows: list[dict[str, float]]) -> float | None:
    """The share at 100 ms over the fastest lines that were measured."""
    found = [row for row in rows if row["round_trip_ms"] == 100]
    return max(found, key=lambda row: row["megabits"])["share"] if found else None


def _figures(name: str, measured: list[Measured]) -> list[dict[str, float]]:
    row, rows = Row.of(name), []
    for one in measured:
        (base,) = (other for other in measured if other.megabits == one.megabits and other.round_trip_ms == 0)
        seconds = one.round_trip_ms / 1000
        tokens_per_second = statistics.median(one.tokens_per_second)
        rows.append({
            "megabits": one.megabits,
            "round_trip_ms": one.round_trip_ms,
            "tokens_per_second": tokens_per_second,
            "share": tokens_per_second / statistics.median(base.tokens_per_second),
            "swarm_share": row.share(one.megabits, seconds),
            "share_of_limit": tokens_per_second / (SAMPLES * TOKENS * row.limit(one.megabits)),
            "share_of_line": statistics.median(one.share_of_line),
        })  # fmt: skip
    return rows


def _config(options: Options, name: str) -> RunConfig:
    channels = Row.of(name).transfer_bytes / options.scale / (ACTIVATION_BYTES * SAMPLES * TOKENS)
    return RunConfig(
        run=f"bench-wan-{name}",
        model=ModelConfig(
            num_layers=2, d_model=max(1, round(channels / Narrow.WIDTH)) * Narrow.WIDTH, num_heads=4, d_ff=32,
            custom_class="scripts.benches.paced_stage:Narrow",
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(
            dataset=options.dataset, sequence_length=TOKENS, microbatch_size=SAMPLES, max_tokens=4_000_000
        ),
        rounds=RoundsConfig(setting="diloco", inner_batch_samples=64 * SAMPLES, round_samples=NEVER * SAMPLES),
        wire=WireConfig(dtype="bf16"),
    )  # fmt: skip


def _measure_row(options: Options, name: str) -> list[Measured]:
    config, _ = with_corpus(_config(options, name))
    settings = [
        Measured(megabits=megabits, round_trip_ms=ms) for megabits in options.megabits for ms in options.round_trips_ms
    ]
    for _ in range(options.repetitions):
        for setting in settings:
            # A swarm of its own for each: what TCP, gRPC, peers and trainer learn of a line, they learn anew.
            with tempfile.TemporaryDirectory(prefix="bench-wan-") as folder:
                _measure(options, config, Row.of(name), setting, Path(folder))
            say(
                f"{name}, {setting.megabits:g} Mb/s, {setting.round_trip_ms} ms: "
                f"{setting.tokens_per_second[-1]:.0f} tokens/s, {setting.share_of_line[-1]:.2f} of the line"
            )
    return settings


def _measure(options: Options, config: RunConfig, row: Row, setting: Measured, folder: Path) -> None:
    bytes_per_second = setting.megabits / options.scale * 1e6 / 8
    environment = {PACE: str(2 * row.compute_seconds / SAMPLES)}
    with (
        Throttle(bytes_per_second, setting.round_trip_ms / 1000) as throttle,
        Lines(folder / "logs", throttle, environment) as children,
    ):
        swarm = SwarmProcesses(config, children, folder / "swarm")
        swarm.start_peers((0, 1))
        serve(swarm, swarm.peers)
        swarm.launch_trainer("trainer", NEVER)
        watched = asyncio.run(watch(swarm, warm_up_seconds=options.warm_up_seconds, seconds=options.seconds))
    (first,) = (one for one in watched if one.stage == 0)
    setting.tokens_per_second.append(config.data.tokens_per_microbatch * first.microbatches_per_second)
    setting.share_of_line.append(max(max(one.up, one.down) for one in watched) / bytes_per_second)
