"""Does every microbatch count exactly once at each stage, whatever fails?

Peers of one stage or of several are killed and replaced, or the network loses replies. Losses and final weights are
compared with a single process's, and all event logs are audited. A duplicate and a loss are planted in copies of the
logs, to show that the audit would find them.
"""

import json
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from peers.local.supervisor import Child
from peers.shared.stage_choice import StagesOrAuto
from scripts.benches.parity import BOUND, Trained, differences, train_reference, trained_by
from scripts.benches.shared.common import (
    POLL_SECONDS,
    START_SECONDS,
    BenchOptions,
    fail_on_exit,
    require_at_least,
    run_of,
    say,
    with_corpus,
    workplace,
)
from scripts.benches.shared.swarm import STALL_SECONDS, ServingPeer, SwarmProcesses, mixed_spans, stalled
from scripts.benches.shared.throttle import Lines
from scripts.benches.sides.reference import Reference
from swarm.audit.audit import audit
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded, PeerUnavailable

Scenario = Literal["kills", "pairs", "network", "spans"]
STAGES, PEERS_A_STAGE = 3, 3
SPANS: list[int | StagesOrAuto] = [*mixed_spans(STAGES, 2), "auto"]
"""The peers of the scenario `spans`. What is killed there is a process that serves several stages."""
EVERY = 2  # Steps from one fault to the next
MAX_IN_FLIGHT = 4  # Microbatches under way. There are few of them, so that joiners get enough of the cores.
HELD_SECONDS = (0.5, 2.0)
"""How long messages are held back before they are lost. By then the receiver's work has been done."""
ONE_WAY_SECONDS = 6.0
"""How long bytes pass in one direction only. This is longer than peers need to notice that a neighbour is
unreachable."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Train while faults happen, and check that every microbatch counted once."""

    scenarios: tuple[Scenario, ...] = ("kills", "pairs", "network", "spans")
    """Runs of the bench, each a swarm of its own."""
    steps: int = 40
    """Optimizer steps to train, at least four; something fails in every second one."""
    round_microbatches: int = 144
    """Microbatches of a step. A step should last at least half as long as a peer takes to join."""
    seed: int = 0
    """Seed of the choice of victims and moments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, {"steps": 4})


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
    return run_of(
        "exactly-once", width=32, layers=STAGES, head_width=16, stages=STAGES, length=32,
        microbatch=2, round_samples=2 * options.round_microbatches, dataset=options.dataset,
        data={"max_tokens": 1_000_000}, optimizer={"learning_rate": 1e-3, "clip_norm": 1.0},
    )  # fmt: skip


def _run_scenario(scenario: Scenario, options: Options, config: RunConfig, reference: Trained) -> dict[str, Any]:
    with workplace(scenario, line_seconds=0.0 if scenario == "network" else None) as (folder, children):
        swarm = SwarmProcesses(config, children, folder / scenario, logs_events=True)
        peers = SPANS if scenario == "spans" else [*range(STAGES)] * PEERS_A_STAGE
        say(f"{scenario}: peers of the stages {', '.join(map(str, peers))} start")
        for first in range(0, len(peers), STAGES):
            # Only a few are started at once, because each start takes several seconds of a core.
            swarm.start_peers(peers[first : first + STAGES])
        faulty = FaultySwarm(swarm, random.Random(f"{options.seed} {scenario}"))
        faulty.train(options.steps, FAULTS[scenario])
        trained = trained_by(swarm, options.steps)
        swarm.stop()
        logs = sorted(swarm.events.iterdir())
        report = audit(logs)
        planted = _plant(logs, folder / "planted", random.Random(options.seed))
    figures, findings = differences(trained, reference), report.findings
    exactly_once = report.proven and (findings.duplicates, findings.missing) == (0, 0)
    complete = report.rounds_committed == options.steps and report.lost_share == 0.0
    found = planted == {"duplicate": 1, "loss": 1}
    return {
        **figures, "duplicates": findings.duplicates, "missing": findings.missing, "replayed": report.replayed,
        "rolled_back": findings.rolled_back, "faults": faulty.faults.total(), "faults_by_kind": dict(faulty.faults),
        "skipped_faults": faulty.owed, "aborted_attempts": report.rounds_aborted, "audit": report.proven,
        "violations": list(findings.violations[:10]), "digests_compared": findings.digests_compared,
        "found_planted": planted,
        "passed": max(figures.values()) < BOUND and exactly_once and complete and found and faulty.was_put_to_test,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The place in a file that says that the process contributed a microbatch to a committed round."""

    path: Path
    block: str
    round: int
    accumulate: int
    ack: int


