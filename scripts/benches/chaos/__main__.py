"""scripts/chaos: a real swarm under a storm of faults, and whether it keeps its promises.

    scripts/chaos --setting synchronous --minutes 15 --faults-per-hour 400 --seed 0 --json

Faults of all kinds come as a Poisson process to real processes, whose calls go through a proxy. Before each part of the
storm and after the last one, the swarm trains undisturbed. At the end the audit reads all event logs. Computing is
mostly a pause of fixed length, so that many peers fit on few cores and a peer's capacity is its own.
"""

import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.local.supervisor import Supervisor
from peers.shared import process, stopping
from scripts.benches.chaos import figures
from scripts.benches.chaos.cast import Cast
from scripts.benches.chaos.faults import KINDS
from scripts.benches.chaos.figures import Struck
from scripts.benches.menu import run_module
from scripts.benches.shared.common import (
    POLL_SECONDS,
    BenchOptions,
    require_known,
    run_of,
    say,
    with_corpus,
    write_config,
)
from scripts.benches.shared.swarm import mixed_spans
from scripts.benches.shared.throttle import Throttle
from scripts.benches.sides.paced_stage import PACE
from swarm.config import RunConfig, Setting

PARTS = 3  # The number of parts of a storm
STAGES, PEERS_A_STAGE, TRAINERS = 3, 3, 2
SETTLING_SECONDS = 30.0
"""Time at the start, and after each part of the storm, in which all processes come back."""
DISK_MIB = 64
SECONDS_PER_SAMPLE = 0.2
"""How long a peer computes for a sample. At 0.1 and at 0.15 two slow cores were busy for two thirds of the time before
anything had gone wrong, and for all of it while peers started."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Train a local swarm under faults of all kinds."""

    setting: Setting = "synchronous"
    """Which of the two ways to train."""
    minutes: float = 15.0
    """Length of the storm, its parts together."""
    faults_per_hour: float = 400.0
    """Mean rate of faults, all kinds together."""
    seed: int = 0
    """Which faults, when, and which processes they hit."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Which kinds of fault to have."""
    spans: bool = False
    """Let some peers serve several stages, and one choose its own."""
    calibration_seconds: float = 60.0
    """Undisturbed training before each part of the storm and after the last: its rate is the yardstick."""
    keep: Path | None = None
    """Keep logs and event files in this new folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(self, "kinds", KINDS)
        if self.keep is not None and self.keep.exists():
            raise ValueError(f"--keep {self.keep}: is there already; name a new folder")


def run(options: Options) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        disk = stack.enter_context(_small_disk(folder / "disk"))
        throttle = stack.enter_context(Throttle())
        children = stack.enter_context(Supervisor(folder / "logs", grace_seconds=20.0))
        kinds = [name for name in options.kinds if disk is not None or KINDS[name].hits != "disk"]
        config, _ = with_corpus(_config(options))
        write_config(config, folder / "run.toml")
        (folder / "checkpoints").mkdir()
        cast = Cast(
            folder=folder, config=folder / "run.toml", children=children, throttle=throttle,
            environment={PACE: str(SECONDS_PER_SAMPLE)}, disk=disk or folder / "checkpoints",
            checkpoint_every=1 if options.setting == "synchronous" else 5, allow_class=config.own_classes,
        )  # fmt: skip
        peers = [*mixed_spans(STAGES, 2), "auto"] if options.spans else [*range(STAGES)] * PEERS_A_STAGE
        cast.add(STAGES, peers, TRAINERS)
        say(f"peers of the stages {', '.join(map(str, peers))} and {TRAINERS} trainers start")
        cast.begin()
        _wait(cast, SETTLING_SECONDS)
        calm = [_wait(cast, options.calibration_seconds)]
        storm: list[figures.Window] = []
        struck: list[Struck] = []
        draws = random.Random(options.seed)
        for part in range(PARTS):
            say(f"the storm's part {part + 1} of {PARTS} begins")
            began_at = time.monotonic()
            struck += _storm(cast, options, kinds, draws)
            storm.append((began_at, time.monotonic()))
            say("all is quiet")
            _wait(cast, SETTLING_SECONDS)
            calm.append(_wait(cast, options.calibration_seconds))
        # A window's rate is counted up to the first commit after the window.
        _wait(cast, SETTLING_SECONDS)
        unexpected = [dataclasses.asdict(end) for end in cast.unexpected]
        children.terminate_all(20.0)
        return {
            **figures.of(cast, options.setting, calm=calm, storm=storm, struck=struck),
            "unexpected_exits": unexpected,
            "trainer_exits": sum(end["name"].startswith("trainer") for end in unexpected),
            "left_out": sorted(set(options.kinds) - set(kinds)),
        }


def exit_code(found: dict[str, Any]) -> int:
    return int(not figures.passed(found))


def _config(options: Options) -> RunConfig:
    synchronous = options.setting == "synchronous"
    # In the synchronous setting each round ends with the replays of what was lost in it, so it is longer. With DiLoCo a
    # dead peer's work of the round is gone. A staleness of 3 lets peers always have something to compute, since this
    # measures the cost of faults and not what is learnt.
    return run_of(
        "chaos", width=32, layers=STAGES, head_width=16, stages=STAGES, setting=options.setting, length=32,
        microbatch=4, round_samples=128 if synchronous else 64, dataset=options.dataset,
        model={"custom_class": "scripts.benches.sides.paced_stage:PacedTransformer"}, data={"max_tokens": 1_000_000},
        rounds={"inner_batch_samples": 8, "max_staleness": 3}, optimizer={"learning_rate": 1e-3},
        outer={"learning_rate": 0.7, "momentum": 0.0 if synchronous else 0.6},
        averaging={"codec": "fp32" if synchronous else "int8"},
    )  # fmt: skip


def _wait(cast: Cast, seconds: float) -> tuple[float, float]:
    """Leave the swarm alone for a while. Return the times at which this began and ended."""
    began_at = time.monotonic()
    while time.monotonic() < began_at + seconds:
        cast.tick()
        time.sleep(POLL_SECONDS)
    return began_at, time.monotonic()


def _storm(cast: Cast, options: Options, kinds: list[str], draws: random.Random) -> list[Struck]:
    """Run one part of the storm: faults begin until its time is over. All of them have ended when this returns."""
    weights = [KINDS[name].weight for name in kinds]
    struck: list[Struck] = []
    lasting: list[tuple[float, ExitStack]] = []
    mean_gap = 3600.0 / options.faults_per_hour
    now = time.monotonic()
    end, next_at = now + 60.0 * options.minutes / PARTS, now + draws.expovariate(1.0 / mean_gap)
    while now < end:
        if now >= next_at:
            next_at += draws.expovariate(1.0 / mean_gap)
            name = draws.choices(kinds, weights)[0]
            undo = ExitStack()
            victims = KINDS[name].begin(cast, draws, undo)
            seconds = draws.uniform(*KINDS[name].seconds)
            lasting.append((now + seconds, undo))
            struck.append(Struck(kind=name, at=now, seconds=seconds, names=tuple(v.name for v in victims)))
            say(f"{end - now:.0f} s left: {name} for {seconds:.0f} s: {', '.join(struck[-1].names[:2]) or 'nobody'}")
        for over in [one for one in lasting if now >= one[0]]:
            lasting.remove(over)
            over[1].close()
        cast.tick()
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
    for _, undo in lasting:
        undo.close()
    return struck


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system that can be filled without harm; None where this user may not mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        say("no full disks: only root may mount a small one")
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def main() -> int:
    return run_module("scripts/chaos", sys.modules[__name__], sys.argv[1:], is_about_speed=True)


if __name__ == "__main__":
    process.prepare_environment()
    sys.exit(stopping.run_program("scripts/chaos", main))
