"""What does it cost a run if several peers join at once through one donor behind a slow line?

There are two stages with one peer each and a trainer. Each process is on a host of its own in a small internet
(shared/internet.py), and they talk over real TCP. The peer of stage 1, the donor, is behind a line of `--megabits` in
each direction. Computing is a pause of fixed length (sides/paced_stage.py), and sending a microbatch takes most of a
step, so the bench measures the line. Then `--joiners` peers join stage 1 at the same moment, by their invite. The donor
has to send its state to each of them; some of it may come from joiners that already have it.

`slowdown` is the time of a step while they join, over the time of a step before. `serves_seconds` has for each joiner
the time from its start until it serves, or null if it does not come to serve. `num_bans` counts the views of
swarm-status in which anybody had banned the donor (`bans` has who, and why), and `num_silent` the views in which the
donor did not answer. `proven` is the audit's verdict on all event logs at the end.

If a joiner does not come to serve, or if the audit refutes the run, the logs of all processes are kept in the folder
that `logs` names. With `--folder` they are always kept.

With `--joiners 1 --joiner-megabits 1` the joiner's line is the slow one, and `said` has what the joiner logs about it.
Needs root, iproute2 and nftables.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peers.local.supervisor import Child, Supervisor
from peers.shared import cli
from scripts.benches.shared.common import BenchOptions, fail_on_exit, say, write_config
from scripts.benches.shared.hosted import Hosted, invite_of, wait_for
from scripts.benches.shared.internet import Internet, missing
from scripts.benches.shared.judged import LESS
from scripts.benches.sides.paced_stage import PACE, Paced
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig
from swarm.metrics import log as metrics_log

JUDGED = {"slowdown": LESS, "num_bans": LESS}
POLL_SECONDS = 0.2
FIRST_STEP_SECONDS = 120.0
MANY_STEPS = 1_000_000
SECONDS_PER_SAMPLE = 0.005
"""How long each stage computes for a sample."""
TOLD = ("behind", "take part", "takes part", "installed the snapshot", "looks again")
"""Words that mark the log lines in which a joiner reports its progress."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Measure what joiners cost a run whose donor has a slow line."""

    joiners: int = 4
    """Peers that join at once."""
    megabits: float = 20.0
    """Mb/s of the donor's line, up and down."""
    joiner_megabits: float = 1000.0
    """Mb/s of each joiner's."""
    setting: Literal["synchronous", "diloco"] = "synchronous"
    """How rounds are averaged."""
    parameters: int = 2_000_000
    """Parameters of each stage; a joiner fetches 12 bytes for each."""
    d_model: int = 256
    """Width of the activations."""
    round_samples: int = 256
    """Samples of a round, in microbatches of 8 with 128 tokens."""
    before_seconds: float = 40.0
    """How long training is measured before the joiners start, and after all of them serve."""
    limit_seconds: float = 300.0
    """How long to wait for joiners."""
    folder: Path | None = None
    """Folder in which the files of all processes are kept."""

    def __post_init__(self) -> None:
        cli.require_at_least(self, {"joiners": 1})
        cli.require_positive(
            self, ["megabits", "joiner_megabits", "parameters", "d_model", "round_samples", "limit_seconds"]
        )
        cli.require_positive(self, ["before_seconds"])


def run(options: Options) -> dict[str, Any]:
    """Run the bench, and return its figures. Raises OSError if this machine cannot have network namespaces."""
    if lack := missing():
        raise OSError(f"no network namespaces: {lack}")
    folder, figures = options.folder or Path(tempfile.mkdtemp(prefix="bench-joining-")), dict[str, Any]()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Supervisor(folder / "logs", grace_seconds=0.0) as children, Internet() as internet:
            hosted = Hosted(children, folder, {PACE: str(SECONDS_PER_SAMPLE)})
            figures = _Run(options, hosted, internet).figures()
    finally:
        if options.folder is None and figures.get("proven") and None not in figures["serves_seconds"]:
            shutil.rmtree(folder)
        else:
            say(f"the logs are in {folder / 'logs'}, and the event logs beside it")
    return figures | {"logs": str(folder / "logs") if folder.exists() else ""}


