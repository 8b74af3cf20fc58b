"""Does a large stage close and commit without holding up its compute thread or its event loop?

Two members of a stage, each a process of its own (sides/closing_stage.py), average over gRPC with TLS.
"""

from dataclasses import dataclass
from typing import Any

from peers.shared import option_checks
from scripts.benches.shared.common import (
    OutputOptions,
    require_multiple,
    say,
    side,
    wait_for_json,
    workplace,
    write_config,
)
from scripts.benches.sides.closing_stage import MEMBERS, MICROBATCHES
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig

SETTINGS = ("synchronous", "diloco")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # One thread, as in swarm-peer
CASE_SECONDS = 900.0  # A case that takes longer than this is stuck


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Measure for how long the end of a round blocks a large stage."""

    d_model: int = 1024
    """Width of the model; a multiple of 128."""
    layers: int = 8
    """Layers of the stage, which is the whole model: with the usual width it has 100 million parameters."""
    rounds: int = 4
    """Rounds to commit. The first one does not count, because memory is allocated in it."""

    def __post_init__(self) -> None:
        require_multiple("d-model", self.d_model, 128)
        option_checks.require_at_least(self, {"layers": 1, "rounds": 2})


def run(options: Options) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for setting in SETTINGS:
        members = run_case(run_config(setting, options), options.rounds)
        figures[setting] = {name: max(member[name] for member in members) for name in members[0] if name != "digests"}
        assert members[0]["digests"] == members[1]["digests"], "members hold the same state after every round"
        say(f"{setting}: {figures[setting]}")
    return {"settings": figures, "d_model": options.d_model, "layers": options.layers, "rounds": options.rounds}


def run_config(setting: str, options: Options) -> RunConfig:
    """A run whose only stage is the whole model."""
    return RunConfig(
        run="bench-closing",
        model=ModelConfig(num_layers=options.layers, d_model=options.d_model, num_heads=options.d_model // 64),
        stages=StagesConfig(num_stages=1),
        data=DataConfig(sequence_length=16, microbatch_size=1),
        rounds=RoundsConfig(
            setting="synchronous" if setting == "synchronous" else "diloco",
            round_samples=MEMBERS * MICROBATCHES,
            inner_batch_samples=1,
        ),
    )


def run_case(config: RunConfig, num_rounds: int) -> list[dict[str, Any]]:
    with workplace("closing") as (folder, children):
        write_config(config, folder / "run.toml")
        for number in range(MEMBERS):
            command = side("closing_stage", folder, number, num_rounds)
            children.start(f"member-{number}", command, environment=ENVIRONMENT)
        return [
            wait_for_json(folder / f"{number}.json", children, timeout_seconds=CASE_SECONDS)
            for number in range(MEMBERS)
        ]
