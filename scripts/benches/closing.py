"""Does a large stage close and commit without holding up its compute thread or its event loop?

Two members of a stage, each a process of its own (sides/closing_stage.py), average over gRPC with TLS.
"""

from dataclasses import dataclass
from typing import Any

from scripts.benches.shared.common import OutputOptions, require_at_least, require_multiple, run_members, run_of, say
from scripts.benches.sides.closing_stage import MEMBERS, MICROBATCHES
from swarm.config import RunConfig

SETTINGS = ("synchronous", "diloco")


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
        super().__post_init__()
        require_multiple("d-model", self.d_model, 128)
        require_at_least(self, {"rounds": 2})


def run(options: Options) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for setting in SETTINGS:
        members = run_case(run_config(setting, options), options.rounds)
        figures[setting] = {name: max(member[name] for member in members) for name in members[0] if name != "digests"}
        assert members[0]["digests"] == members[1]["digests"], "members hold the same state after every round"
        say(f"{setting}: {figures[setting]}")
    return {"settings": figures, "d_model": options.d_model, "layers": options.layers, "rounds": options.rounds}


def run_config(setting: str, options: Options) -> RunConfig:
    return run_of(
        "closing", width=options.d_model, layers=options.layers, setting=setting, length=16, microbatch=1,
        round_samples=MEMBERS * MICROBATCHES, rounds={"inner_batch_samples": 1},
    )  # fmt: skip


def run_case(config: RunConfig, num_rounds: int) -> list[dict[str, Any]]:
    return run_members("closing", config, "closing_stage", {number: [num_rounds] for number in range(MEMBERS)})
