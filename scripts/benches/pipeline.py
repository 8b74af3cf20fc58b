"""How much of two cores does a pipeline of two stages use?

    swarm     two stage peers with one compute thread each, and a trainer that feeds them, over TLS
    limit     two independent processes with one thread each, the whole model in both: the sum of their tokens/s
    single    one process with two threads

The sides take turns. A whole-model process computes only some microbatches of a round, and its time is scaled up.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.local.supervisor import Supervisor
from peers.shared import option_checks
from scripts.benches.shared import paired
from scripts.benches.shared.common import (
    BenchOptions,
    require_multiple,
    say,
    side,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.paired import Worker, turn_seconds
from scripts.benches.shared.swarm import SwarmProcesses
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, Setting, StagesConfig


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare two pipelined stages with what the cores can do."""

    d_model: tuple[int, ...] = (384, 768)
    """Widths of the model to measure; multiples of 64."""
    num_layers: int = 0
    """Layers of the model, half of them at each stage. 0 takes one layer for each 64 of the width: 12 at 768, as in
    GPT-2 small, and 6 at 384, as in nanoGPT's smallest model. The number does not change what crosses the wire."""
    microbatch_size: int = 0
    """Samples of 256 tokens in a microbatch. 0 takes 4 at width 768 and 8 at 384, so that the same number of bytes
    crosses the wire. These are the 1,024 tokens of a configuration's default, and the 2,048 tokens of the preset
    `small`."""
    setting: Setting = "diloco"
    """`diloco`, the default of runs: the pipeline is never drained. `synchronous`: it fills and drains in every round,
    so with n microbatches it reaches at best n / (n + 1) of the limit."""
    microbatches: int = 12
    """Microbatches in a round. A round is one optimizer step; with DiLoCo, one inner and one outer step."""
    sampled: int = 4
    """How many of these microbatches the other sides compute. There all microbatches take equally long."""
    warm_up: int = 1
    """Rounds of the swarm before the first repetition. The trainer of each repetition begins with one more round that
    does not count."""
    steps: int = 1
    """Rounds that each repetition measures."""
    repetitions: int = 3
    """Times that each side has its turn."""

    def __post_init__(self) -> None:
        if not self.d_model:
            raise ValueError("--d-model names no width")
        for width in self.d_model:
            require_multiple("d-model", width, 64)
            if _num_layers(self, width) < 2:
                raise ValueError(f"--num-layers must be at least 2 for two stages, not {_num_layers(self, width)}")
        least = {"microbatch_size": 0, "microbatches": 1, "sampled": 1, "warm_up": 0, "steps": 1, "repetitions": 1}
        option_checks.require_at_least(self, least)


def run(options: Options) -> dict[str, Any]:
    started_at = time.monotonic()
    turns = {str(width): _measure(options, width) for width in options.d_model}

    def over(side: str) -> dict[str, paired.Ratio]:
        return {width: paired.ratio(sides["swarm"], sides[side]) for width, sides in turns.items()}

    return {
        **paired.figures({"ratio_to_limit": over("limit"), "ratio_to_single_process": over("single")}),
        "tokens_per_second": {width: paired.medians(sides) for width, sides in turns.items()}, "repetitions": turns,
        "setting": options.setting, "microbatches_per_round": options.microbatches,
        "microbatch_size": {str(width): _microbatch_size(options, width) for width in options.d_model},
        "seconds": time.monotonic() - started_at,
    }  # fmt: skip


def _num_layers(options: Options, d_model: int) -> int:
    return options.num_layers or d_model // 64


def _microbatch_size(options: Options, d_model: int) -> int:
    return options.microbatch_size or max(1, round(4 * 768 / d_model))


def _config(options: Options, d_model: int) -> RunConfig:
    microbatch_size = _microbatch_size(options, d_model)
    round_samples = microbatch_size * options.microbatches
    return RunConfig(
        run="bench-pipeline",
        model=ModelConfig(
            num_layers=_num_layers(options, d_model), d_model=d_model, num_heads=d_model // 64, vocab_size=256
        ),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(
            dataset=options.dataset, sequence_length=256, microbatch_size=microbatch_size, max_tokens=4_000_000
        ),
        rounds=RoundsConfig(setting=options.setting, round_samples=round_samples, inner_batch_samples=round_samples),
        # The learning rate is low, because with one inner step a round DiLoCo's momentum multiplies it many times.
        optimizer=OptimizerConfig(learning_rate=3e-5, clip_norm=1.0),
    )


def _measure(options: Options, d_model: int) -> dict[str, list[float]]:
    config, _ = with_corpus(_config(options, d_model))
    tokens = options.steps * config.rounds.round_samples * config.data.sequence_length
    with workplace("pipeline") as (folder, children):
        say(f"d_model {d_model}: processes start")
        write_config(config, folder / "run.toml")
        # All processes start at once, so that each has the same share of the cores while it imports torch and warms up.
        limit = [_whole_model(f"limit-{number}", 1, options, children, folder) for number in range(2)]
        single = [_whole_model("single", 2, options, children, folder)]
        swarm = SwarmProcesses(config, children, folder / "swarm")
        swarm.start_peers([0, 1])
        for worker in (*limit, *single):
            worker.until_stopped()
        say(f"d_model {d_model}: the swarm warms up")
        if options.warm_up:
            swarm.train("warm-up", options.warm_up)
        rates = paired.in_turns(
            {
                "swarm": lambda number: swarm.tokens_per_second(f"trainer-{number}", options.steps),
                "limit": lambda number: sum(tokens / seconds for seconds in turn_seconds(limit)),
                "single": lambda number: sum(tokens / seconds for seconds in turn_seconds(single)),
            },
            options.repetitions,
            what=f"d_model {d_model}",
            unit="tokens/s",
        )
        for child in children.running:
            children.kill9(child)
    return rates


def _whole_model(name: str, threads: int, options: Options, children: Supervisor, folder: Path) -> Worker:
    numbers = (threads, options.steps, min(options.sampled, options.microbatches))
    return Worker(name, side("whole_model", folder / "run.toml", folder / name, *numbers), folder / name, children)