def _held(path: Path) -> list[_Held]:
    held: list[_Held] = []
    open_: defaultdict[str, dict[int, int]] = defaultdict(dict)
    acks: dict[tuple[str, int], int] = {}
    peer = ""
    for number, text in enumerate(path.read_text().splitlines()):
        event = json.loads(text)
        block = event.get("block", "")
        match event["event"]:
            case "start":
                peer = event["peer"]
                open_.clear()
            case "accumulate":
                open_[block][event["microbatch"]] = number
            case "roll_back":
                open_[block].pop(event["microbatch"], None)
            case "ack":
                acks[block, event["microbatch"]] = number
            case "commit" if peer in event["members"]:
                held += [
                    _Held(path=path, block=block, round=event["round"], accumulate=line, ack=acks[block, index])
                    for index, line in open_[block].items()
                ]
        if event["event"] in ("commit", "install"):
            open_[block].clear()
    return held


def _plant(logs: Sequence[Path], folder: Path, rng: random.Random) -> dict[str, int]:
    """Plant one duplicate and one loss in copies of the logs, and return how many of each the audit finds."""
    everything = [held for path in logs for held in _held(path)]
    stolen = rng.choice(everything)
    beside = [h for h in everything if (h.block, h.round) == (stolen.block, stolen.round) and h.path != stolen.path]
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


