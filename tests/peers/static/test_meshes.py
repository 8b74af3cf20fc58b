"""Every mesh of swarm-static takes the steps that one process takes."""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared.common import with_corpus, write_config
from scripts.benches.shared.ports import free_ports
from scripts.benches.sides.reference import Reference
from swarm.config import DataConfig, LoraConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.metrics import read as read_metrics

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
STEPS = 20
FEWER_STEPS = 5
"""Warm-up takes two of them."""
CONFIG = RunConfig(
    run="meshes",
    model=ModelConfig(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, dropout=0.1, tied_embeddings=True),
    stages=StagesConfig(num_stages=2),
    data=DataConfig(sequence_length=16, microbatch_size=2, max_tokens=100_000),
    # An odd number of microbatches, so that workers have different numbers of them.
    rounds=RoundsConfig(setting="synchronous", round_samples=10),
    optimizer=OptimizerConfig(
        learning_rate=1e-2, schedule="cosine", warmup_samples=20, total_samples=400, weight_decay=0.1, clip_norm=0.5
    ),
)
OTHER_SWITCHES = dataclasses.replace(
    CONFIG,
    model=ModelConfig(
        num_layers=2, d_model=32, num_heads=2, norm="layer", positions="learned", max_positions=16, feed_forward="gelu",
        qkv_bias=True, attention_output_bias=True, feed_forward_bias=True, gradient_checkpointing=True,
    ),
)  # fmt: skip
BLOCK_TYPES = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, num_layers=3, block_types=("parallel", "tp", "spd"), num_shards=2),
    stages=StagesConfig(num_stages=1),
)
OTHER_BLOCK_TYPES = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(
        OTHER_SWITCHES.model, num_layers=3, num_heads=4, block_types=("parallel", "parallel", "spd"), num_shards=4
    ),
)
ADAPTERS = dataclasses.replace(CONFIG, lora=LoraConfig(rank=4, targets=("all-linear",)))
MUON = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, name="muon", learning_rate=5e-3))
COMPILED = ("--compile", "on")
HEAD_NORMS = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, qk_norm=True, dropout=0.0))


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, and the run that goes through it."""

    num_workers: int
    options: tuple[str, ...]
    config: RunConfig = CONFIG

    @property
    def name(self) -> str:
        """The name of the case's files."""
        model = self.config.model
        switches = model.norm, str(model.qk_norm), str(model.num_shards), str(self.config.lora.rank)
        return "-".join([*(o.strip("-") for o in self.options), self.config.optimizer.name, *switches])


CASES = [
    [Case(4, ("--dp", "2", "--tp", "2"))],
    [Case(2, ("--dp", "2")), Case(2, ("--fsdp", "zero3"))],
    [Case(1, ()), Case(2, ("--pp", "2"))],
]
MORE_CASES = [
    [Case(2, ("--tp", "2")), Case(2, ("--tp", "2"), BLOCK_TYPES)],
    [Case(4, ("--dp", "2", "--pp", "2"))],
    [Case(4, ("--tp", "2", "--fsdp", "zero3"))],
    [Case(4, ("--pp", "2", "--fsdp", "zero3"))],
    [Case(4, ("--pp", "2", "--tp", "2"))],
    [Case(4, ("--pp", "2", "--tp", "2"), OTHER_BLOCK_TYPES)],
    [Case(4, ("--dp", "2", "--tp", "2"), BLOCK_TYPES)],
    [Case(4, ("--tp", "2", "--fsdp", "zero3"), BLOCK_TYPES)],
    [Case(2, ("--fsdp", "zero3"), ADAPTERS), Case(2, ("--tp", "2"), ADAPTERS)],
    [Case(2, ("--fsdp", "zero2"), OTHER_SWITCHES), Case(2, ("--tp", "2"), OTHER_SWITCHES)],
    [Case(1, (), OTHER_SWITCHES), Case(1, COMPILED, HEAD_NORMS), Case(2, ("--tp", "2"), HEAD_NORMS)],
    [Case(2, ("--tp", "2", *COMPILED), HEAD_NORMS), Case(2, ("--fsdp", "zero3", *COMPILED), HEAD_NORMS)],
    [Case(2, ("--pp", "2", *COMPILED), HEAD_NORMS)],
    [Case(2, ("--dp", "2"), OTHER_SWITCHES), Case(2, ("--pp", "2"), OTHER_SWITCHES)],
    [Case(2, ("--fsdp", "zero3"), MUON), Case(2, ("--tp", "2"), MUON)],
    [Case(4, ("--tp", "2", "--fsdp", "zero2"), MUON)],
    [Case(4, ("--dp", "2", "--tp", "2", "--dtype", "fp16"))],
    [Case(2, ("--fsdp", "zero2", "--dtype", "fp16")), Case(2, ("--pp", "2", "--dtype", "fp16"))],
    [Case(4, ("--pp", "2", "--fsdp", "zero3", "--dtype", "bf16"))],
]


def run_cases(cases: Sequence[Sequence[Case]], folder: Path, num_steps: int) -> None:
    """Run all of them, in one set of processes."""
    ports = iter(free_ports(sum(map(len, cases))))
    told = []
    for groups in cases:
        first, told_groups = 0, []
        for case in groups:
            write_config(case.config, folder / f"{case.name}.toml")
            argv = ["--config", str(folder / f"{case.name}.toml"), "--steps", str(num_steps), *case.options]
            argv += ["--metrics", str(folder / case.name / "metrics.jsonl"), "--evaluate-every", "0"]
            told_groups.append((first, case.num_workers, next(ports), [*argv, "--threads", "1"]))
            first += case.num_workers
        told.append(told_groups)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(ROOT / "tests/support/static_worker.py")]
    logs = folder / "logs"
    with Supervisor(logs, grace_seconds=0.0) as children:
        children.start("workers", [*command, str(logs), json.dumps(told)], environment=environment)
        while not (ended := children.exits()):
            time.sleep(0.05)
    assert ended[0].returncode == 0, "\n\n".join(log.read_text() for log in sorted(logs.iterdir()))


def figures(case: Case, folder: Path, name: str) -> Mapping[int, float]:
    """One figure by step, from the case's metrics."""
    rows = read_metrics(folder / case.name / "metrics.jsonl")
    return {row["step"]: row[name] for row in rows if name in row}


@pytest.mark.timeout(300)
def test_meshes_follow_one_process(tmp_path: Path) -> None:
    check(CASES, tmp_path, FEWER_STEPS)
    # With each of three microbatches FSDP gathers weights twice and scatters gradients, which is half of a sum each.
    summed, gathered = (figures(case, tmp_path, "averaging/bytes") for case in CASES[1])
    assert [gathered[step] for step in gathered] == [9 / 2 * summed[step] for step in summed]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", MORE_CASES, ids=lambda cases: "+".join(case.name for case in cases))
def test_all_other_meshes_do_too(cases: Sequence[Case], tmp_path: Path) -> None:
    check([cases], tmp_path)


def check(cases: Sequence[Sequence[Case]], tmp_path: Path, num_steps: int = STEPS) -> None:
    """Run them, and compare their losses with those of one process."""
    run_cases(cases, tmp_path, num_steps)
    expected = {}
    for case in (case for groups in cases for case in groups):
        if case.config not in expected:
            config, data = with_corpus(case.config)
            reference = Reference(config, data)
            expected[case.config] = {step + 1: reference.step(step) for step in range(num_steps)}
        bounds = (5e-3, 0.0) if "--dtype" in case.options else (0.0, 1e-4)
        assert figures(case, tmp_path, "train/loss") == pytest.approx(expected[case.config], *bounds), case.name
