"""What does it cost that a process serves its stages one by one, and not the whole model at once?

    span      one swarm-peer that serves both stages with one thread, and a trainer that feeds it, over TLS
    single    one process with one thread, which trains the whole model

The sides take turns of one round, as in the bench `pipeline`, whose model and options these are.
"""

import time
from typing import Any

from peers.shared.option_types import Span
from scripts.benches import pipeline
from scripts.benches.shared import paired
from scripts.benches.shared.common import say, with_corpus, workplace, write_config
from scripts.benches.shared.paired import turn_seconds
from scripts.benches.shared.swarm import SwarmProcesses


class Options(pipeline.Options):
    """Compare a peer that serves two stages with one process that trains the whole model."""


def run(options: Options) -> dict[str, Any]:
    started_at = time.monotonic()
    turns = {str(width): _measure(options, width) for width in options.d_model}
    ratios = {width: paired.ratio(sides["span"], sides["single"]) for width, sides in turns.items()}
    return {
        **paired.figures({"ratio_to_single_process": ratios}),
        "tokens_per_second": {width: paired.medians(sides) for width, sides in turns.items()}, "repetitions": turns,
        "setting": options.setting, "microbatches_per_round": options.microbatches,
        "seconds": time.monotonic() - started_at,
    }  # fmt: skip


def _measure(options: Options, d_model: int) -> dict[str, list[float]]:
    config, _ = with_corpus(pipeline.config_of(options, d_model))
    tokens = config.rounds.round_samples * config.data.sequence_length
    with workplace("spans") as (folder, children):
        say(f"d_model {d_model}: processes start")
        write_config(config, folder / "run.toml")
        single = pipeline.whole_model("single", 1, options, children, folder)
        swarm = SwarmProcesses(config, children, folder / "swarm")
        swarm.start_peers([Span(0, 1)])
        single.until_stopped()
        say(f"d_model {d_model}: the swarm warms up")
        swarm.train("warm-up", 1)
        return paired.in_turns(
            {
                "span": lambda number: swarm.tokens_per_second(f"trainer-{number}", 1),
                "single": lambda number: tokens / max(turn_seconds([single])),
            },
            options.repetitions,
            what=f"d_model {d_model}",
            unit="tokens/s",
        )
