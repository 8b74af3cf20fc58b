"""How much sooner does a model reach a loss over a thin line when fewer bytes cross it?

    none, int8        all columns of the residual stream travel, as float32 or as 8-bit numbers
    fixed_64, ...     a bottleneck of each kind, with as many numbers as fit into a 64th of float32's bytes
    nothing           the layers behind the line alone, trained as a model of their own

The speed is that of two `swarm-peer`s, each in a network namespace behind a line of so many megabits a second each way,
and of a trainer beside the first one. The losses are those of one process that takes the same steps and rounds where
these stages do. An arm's seconds to a loss are its tokens until then, over its tokens/s. Whether the goal is reached is
judged only after LEAST_STEPS, and if a model to which nothing crosses the line loses clearly. Needs root and iproute2.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from scripts.benches import blocks
from scripts.benches.learning import seconds_until
from scripts.benches.nat import Hosted, invite_of, wait_for
from scripts.benches.shared.common import (
    START_SECONDS,
    BenchOptions,
    compute_like_peers,
    require_at_least,
    require_distinct,
    require_multiple,
    run_of,
    say,
    with_corpus,
    workplace,
)
from scripts.benches.shared.internet import Internet, missing
from scripts.benches.shared.swarm import SwarmProcesses
from swarm.config import RunConfig
from swarm.stage.boundary import Boundary, boundary_of

LENGTH = 256
MICROBATCHES = 8  # of one sample, in a step
WARM_UP, MEASURED = 2, 6  # Steps of each swarm
POINTS = 6  # How often an arm's held-out loss is measured
NUM_HELD_OUT = 64
HIGHEST_RISE = 0.01
LEAST_STEPS = 160
LEAST_RISE_OF_NOTHING = 0.03  # With less, the first stage hardly matters, and so no line to it
JUDGED = ("none", "int8", *(f"{kind}_64" for kind in blocks.BOTTLENECKS))
GOAL_OF = ("learned_64", "anchored_64")


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare what may travel between two stages over a thin line."""

    d_model: int = 512
    """Width of the model; a multiple of 64."""
    layers: int = 2
    """Layers of the model, half of them at each stage."""
    megabits: float = 20.0
    """Rate of each stage's line, in megabits per second each way."""
    compressions: tuple[int, ...] = (64,)
    """How many times fewer bytes than float32's cross a bottleneck."""
    wire: Literal["fp32", "fp16", "int8"] = "int8"
    """Type of the numbers that cross a bottleneck: of smaller ones there are more in as many bytes."""
    steps: int = 256
    """Steps of 2,048 tokens for which each arm trains, for its loss."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What steps the weights."""
    seed: int = 0
    """Seed of the data's order and of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_multiple("d-model", self.d_model, 64)
        require_multiple("layers", self.layers, 2)
        require_at_least(self, {"steps": POINTS})
        require_distinct(self, ("compressions",))


def run(options: Options) -> dict[str, Any]:
    """Measure all arms. Raises OSError if this machine cannot have network namespaces."""
    if lack := missing():
        raise OSError(f"no network namespaces: {lack}")
    started = time.monotonic()
    compute_like_peers(num_threads=2)
    arms: dict[str, dict[str, Any]] = {}
    for name, config in configs(options):
        rate = _tokens_per_second(config, options.megabits)
        say(f"{name}: {rate:,.0f} tokens/s over {options.megabits:g} Mb/s")
        curve = _curve(name, config, options.steps)
        arms[name] = {
            "bytes_a_token": boundary_of(config).spec(1, LENGTH).num_bytes / LENGTH,
            "numbers_a_token": config.model.hidden_width, "tokens_per_second": rate, "held_out_loss": curve[-1][1],
            "curve": [(tokens := iteration * MICROBATCHES * LENGTH, tokens / rate, loss) for iteration, loss in curve],
        }  # fmt: skip
    nothing = _curve("nothing", _config(options, "fp32", layers=options.layers // 2, stages=1), options.steps)[-1][1]
    return compared(arms, nothing, options.steps) | {"steps": options.steps, "seconds": time.monotonic() - started}


def compared(arms: dict[str, dict[str, Any]], nothing: float, steps: int) -> dict[str, Any]:
    """Compare the arms with each other, and with the held-out loss of a model to which nothing crosses the line."""
    none = arms["none"]
    # An arm may diverge, which is its result.
    common = max(filter(math.isfinite, (arm["held_out_loss"] for arm in arms.values())), default=math.nan)
    for arm in arms.values():
        arm["times_fewer_bytes"] = none["bytes_a_token"] / arm["bytes_a_token"]
        arm["loss_over_none"] = arm["held_out_loss"] / none["held_out_loss"] - 1
        arm["seconds_to_common_loss"] = seconds_until(arm["curve"], common)
        both = none["seconds_to_common_loss"], arm["seconds_to_common_loss"]
        arm["times_as_fast_to_common_loss"] = both[0] / both[1] if None not in both else None
    found = {"arms": arms, "common_loss": common, "nothing_over_none": nothing / none["held_out_loss"] - 1}
    if unjudged := _why_unjudged(arms, found["nothing_over_none"], steps):
        return found | {"passed": None, "unjudged": unjudged}
    return found | {"passed": any(arms[name]["loss_over_none"] <= HIGHEST_RISE for name in GOAL_OF)}


def _why_unjudged(arms: dict[str, dict[str, Any]], nothing_over_none: float, steps: int) -> str:
    """Why the losses do not say whether the goal is reached; empty if they do."""
    if lacking := [name for name in JUDGED if name not in arms or not math.isfinite(arms[name]["held_out_loss"])]:
        return f"there is no loss of {', '.join(lacking)}"
    if steps < LEAST_STEPS:
        return f"{steps} steps are fewer than {LEAST_STEPS}"
    if not nothing_over_none >= LEAST_RISE_OF_NOTHING:
        return (
            f"where nothing crosses the line the loss is only {nothing_over_none:.1%} above that of none, and not "
            f"{LEAST_RISE_OF_NOTHING:.0%}: train for more steps"
        )
    return ""


def _curve(name: str, config: RunConfig, steps: int) -> list[tuple[int, float]]:
    config, data = with_corpus(config)
    return blocks.curve(name, config, data, steps, points=POINTS, num_held_out=NUM_HELD_OUT)


def configs(options: Options) -> Iterator[tuple[str, RunConfig]]:
    yield "none", _config(options, "fp32")
    yield "int8", _config(options, "int8")
    for compression, kind in itertools.product(options.compressions, blocks.BOTTLENECKS):
        width = _width(options, compression)
        yield f"{kind}_{compression}", _config(options, options.wire, bottleneck_dim=width, bottleneck=kind)


def _width(options: Options, compression: int) -> int:
    """How many numbers a token fit into that part of float32's bytes."""
    most = 4 * options.d_model * LENGTH / compression
    fitting = [
        width for width in range(1, options.d_model)
        if Boundary(encoding=options.wire, width=width).spec(1, LENGTH).num_bytes <= most
    ]  # fmt: skip
    if not fitting:
        raise ValueError(f"--compressions {compression}: not even one number a token would be left of {options.wire}")
    return fitting[-1]


