"""Does every microbatch count exactly once at each stage, whatever fails?

Peers are killed and replaced, or the network loses replies. Losses and final weights are compared with a single
process's, and all event logs are audited. A duplicate and a loss are planted in copies of the logs, to show that the
audit would find them.
"""

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from peers.local.supervisor import Supervisor
from peers.shared import option_checks
from scripts.benches.parity import BOUND, Trained, differences, download_weights, train_reference
from scripts.benches.shared.common import BenchOptions, say, with_corpus
from scripts.benches.shared.swarm import Lines, SwarmProcesses, serve
from scripts.benches.shared.throttle import Throttle
from scripts.benches.sides.faulty_swarm import FaultySwarm
from scripts.benches.sides.reference import Reference
from swarm.audit.audit import audit
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.rpc.channels import ChannelPool

Scenario = Literal["kills", "pairs", "network"]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Train while faults happen, and check that every microbatch counted once."""

    scenarios: tuple[Scenario, ...] = ("kills", "pairs", "network")
    """Runs of the bench, each a swarm of its own."""
    stages: int = 3
    """Stages of the swarm."""
    peers_per_stage: int = 3
    """Peers that serve each stage."""
    steps: int = 40
    """Optimizer steps to train; something fails in every second one."""
    round_microbatches: int = 144
    """Microbatches of a step. A step should last at least half as long as a peer takes to join."""
    seed: int = 0
    """Seed of the choice of victims and moments."""

    def __post_init__(self) -> None:
        option_checks.require_at_least(self, {"stages": 2, "peers_per_stage": 2, "steps": 4, "round_microbatches": 2})
        if not self.scenarios:
            raise ValueError("--scenarios needs at least one name")


FAULTS: dict[Scenario, Callable[[FaultySwarm], bool]] = {
    "kills": FaultySwarm.kill_one,
    "pairs": FaultySwarm.kill_neighbours,
    "network": FaultySwarm.disturb,
}


def run(options: Options) -> dict[str, Any]:
    torch.set_num_threads(1)
    config, data = with_corpus(_config(options))
    say(f"reference: {options.steps} steps in one process")
    reference = train_reference(Reference(config, data), options.steps, {})
    results = {scenario: _run_scenario(scenario, options, config, reference) for scenario in options.scenarios}

    def over_all(name: str, combine: Callable[[Iterable[Any]], Any]) -> Any:
        return combine(result[name] for result in results.values())

    return {
        **{name: over_all(name, max) for name in ("max_weight_rel_diff", "max_loss_rel_diff")},
        **{name: over_all(name, sum) for name in ("duplicates", "missing", "replayed", "rolled_back", "faults")},
        "audit": over_all("audit", all), "passed": over_all("passed", all), "scenarios": results,
    }  # fmt: skip


def _config(options: Options) -> RunConfig:
    return RunConfig(
        run="bench-exactly-once",
        model=ModelConfig(num_layers=max(3, options.stages), d_model=32, num_heads=2, vocab_size=256),
        stages=StagesConfig(num_stages=options.stages),
        data=DataConfig(dataset=options.dataset, sequence_length=32, microbatch_size=2, max_tokens=1_000_000),
        rounds=RoundsConfig(setting="synchronous", round_samples=2 * options.round_microbatches),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=1.0),
    )


def _run_scenario(scenario: Scenario, options: Options, config: RunConfig, reference: Trained) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix=f"bench-{scenario}-") as name,
        Throttle() as throttle,
        Lines(Path(name) / "logs", throttle) if scenario == "network" else Supervisor(Path(name) / "logs") as children,
    ):
        swarm = SwarmProcesses(config, children, Path(name) / scenario, logs_events=True)
        say(f"{scenario}: {options.stages} x {options.peers_per_stage} peers start")
        for _ in range(options.peers_per_stage):
            # Peers are started one after another, because each start takes several seconds of a core.
            swarm.start_peers(range(options.stages))
        serve(swarm, swarm.peers)
        faulty = FaultySwarm(swarm, random.Random(f"{options.seed} {scenario}"))
        faulty.train(options.steps, FAULTS[scenario])
        say(f"{scenario}: the weights are downloaded")
        trained = Trained(
            losses=[row["train/loss"] for row in swarm.steps("trainer")],
            weights=asyncio.run(_weights(swarm, options.steps)),
        )
        swarm.stop()
        logs = sorted(swarm.events.iterdir())
        report = audit(logs)
        planted = _plant(logs, Path(name) / "planted", random.Random(options.seed))
    figures = differences(trained, reference)
    found = planted["duplicate"] == 1 and planted["loss"] == 1
    findings = report.findings
    exactly_once = report.proven and (findings.duplicates, findings.missing) == (0, 0)
    complete = report.rounds_committed == options.steps and report.lost_share == 0.0
    return {
        **figures, "duplicates": findings.duplicates, "missing": findings.missing, "replayed": report.replayed,
        "rolled_back": findings.rolled_back, "faults": faulty.faults.total(), "faults_by_kind": dict(faulty.faults),
        "skipped_faults": faulty.owed, "aborted_attempts": report.rounds_aborted, "audit": report.proven,
        "violations": list(findings.violations[:10]), "digests_compared": findings.digests_compared,
        "found_planted": planted,
        "passed": max(figures.values()) < BOUND and exactly_once and complete and found and _was_put_to_test(faulty),
    }  # fmt: skip


def _was_put_to_test(faulty: FaultySwarm) -> bool:
    """Whether all planned faults happened. A swarm without faults would prove nothing."""
    return faulty.faults.total() > 0 and faulty.owed == 0


async def _weights(swarm: SwarmProcesses, steps: int) -> list[dict[str, torch.Tensor]]:
    channels = ChannelPool()
    weights = [await download_weights(swarm.config, peer.record, steps, channels) for peer in swarm.peers]
    await channels.close()
    return weights


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The place in a file that says that the process contributed a microbatch to a committed round."""

    path: Path
    stage: int
    round: int
    accumulate: int
    ack: int