# -- the faults -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FaultySwarm:
    """A swarm, and the faults that happen while it trains, one in every second step. Each block of a process that is
    killed has another process that stays."""

    swarm: SwarmProcesses
    rng: random.Random
    faults: Counter[str] = field(default_factory=Counter)  # How many faults there were, by kind
    owed: int = 0  # Faults that are due but wait, because no peer can be spared at the moment
    joining: list[tuple[Child, int | StagesOrAuto]] = field(default_factory=list)
    """Peers that were started and do not serve yet, with the stages that they were told to serve."""
    _timeline: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @property
    def was_put_to_test(self) -> bool:
        """Whether all planned faults happened. A swarm without faults would prove nothing."""
        return self.faults.total() > 0 and self.owed == 0

    def train(self, steps: int, fault: Callable[["FaultySwarm"], bool]) -> None:
        """Let a trainer train this many steps, and call `fault` in every second step. Raises PeerUnavailable and
        DeadlineExceeded."""
        trainer = self.swarm.launch_trainer("trainer", steps, max_in_flight=MAX_IN_FLIGHT)
        stepped_at = time.monotonic()
        num_steps, planned, due_at = 0, 1, 0.0
        while not self.has_ended(trainer):
            now = time.monotonic()
            if (taken := len(self.swarm.steps("trainer"))) > num_steps:
                seconds, stepped_at = (now - stepped_at) / (taken - num_steps), now
                num_steps = taken
                # No fault is planned after the last step.
                while planned <= num_steps and planned < steps:
                    planned += EVERY
                    self.owed += 1
                    due_at = now + self.rng.uniform(0.0, seconds)
                    say(f"step {num_steps}, {dict(self.faults)}, {len(self.swarm.peers)} peers")
            if self.owed and now >= due_at and fault(self):
                self.owed -= 1
            for entry in [entry for entry in self._timeline if entry[0] <= now]:
                self._timeline.remove(entry)
                entry[1]()
            self._take_in()
            if now - stepped_at > STALL_SECONDS:
                raise stalled(trainer)
            time.sleep(POLL_SECONDS)
        for _, undo in self._timeline:
            undo()
        deadline = time.monotonic() + START_SECONDS
        while self.joining:
            fail_on_exit(self.swarm.children)
            self._take_in()
            if time.monotonic() > deadline:
                name = self.joining[0][0].name
                raise DeadlineExceeded(f"{name} does not serve {START_SECONDS:.0f} s after the last step")
            time.sleep(POLL_SECONDS)
        fail_on_exit(self.swarm.children)
        self.swarm.look_again()

    def has_ended(self, trainer: Child) -> bool:
        """Whether the trainer has ended without an error. Raises PeerUnavailable if any other process has ended."""
        ends = self.swarm.children.exits()
        for end in ends:
            if end.name != trainer.name or end.returncode != 0:
                raise PeerUnavailable(f"{end.name} ended early: {end.reason}")
        return bool(ends)

    def _take_in(self) -> None:
        for child, stage in list(self.joining):
            if self.swarm.ready_file(child.name).exists():
                self.joining.remove((child, stage))
                self.swarm.peers.append(self.swarm.until_ready(child, stage))

    def kill(self, victims: Collection[ServingPeer]) -> bool:
        """Kill processes at the same time, and start others like them in their place. Return False, and kill none, if
        a block would have no process left. One that was told `auto` may be about to move, and does not count."""
        staying = [peer for peer in self.swarm.peers if peer not in victims and peer.told != "auto"]
        served = {stage for peer in staying for stage in peer.stages}
        if not victims or not all(served.issuperset(victim.stages) for victim in victims):
            return False
        for victim in victims:
            self.swarm.peers.remove(victim)
            self.swarm.children.kill9(victim.child)
        self.joining += [(self.swarm.launch_peer(victim.told), victim.told) for victim in victims]
        self.faults["kill"] += len(victims)
        return True

    def kill_one(self) -> bool:
        return self.kill(self._one_of(self.rng.randrange(self.swarm.config.stages.num_stages)))

    def kill_neighbours(self) -> bool:
        stage = self.rng.randrange(self.swarm.config.stages.num_stages - 1)
        return self.kill([*self._one_of(stage), *self._one_of(stage + 1)])

    def kill_span(self) -> bool:
        self.swarm.look_again()
        spans = [peer for peer in self.swarm.peers if len(peer.stages) > 1]
        return self.kill(self.rng.sample(spans, min(1, len(spans))))

    def _one_of(self, stage: int) -> list[ServingPeer]:
        peers = [peer for peer in self.swarm.peers if stage in peer.stages]
        return self.rng.sample(peers, min(1, len(peers)))

    def disturb(self) -> bool:
        """For a while, lose a process's answers or acknowledgements, or let bytes pass in one direction only."""
        lines = self.swarm.children
        assert isinstance(lines, Lines)
        stage = self.rng.randrange(self.swarm.config.stages.num_stages)
        target = self.rng.choice([peer for peer in self.swarm.peers if stage in peer.stages])
        callers = [peer.child.name for peer in self.swarm.peers if stage - 1 in peer.stages]
        caller = lines.links[self.rng.choice(callers or [f"{self.swarm.folder.name}-trainer"])]
        callee = lines.links[target.child.name]
        kind = self.rng.choice(["lost_replies", "lost_acks", "one_way"])
        self.faults[kind] += 1
        ends = (caller, callee) if kind == "lost_acks" else (callee, caller)
        if kind == "one_way" and self.rng.random() < 0.5:
            ends = ends[::-1]
        lines.throttle.hinder(*ends)
        seconds = ONE_WAY_SECONDS if kind == "one_way" else self.rng.uniform(*HELD_SECONDS)

        def end() -> None:
            if kind != "one_way":
                lines.throttle.break_connections(caller, callee)
            lines.throttle.clear(*ends)

        self._timeline.append((time.monotonic() + seconds, end))
        return True


FAULTS: dict[Scenario, Callable[[FaultySwarm], bool]] = {
    "kills": FaultySwarm.kill_one, "pairs": FaultySwarm.kill_neighbours, "network": FaultySwarm.disturb,
    "spans": FaultySwarm.kill_span,
}  # fmt: skip
