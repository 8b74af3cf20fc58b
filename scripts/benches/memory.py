"""How much memory does a stage peer take, and for what? Compares arithmetic with what processes took.

Each case is a middle stage with two members, each a process of its own (sides/memory_stage.py). Bytes are those of the
process beyond what it had before the stage was made: while microbatches are in flight, at the peak of training, at the
peak of a round's averaging, and after it with nothing in flight. Every case is run twice: as peers run (`usual`, the C
library keeps freed memory), and with freed memory given back at once (`returning`), which shows what is really held.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from peers.shared import needs as sizes
from scripts.benches.shared import paired
from scripts.benches.shared.common import (
    OutputOptions,
    compute_like_peers,
    cpu_backend,
    require_multiple,
    run_members,
    run_of,
    say,
)
from scripts.benches.sides import memory_losses
from scripts.benches.sides.memory_stage import LAST_STAGE, MEMBERS, STAGE, WAVES, random_inputs
from swarm.config import RunConfig
from swarm.model.loss import loss_bytes
from swarm.stage.boundary import HIDDEN

SETTINGS = ("synchronous", "diloco")
GRAPH_BYTES = {"kept": 1 << 40, "recomputed": 0}  # The bytes of graphs that a peer may keep, in each mode
TURNS = 9  # Microbatches of each mode whose CPU time is measured

MALLOC: Mapping[str, Mapping[str, str]] = {"usual": {}, "returning": {"MALLOC_MMAP_THRESHOLD_": "65536"}}
"""The C library's settings for each way to allocate; see mallopt(3). Where there are none, peers make their own."""