def _config(options: Options, wire: str, *, layers: int = 0, stages: int = 2, **model: Any) -> RunConfig:
    config = run_of(
        "thin-lines", width=options.d_model, layers=layers or options.layers, stages=stages, length=LENGTH,
        microbatch=1, round_samples=MICROBATCHES, dataset=options.dataset, data={"seed": options.seed},
        wire={"dtype": wire},
        optimizer={
            "name": options.optimizer, "learning_rate": 1e-3, "clip_norm": 1.0, "schedule": "constant",
            "warmup_samples": 16 * MICROBATCHES,
        },
    )  # fmt: skip
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def _tokens_per_second(config: RunConfig, megabits: float) -> float:
    config, _ = with_corpus(config)
    with workplace("thin-lines") as (folder, children), Internet() as internet:
        swarm, hosted = SwarmProcesses(config, children, folder / "swarm"), Hosted(children, folder)
        swarm.prepare()
        first, second = internet.public_host(), internet.public_host()
        for host in (first, second):
            internet.limit(host, megabits)
        begun = hosted.peer(first, "stage-0", ["--config", swarm.folder / "run.toml", "--stage", 0])
        wait_for(begun, hosted.ready("stage-0").exists, seconds=START_SECONDS)
        invite = invite_of(begun)
        joined = hosted.peer(second, "stage-1", [invite, "--stage", 1])
        wait_for(joined, hosted.ready("stage-1").exists, seconds=START_SECONDS)
        told = ["--steps", WARM_UP + MEASURED, "--output", swarm.folder / "trainer", "--evaluate-every", 0]
        trainer = hosted.start(first, "trainer", "trainer", [invite, *told, "--evaluation-samples", 1])
        swarm.until_ended(trainer, "trainer")
        rows = swarm.steps("trainer")[WARM_UP:]
    seconds: float = sum(row["train/step_time"] for row in rows)
    return len(rows) * MICROBATCHES * LENGTH / seconds
