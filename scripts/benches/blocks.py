"""How much does a model's loss rise when the shards of its layers exchange less, or when fewer numbers travel between
its stages?"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from scripts.benches.nanogpt import BATCH, shakespeare
from scripts.benches.shared.common import BenchOptions, compute_like_peers, require_distinct, say, with_corpus
from scripts.benches.sides.reference import NUM_SAMPLES, HeldOut, Model, Reference, is_point
from swarm.config import RunConfig, StagesConfig, WireConfig
from swarm.data.microbatches import Microbatches
from swarm.model.adapters import trained_parameters
from swarm.model.shards import stretches
from swarm.model.stages import Transformer, build_transformer
from swarm.stage.boundary import Boundary, boundary_of
from swarm.stage.staging import staging_of
from swarm.training.optimizers import gradient_optimizer

ARMS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",) * 4, "spd": ("spd",) * 4, "parallel": ("parallel",) * 4,
    "tp_ends": ("tp", "parallel", "parallel", "tp"),
}  # fmt: skip
LARGEST_DIFFERENCE = 0.02
BOTTLENECKS = ("fixed", "learned", "anchored")


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Train nanoGPT's Shakespeare model with each block type, or with bottlenecks of each kind."""

    dataset: str = field()
    """nanoGPT's Shakespeare text, a file, or another text."""
    iterations: int = 1000
    """Batches of 12 samples."""
    shards: int = 2
    """Shards of each layer: 2 or 4."""
    seed: int = 0
    """Seed of the data's order and of the initial weights."""
    bottleneck_dim: int = 0
    """Compare no bottleneck with each kind of so many numbers a token, instead of block types."""
    stages: int = 2
    """Stages of the models with bottlenecks: they stand where these end."""
    optimizers: tuple[Literal["adamw", "muon"], ...] = ("adamw",)
    """The optimizers of the models with bottlenecks."""
    wires: tuple[Literal["fp32", "int8"], ...] = ("fp32",)
    """Types of the numbers that travel between stages with bottlenecks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct(self, ("optimizers", "wires"))
        if self.shards not in (2, 4):
            raise ValueError(f"--shards must be 2 or 4, not {self.shards}: the model has 4 heads")


def run(options: Options) -> dict[str, Any]:
    compute_like_peers()
    figures: dict[str, Any] = {}
    for name, arm in _bottlenecks(options) if options.bottleneck_dim else _block_types(options):
        (config, data), started = with_corpus(arm), time.monotonic()
        ((_, loss),) = curve(name, config, data, options.iterations)
        figures[name] = {"validation_loss": loss, "seconds": time.monotonic() - started}
        if options.bottleneck_dim:
            length = config.data.sequence_length
            figures[name]["bytes_a_token"] = boundary_of(config).spec(BATCH, length).num_bytes / (BATCH * length)
        else:
            layers = range(config.model.num_layers)
            figures[name] |= {"block_types": ARMS[name], "sums": 2 * len(stretches(config.model, layers))}
    found: dict[str, Any] = {"blocks": figures, "samples": BATCH * options.iterations, "shards": options.shards}
    if options.bottleneck_dim:
        return found
    losses = {name: arm["validation_loss"] - figures["tp"]["validation_loss"] for name, arm in figures.items()}
    return found | {"apart_from_tp": [name for name, apart in losses.items() if abs(apart) > LARGEST_DIFFERENCE]}


def curve(
    name: str, config: RunConfig, data: Microbatches, iterations: int, *, points: int = 1,
    num_held_out: int = NUM_SAMPLES,
) -> list[tuple[int, float]]:  # fmt: skip
    """Train a run's model in this process, where what a stage would hand on is rounded as it would be on its way.

    Returns the held-out loss after so many `points`, each with the number of iterations until then.
    """
    model = build_transformer(config, device="cpu")
    _round_between_stages(model, config, boundary_of(config))
    trained = Model(summed_loss=model.summed_loss, parameters=trained_parameters(model))
    held_out, training = HeldOut(config, data, model, num_held_out), Reference(config, data, trained)
    # Nobody takes the same steps, so Muon's products need not be exact.
    optimizer, found = gradient_optimizer(config, same_bits=False), list[tuple[int, float]]()
    each = config.microbatches_per_round
    for iteration in range(iterations):
        training.accumulate_mean(dict.fromkeys(range(iteration * each, (iteration + 1) * each), 1))
        training.update_with(optimizer, iteration * config.rounds.round_samples)
        if iteration % 100 == 99:
            say(f"{name}: iteration {iteration + 1} of {iterations}")
        if is_point(iteration, iterations, points):
            found.append((iteration + 1, held_out.loss(training.weights)))
    say(f"{name}: held-out loss {found[-1][1]:.4f}")
    return found


def _block_types(options: Options) -> Iterator[tuple[str, RunConfig]]:
    for name, types in ARMS.items():
        # With two stages, each would have an end at which shards meet.
        yield name, _config(options, 1, block_types=types, num_shards=options.shards)


def _bottlenecks(options: Options) -> Iterator[tuple[str, RunConfig]]:
    kinds: dict[str, dict[str, Any]] = {"none": {}}
    kinds |= {kind: {"bottleneck_dim": options.bottleneck_dim, "bottleneck": kind} for kind in BOTTLENECKS}
    for optimizer, wire, kind in itertools.product(options.optimizers, options.wires, kinds):
        config = _config(options, options.stages, **kinds[kind])
        stepped = dataclasses.replace(config.optimizer, name=optimizer)
        yield f"{kind}_{optimizer}_{wire}", dataclasses.replace(config, optimizer=stepped, wire=WireConfig(dtype=wire))


def _config(options: Options, num_stages: int, **model: Any) -> RunConfig:
    config = shakespeare(options.dataset, options.iterations, options.seed)
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, **model), stages=StagesConfig(num_stages=num_stages),
        data=dataclasses.replace(config.data, microbatch_size=BATCH),
    )  # fmt: skip


class _Travelled(torch.autograd.Function):
    """Hidden states, and their gradients, as they arrive at the next stage."""

    @staticmethod
    def forward(ctx: Any, hidden_BTR: torch.Tensor, boundary: Boundary) -> torch.Tensor:
        ctx.boundary, staging = boundary, staging_of(hidden_BTR.device)
        wire = boundary.encode(hidden_BTR, staging).wait()
        return boundary.decode(wire, hidden_BTR.shape[0], hidden_BTR.shape[1], staging)

    @staticmethod
    def backward(ctx: Any, gradient_BTR: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Travelled.forward(ctx, gradient_BTR, ctx.boundary), None


def _round_between_stages(model: Transformer, config: RunConfig, boundary: Boundary) -> None:
    def travelled(layer: torch.nn.Module, inputs: object, hidden_BTR: torch.Tensor) -> torch.Tensor:
        rounded_BTR: torch.Tensor = _Travelled.apply(hidden_BTR, boundary)  # type: ignore[no-untyped-call]  # torch's
        return rounded_BTR

    for after in config.stage_ends if boundary.encoding != "fp32" else ():
        model.layers[str(after - 1)].register_forward_hook(travelled)