def _held(path: Path) -> list[_Held]:
    held: list[_Held] = []
    open_: dict[int, int] = {}
    acks: dict[int, int] = {}
    stage, peer = -1, ""
    for number, text in enumerate(path.read_text().splitlines()):
        event = json.loads(text)
        match event["event"]:
            case "start":
                stage, peer = event["stage"], event["peer"]
            case "accumulate":
                open_[event["microbatch"]] = number
            case "roll_back":
                open_.pop(event["microbatch"], None)
            case "ack":
                acks[event["microbatch"]] = number
            case "commit" if peer in event["members"]:
                held += [
                    _Held(path=path, stage=stage, round=event["round"], accumulate=line, ack=acks[index])
                    for index, line in open_.items()
                ]
        if event["event"] in ("commit", "install", "start"):
            open_.clear()
    return held


def _plant(logs: Sequence[Path], folder: Path, rng: random.Random) -> dict[str, int]:
    """Plant one duplicate and one loss in copies of the logs, and return how many of each the audit finds."""
    everything = [held for path in logs for held in _held(path)]
    stolen = rng.choice(everything)
    beside = [h for h in everything if (h.stage, h.round) == (stolen.stage, stolen.round) and h.path != stolen.path]
    if not beside:
        return _plant(logs, folder, rng)
    thief = rng.choice(beside)
    shutil.copytree(logs[0].parent, folder)
    lines = stolen.path.read_text().splitlines()
    others = thief.path.read_text().splitlines()
    copied = json.loads(lines[stolen.accumulate]) | {"bucket": json.loads(others[thief.accumulate])["bucket"]}
    others[thief.accumulate : thief.accumulate] = [json.dumps(copied), lines[stolen.ack]]
    (folder / thief.path.name).write_text("\n".join(others) + "\n")
    duplicates = audit(sorted(folder.iterdir())).findings.duplicates
    shutil.copy(thief.path, folder)
    kept = [text for number, text in enumerate(lines) if number not in (stolen.accumulate, stolen.ack)]
    (folder / stolen.path.name).write_text("\n".join(kept) + "\n")
    return {"duplicate": duplicates, "loss": audit(sorted(folder.iterdir())).findings.missing}
