"""How much of two cores does a pipeline of two stages use?

    swarm     two stage peers with one compute thread each, and a trainer that feeds them, over TLS
    limit     two independent processes with one thread each, the whole model in both: the sum of their tokens/s
    single    one process with two threads

The sides take turns. A whole-model process computes only some microbatches of a round, and its time is scaled up.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peers.local.supervisor import Supervisor
from peers.shared.stage_choice import StagesOrAuto
from scripts.benches.shared import paired
from scripts.benches.shared.common import (
    BenchOptions,
    require_multiple,
    run_of,
    say,
    side,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.paired import Worker, turn_seconds
from scripts.benches.shared.swarm import SwarmProcesses
from swarm.config import RunConfig, Setting


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare two pipelined stages with what the cores can do."""

    d_model: tuple[int, ...] = (384, 768)
    """Widths of the model to measure; multiples of 64. There is a layer for each 64 of the width, half of them at each
    stage: 12 at 768, as in GPT-2 small, and 6 at 384, as in nanoGPT's smallest model."""
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
    repetitions: int = 3
    """Times that each side has its turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for width in self.d_model:
            require_multiple("d-model", width, 64)


def run(options: Options) -> dict[str, Any]:
    started_at = time.monotonic()
    others = {"limit": (1, 1), "single": (2,)}
    turns = {str(width): in_turns(options, width, "swarm", [0, 1], others) for width in options.d_model}

    def over(side: str) -> dict[str, paired.Ratio]:
        return {width: paired.ratio(sides["swarm"], sides[side]) for width, sides in turns.items()}

    return {
        **paired.figures({"ratio_to_limit": over("limit"), "ratio_to_single_process": over("single")}),
        "tokens_per_second": {width: paired.medians(sides) for width, sides in turns.items()}, "repetitions": turns,
        "setting": options.setting, "microbatches_per_round": options.microbatches,
        "seconds": time.monotonic() - started_at,
    }  # fmt: skip


def _microbatch_size(options: Options, d_model: int) -> int:
    return options.microbatch_size or max(1, round(4 * 768 / d_model))


def _config(options: Options, width: int) -> RunConfig:
    microbatch = _microbatch_size(options, width)
    samples = microbatch * options.microbatches
    # The learning rate is low, because with one inner step a round DiLoCo's momentum multiplies it many times.
    return run_of(
        "pipeline", width=width, layers=width // 64, stages=2, length=256, microbatch=microbatch,
        setting=options.setting, round_samples=samples, dataset=options.dataset, data={"max_tokens": 4_000_000},
        rounds={"inner_batch_samples": samples}, optimizer={"learning_rate": 3e-5, "clip_norm": 1.0},
    )  # fmt: skip


def in_turns(
    options: Options, d_model: int, name: str, peers: Sequence[int | StagesOrAuto],
    others: Mapping[str, Sequence[int]],
) -> dict[str, list[float]]:  # fmt: skip
    """The tokens/s of a swarm of these peers, by this name, and of other sides, in every turn. Another side are
    processes that train the whole model, each with so many threads."""
    config, _ = with_corpus(_config(options, d_model))
    tokens = config.rounds.round_samples * config.data.sequence_length
    with workplace("pipeline") as (folder, children):
        say(f"d_model {d_model}: processes start")
        write_config(config, folder / "run.toml")
        # All processes start at once, so that each has the same share of the cores while it imports torch and warms up.
        workers = {
            other: [_whole_model(f"{other}-{n}", each, options, children, folder) for n, each in enumerate(threads)]
            for other, threads in others.items()
        }
        swarm = SwarmProcesses(config, children, folder / "swarm")
        swarm.start_peers(peers)
        for worker in itertools.chain.from_iterable(workers.values()):
            worker.until_stopped()
        say(f"d_model {d_model}: the swarm warms up")
        swarm.train("warm-up", 1)

        def rate(side: Sequence[Worker], number: int) -> float:
            return sum(tokens / seconds for seconds in turn_seconds(side))

        sides: dict[str, Callable[[int], float]] = {
            name: lambda number: swarm.tokens_per_second(f"trainer-{number}", 1)
        }
        sides |= {other: partial(rate, side) for other, side in workers.items()}
        return paired.in_turns(sides, options.repetitions, what=f"d_model {d_model}", unit="tokens/s")


def _whole_model(name: str, threads: int, options: Options, children: Supervisor, folder: Path) -> Worker:
    numbers = (threads, min(options.sampled, options.microbatches))
    return Worker(name, side("whole_model", folder / "run.toml", folder / name, *numbers), folder / name, children)