Figures = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Compare a stage's memory with arithmetic."""

    d_model: int = 384
    """Width of the model; a multiple of 128."""
    layers: int = 4
    """Layers of the stage."""
    in_flight: int = 4
    """Microbatches, of 2 samples of 256 tokens, that wait for their gradients."""
    lora_rank: int = 0
    """Train adapters of this rank, beside weights that are frozen; 0 trains the weights."""
    moments: Literal["fp32", "int8"] = "fp32"
    """How the optimizer's moments are held."""
    versions: Literal["fp32", "bf16"] = "fp32"
    """The type of the copies that microbatches compute with."""
    losses: int = 0
    """Train a small model with each option on this many tokens instead, and compare held-out losses."""
    seeds: int = 3
    """With --losses: seeds of data and initial weights: 0, 1, ..."""
    dataset: str = "stdlib"
    """With --losses: the text to train on."""
    base: Literal["as-is", "nf4"] = "as-is"
    """With --lora-rank: how the frozen weights are held."""
    vocabulary: int = 0
    """Measure the last stage's loss instead, with a vocabulary of this many tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_multiple("d-model", self.d_model, 128)
        if self.lora_rank and self.vocabulary:
            raise ValueError("--vocabulary measures a stage whose weights are trained: leave out --lora-rank")


def run(options: Options) -> dict[str, Any]:
    if options.vocabulary:
        return loss_figures(loss_config(options))
    if options.losses:
        return held_out_losses(options)
    cases: dict[str, dict[str, Any]] = {}
    for setting in SETTINGS:
        config = run_config(setting, options)
        for graphs in GRAPH_BYTES:
            expected = expected_bytes(config, options.in_flight, is_kept=graphs == "kept")
            measured = {malloc: run_case(config, graphs, malloc, options.in_flight) for malloc in MALLOC}
            cases[f"{setting}_{graphs}"] = case = {
                "expected_bytes": expected, "measured_bytes": measured,
                "ratio": {
                    malloc: {name: figures[name] / expected[name] for name in expected}
                    for malloc, figures in measured.items()
                },
                "bytes_per_microbatch": sizes.in_flight_bytes(config, STAGE, is_kept=graphs == "kept"),
            }  # fmt: skip
            if setting == "diloco" and not options.lora_rank:
                case["device_bytes_per_parameter"] = device_bytes_per_parameter(config, measured)
            if options.lora_rank:
                case["bytes_per_frozen_parameter"] = bytes_per_frozen(config, measured)
            say(f"{setting}, graphs {graphs}: {case['ratio']}")
    config = run_config(SETTINGS[0], options)
    return {
        "cases": cases, **paired.figures({"recompute_seconds_ratio": recompute_ratio(config)}),
        "parameters": sizes.num_parameters(config, STAGE), "own_parameters": sizes.num_own_parameters(config, STAGE),
    }  # fmt: skip


def run_config(setting: str, options: Options) -> RunConfig:
    """A run in which each member has `options.in_flight` microbatches in flight, and computes WAVES times as many in a
    round."""
    wave_samples = 2 * options.in_flight
    # With a staleness of 1, one wave is always in flight while the gradients of another wave are summed up.
    return run_of(
        "memory", width=options.d_model, layers=3 * options.layers, stages=3, setting=setting, length=256, microbatch=2,
        round_samples=MEMBERS * WAVES * wave_samples, lora={"rank": options.lora_rank, "base": options.base},
        rounds={"inner_batch_samples": wave_samples, "max_staleness": 1}, optimizer={"moments": options.moments},
        model={"versions": options.versions},
    )  # fmt: skip


def run_case(config: RunConfig, graphs: str, malloc: str, num_in_flight: int) -> dict[str, Any]:
    arguments = GRAPH_BYTES[graphs], num_in_flight
    members = {number: arguments for number in range(MEMBERS)}
    return run_members("memory", config, "memory_stage", members, environment=MALLOC[malloc])[0]


def loss_config(options: Options) -> RunConfig:
    return run_of(
        "memory", width=options.d_model, layers=2 * options.layers, stages=2, setting="diloco", length=1024,
        microbatch=4, round_samples=4, model={"vocab_size": options.vocabulary},
    )  # fmt: skip


def loss_figures(config: RunConfig) -> dict[str, Any]:
    """The peak of a last stage's memory for a microbatch, beyond what the stage holds, and the part of it that the loss
    takes."""
    environment = MALLOC["returning"]
    (measured,) = run_members("memory", config, "memory_stage", {LAST_STAGE: ["loss"]}, environment=environment)
    activations = sizes.graph_bytes(config, LAST_STAGE)
    gradient = 4 * config.model.vocab_size * config.model.d_model
    expected = activations + gradient + loss_bytes(config.model, config.data.tokens_per_microbatch)
    return {
        "peak_bytes": measured["peak"], "expected_peak_bytes": expected, "peak_ratio": measured["peak"] / expected,
        "activations_bytes": activations, "head_gradient_bytes": gradient,
    }  # fmt: skip


def held_out_losses(options: Options) -> dict[str, Any]:
    """The losses of each arm, one for each seed, and the mean of its rises above those of the default."""
    compute_like_peers()
    runs = [memory_losses.losses(seed, options.losses, options.dataset) for seed in range(options.seeds)]
    rises = [memory_losses.rises(found) for found in runs]
    return {
        "losses": {name: [found[name] for found in runs] for name in runs[0]},
        "rises": {name: statistics.mean(found[name] for found in rises) for name in rises[0]},
    }


def device_bytes_per_parameter(config: RunConfig, measured: Mapping[str, Figures]) -> dict[str, float]:
    """The bytes per trained parameter of all tensors that belong to the weights, of which a GPU would hold all but the
    anchors and the outer momentum; in the middle of a round of DiLoCo, without microbatches in flight."""
    held = sizes.state_bytes(config, STAGE)
    on_cpu = held["anchors"] + held.get("outer_momentum", 0)
    found = {"expected": sum(held.values()) - held.get("frozen", 0), "measured": measured["returning"]["weights"]}
    return {name: (total - on_cpu) / sizes.num_parameters(config, STAGE) for name, total in found.items()}


def bytes_per_frozen(config: RunConfig, measured: Mapping[str, Figures]) -> float:
    """The bytes per frozen parameter once a round is over: all bytes except those of trained parameters."""
    held = sizes.state_bytes(config, STAGE)
    trained = sum(held.values()) - held.get("frozen", 0)
    taken: int = measured["returning"]["after_round"] - trained
    return taken / sizes.num_own_parameters(config, STAGE)


def expected_bytes(config: RunConfig, num_in_flight: int, *, is_kept: bool) -> dict[str, int]:
    state = sum(sizes.state_bytes(config, STAGE).values())
    size = 4 * sizes.num_parameters(config, STAGE)
    # The weights before an inner step, which microbatches in flight still use.
    delayed = 0 if config.rounds.synchronous else sizes.passing_bytes(config, STAGE) // 2
    waiting = num_in_flight * sizes.in_flight_bytes(config, STAGE, is_kept=is_kept)
    wave_settled = num_in_flight * sizes.settled_bytes(config, STAGE)
    again = 0 if is_kept else sizes.graph_bytes(config, STAGE)
    in_flight = state + delayed + waiting + wave_settled
    # At the end of a synchronous round nothing is in flight. With DiLoCo microbatches stay in flight.
    meanwhile = state + (WAVES * wave_settled if config.rounds.synchronous else delayed + waiting)
    return {
        "in_flight": in_flight,
        "training_peak": in_flight + sizes.passing_bytes(config, STAGE) + again,
        "round_peak": meanwhile + sizes.averaging_bytes(config, STAGE, num_members=MEMBERS),
        "after_round": state,
        # A copy of the anchor and the outer state, or the optimizer's.
        "snapshot": (3 if config.rounds.synchronous else 2) * size,
    }


def recompute_ratio(config: RunConfig) -> paired.Ratio:
    """CPU seconds of a microbatch whose forward is computed again, over those of one whose graph is kept; in turns."""
    compute_like_peers()
    backend = cpu_backend(config, STAGE, graph_bytes=0)
    inputs = random_inputs(config)
    # The first graph is kept, so that it can be measured.
    backend.release(backend.forward(0, 0, inputs))

    def microbatch(graphs: str, number: int) -> float:
        backend.budget.limit_bytes = GRAPH_BYTES[graphs]
        started_at = time.process_time()
        _, accumulated = backend.backward(backend.forward(0, 0, inputs), inputs[HIDDEN], accumulate=True)
        seconds = time.process_time() - started_at
        assert accumulated is not None
        backend.settle(accumulated)
        return seconds

    seconds = paired.in_turns({graphs: partial(microbatch, graphs) for graphs in GRAPH_BYTES}, TURNS)
    return paired.ratio(seconds["recomputed"], seconds["kept"])
