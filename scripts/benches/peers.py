"""Compares two stages of a swarm with what a user would otherwise choose, on the same microbatches, in turns.

    swarm     two stage peers and a trainer, over TLS; any of them may drop at any moment
    moe       two servers of hivemind.moe, driven through RemoteExpert, which compute each forward twice (sides/moe.py)
    static    torch.distributed.pipelining, 1F1B over gloo (sides/static_stage.py), which tolerates nothing

A first turn of each side, and the first step of each trainer of the swarm, are not measured.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.local.supervisor import Supervisor
from scripts.benches.shared import paired
from scripts.benches.shared.common import (
    BenchOptions,
    require_multiple,
    run_of,
    say,
    side,
    wait_for_json,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.paired import Worker, turn_seconds
from scripts.benches.shared.ports import free_ports
from scripts.benches.shared.swarm import SwarmProcesses
from swarm.config import RunConfig

NUM_STAGES = 2


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare a swarm with hivemind.moe and with a static pipeline."""

    d_model: int = 512
    """Width of the model; a multiple of 64."""
    microbatches: int = 40
    """Microbatches of 2 samples of 256 tokens in a round, which is one optimizer step, and a turn."""
    repetitions: int = 5
    """Times that each side has its turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_multiple("d-model", self.d_model, 64)


def run(options: Options) -> dict[str, Any]:
    config, _ = with_corpus(_config(options))
    tokens = config.rounds.round_samples * config.data.sequence_length
    with workplace("peers") as (folder, children):
        write_config(config, folder / "run.toml")
        say("all sides start")
        static = _start_static(folder, children)
        moe = _start_moe(folder, children)
        swarm = SwarmProcesses(config, children, folder / "swarm")
        swarm.start_peers(range(NUM_STAGES))
        sides: dict[str, Callable[[int], float]] = {
            "swarm": lambda number: swarm.tokens_per_second(f"trainer-{number}", 1),
            "moe": lambda number: tokens / max(turn_seconds([moe])),
            "static": lambda number: tokens / max(turn_seconds(static)),
        }
        say("all sides warm up")
        for warm_up in sides.values():
            warm_up(options.repetitions)
        rates = paired.in_turns(sides, options.repetitions, what="turns", unit="tokens/s")
    ratios = {
        "ratio_to_hivemind_moe": paired.ratio(rates["swarm"], rates["moe"]),
        "ratio_to_torch_pipelining": paired.ratio(rates["swarm"], rates["static"]),
    }
    return {
        **paired.figures(ratios), "tokens_per_second": paired.medians(rates), "repetitions": rates,
        "microbatches_per_round": options.microbatches,
    }  # fmt: skip


def _config(options: Options) -> RunConfig:
    # Gradients are not clipped by their norm over all stages, because the other sides do not clip.
    return run_of(
        "peers", width=options.d_model, layers=4, stages=NUM_STAGES, length=256,
        microbatch=2, round_samples=2 * options.microbatches,
        dataset=options.dataset, data={"max_tokens": 4_000_000},
        optimizer={"learning_rate": 3e-4, "clip_norm": 0.0},
    )  # fmt: skip


def _start_static(folder: Path, children: Supervisor) -> list[Worker]:
    (port,) = free_ports(1)
    workers = []
    for rank in range(NUM_STAGES):
        results = folder / f"static-{rank}"
        arguments = (folder / "run.toml", results, rank, port)
        workers.append(Worker(f"static-{rank}", side("static_stage", *arguments), results, children))
    for worker in workers:
        worker.until_stopped()
    return workers


def _start_moe(folder: Path, children: Supervisor) -> Worker:
    addresses: list[str] = []
    for stage in range(NUM_STAGES):
        ready = folder / f"moe-{stage}.json"
        children.start(f"moe-{stage}", side("moe", "stage", ready, folder / "run.toml", stage, *addresses[:1]))
        addresses.append(wait_for_json(ready, children)["addresses"][0])
    results = folder / "moe"
    command = side("moe", "train", folder / "run.toml", results, *addresses)
    trainer = Worker("moe-trainer", command, results, children)
    trainer.until_stopped()
    return trainer