def config_of(options: Options) -> RunConfig:
    """A run whose stages have one layer each, and compute next to nothing."""
    return RunConfig(
        run="bench-joining",
        model=ModelConfig(
            num_layers=2,
            d_model=options.d_model,
            num_heads=4,
            d_ff=options.parameters // options.d_model,
            custom_class=f"{Paced.__module__}:{Paced.__name__}",
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(dataset=options.dataset, sequence_length=128, microbatch_size=8, max_tokens=1_000_000),
        rounds=RoundsConfig(
            setting=options.setting, round_samples=options.round_samples, inner_batch_samples=options.round_samples
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        wire=WireConfig(dtype="bf16"),
    )


class _Run:
    """One run, from its first peer to its audit."""

    def __init__(self, options: Options, hosted: Hosted, internet: Internet) -> None:
        self._options = options
        self._hosted = hosted
        self._internet = internet
        self._config = config_of(options)
        self._donor_host, self._home = internet.public_host(), internet.public_host()
        self._metrics = hosted.folder / "trainer" / "metrics.jsonl"

    def figures(self) -> dict[str, Any]:
        """Make the run, and return its figures."""
        options, invite = self._options, self._start()
        before = self._steps_within(options.before_seconds)
        looks = self._hosted.start(self._home, "status", "status", [invite, "--watch", "--json"])
        began_at, first = time.monotonic(), self._num_steps()
        joiners = [self._join(invite, number) for number in range(options.joiners)]
        served = self._until_all_serve(joiners, began_at)
        joining = self._step_seconds(first, time.monotonic() - began_at)
        after = self._steps_within(options.before_seconds)
        for child in self._hosted.children.running:
            self._hosted.children.kill9(child)
        return {
            "slowdown": joining / before,
            "step_seconds": {"before": before, "joining": joining, "after": after},
            "longest_step_seconds": max((row["train/step_time"] for row in self._rows()[first:]), default=None),
            "serves_seconds": [served.get(joiner.name) for joiner in joiners],
            **self._of_donor(looks),
            "said": {joiner.name: _told(joiner) for joiner in joiners},
            "proven": self._is_proven(),
        }

    def _start(self) -> str:
        """Start two peers and a trainer, and return the invite."""
        file, options = self._hosted.folder / "run.toml", self._options
        write_config(self._config, file)
        first = self._hosted.serving_peer(self._home, "first", ["--config", file, "--stage", 0])
        invite = invite_of(first)
        allowed = ["--allow-class", self._config.model.custom_class]
        self._hosted.serving_peer(self._donor_host, "donor", [invite, "--stage", 1, *allowed])
        self._internet.limit(self._donor_host, options.megabits)
        own = ["--name", "trainer", "--output", self._metrics.parent, "--evaluate-every", 0, "--steps", MANY_STEPS]
        events = ["--events", self._hosted.folder / "events" / "trainer.jsonl", "--evaluation-samples", 8]
        trainer = self._hosted.start(self._internet.public_host(), "trainer", "trainer", [invite, *own, *events])
        wait_for(trainer, lambda: self._num_steps() >= 2, seconds=FIRST_STEP_SECONDS)
        return invite

    def _join(self, invite: str, number: int) -> Child:
        host = self._internet.public_host()
        self._internet.limit(host, self._options.joiner_megabits)
        allowed = ["--allow-class", self._config.model.custom_class]
        return self._hosted.peer(host, f"joiner-{number}", [invite, "--stage", 1, *allowed])

    def _until_all_serve(self, joiners: Sequence[Child], began_at: float) -> dict[str, float]:
        """Wait until all joiners serve. Return for each the time when it began to serve; joiners that were too late are
        left out."""
        served: dict[str, float] = {}
        while len(served) < len(joiners) and time.monotonic() - began_at < self._options.limit_seconds:
            fail_on_exit(self._hosted.children)
            for joiner in joiners:
                if joiner.name not in served and self._hosted.ready(joiner.name).exists():
                    served[joiner.name] = time.monotonic() - began_at
                    say(f"{joiner.name} serves after {served[joiner.name]:.1f} s")
            time.sleep(POLL_SECONDS)
        return served

    def _steps_within(self, seconds: float) -> float:
        """The seconds of a step, measured over the next `seconds`."""
        first, began_at = self._num_steps(), time.monotonic()
        while (passed := time.monotonic() - began_at) < seconds:
            fail_on_exit(self._hosted.children)
            time.sleep(POLL_SECONDS)
        step_seconds = self._step_seconds(first, passed)
        say(f"a step takes {step_seconds:.2f} s")
        return step_seconds

    def _step_seconds(self, first: int, seconds: float) -> float:
        """The seconds of a step, over the steps from number `first` on. If there is no step, the whole time counts as
        one."""
        return seconds / max(1, self._num_steps() - first)

    def _rows(self) -> list[dict[str, Any]]:
        rows = metrics_log.read(self._metrics) if self._metrics.exists() else []
        return [row for row in rows if "train/loss" in row]

    def _num_steps(self) -> int:
        return len(self._rows())

    def _of_donor(self, looks: Child) -> dict[str, Any]:
        """The figures about the donor, from all views of swarm-status."""
        lines = looks.log.read_text(encoding="utf-8").splitlines()[:-1]
        views = [json.loads(line) for line in lines if line.startswith("{")]
        num_bans, num_silent, reasons = 0, 0, set[str]()
        for view in views:
            peers = [peer for stage in view["stages"] for peer in stage["peers"]]
            donor = next((peer for peer in peers if peer["name"] == "donor"), None)
            num_silent += donor is None or donor["state"] == "unreachable"
            found = [
                f"{one['name']}: {ban['reason']}"
                for one in (*peers, *view["trainers"])
                for ban in one["bans"]
                if donor is not None and ban["peer_id"] == donor["peer_id"]
            ]
            num_bans += bool(found)
            reasons |= set(found)
        return {"num_looks": len(views), "num_bans": num_bans, "num_silent": num_silent, "bans": sorted(reasons)}

    def _is_proven(self) -> bool:
        logs = sorted((self._hosted.folder / "events").iterdir())
        child = self._hosted.start(self._home, "audit", "status", ["--json", "--audit", *logs])
        wait_for(child, lambda: any(end.name == child.name for end in self._hosted.children.exits()))
        report: dict[str, Any] = json.loads(child.log.read_text(encoding="utf-8").splitlines()[-1])
        if not report["proven"]:
            say(f"the audit refutes it: {report}")
        return bool(report["proven"])


def _told(joiner: Child) -> list[str]:
    lines = joiner.log.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if any(words in line for words in TOLD)][:20]
