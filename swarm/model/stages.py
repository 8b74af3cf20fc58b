"""Cuts the model into stages: which layers a stage has, its parameters, and their initial weights; or leaves it whole.

Parameters are named by their place in the whole model (`layers.3.attention.q.weight`), so another cut only regroups
names. Shape suffixes: B samples, T positions, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from swarm.config import RunConfig
from swarm.model import adapters, custom_class
from swarm.model.adapters import trained_parameters
from swarm.model.functions import fuses
from swarm.model.layers import FixedColumns, draw
from swarm.model.masks import DropoutKey
from swarm.model.projection import Projection
from swarm.model.shards import Shards, stretches
from swarm.model.stage_module import StageModule
from swarm.training import samples
from swarm.training.samples import TOKENS, Samples
from swarm.types import Block

_Module = TypeVar("_Module", bound=StageModule)
_INTO_RESIDUAL = (".attention.output.weight", ".feed_forward.down.weight")
TIED = "embedding.weight"
"""The only parameter that several stages may hold, each for its own purpose."""
_BOTTLENECK = {"learned": (".encoder.weight", ".decoder.weight"), "anchored": (".encoder.weight",), "fixed": ()}
"""The matrices that begin as zeros."""


def layer_ranges(config: RunConfig) -> list[range]:
    return list(itertools.starmap(range, itertools.pairwise((0, *config.stage_ends, config.model.num_layers))))


def tied_stages(config: RunConfig) -> tuple[int, ...]:
    """The stages that share TIED, whose gradients of it add up: with tied embeddings the first stage's embedding is the
    last one's head. Else there are none.

    If the matrix is frozen, each stage has its own copy and nothing is shared.
    """
    last = config.stages.num_stages - 1
    has_own = not config.model.tied_embeddings or config.model.custom_class or config.lora.is_on or last == 0
    return () if has_own else (0, last)


def build_stage(
    config: RunConfig, block: Block | int, *, device: torch.device | str, weights: Mapping[str, Tensor] | None = None,
    fused: bool | None = None,
) -> nn.Module:  # fmt: skip
    """Make a block's module with its initial weights, which are the same bits at every peer and under any cut. A number
    is that of a stage, and stands for its variant 0.

    With adapters (`lora`) the weights are frozen: matrices are held in the type that they are given in, or in bfloat16
    if they are drawn.

    Args:
        weights: the initial values of all of the block's parameters except adapters; None draws them. Frozen matrices
            are used as they are, without a copy.
        fused: whether the built-in model computes with the operations for a GPU; None: as functions.fuses says.

    Raises:
        ValueError: the block's `model.custom_class` cannot be imported, is not a module class, or fails, or it does not
            fit what stands before and behind it.
    """
    block = Block(block) if isinstance(block, int) else block
    stage, layers = block.stage, layer_ranges(config)[block.stage]
    if not config.classes[block]:
        fused = fuses(device) if fused is None else fused
        return filled(lambda: StageModule(config, stage, layers, fused=fused), config, weights).to(device)
    made = custom_class.imported(config, block)
    with custom_class.blamed(config, block, "cannot be made for"):
        module = made(config, stage, layers)
        initialise(module, config)
    module = module.to(device)
    with torch.no_grad():
        custom_class.try_out(module, config, block, device)
    return module


def initialise(module: nn.Module, config: RunConfig) -> None:
    """Give a module of the user's own class, on the CPU, its initial weights."""
    init_parameters = getattr(module, "init_parameters", None)
    if init_parameters is not None:
        init_parameters(config.data.seed)
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            _set_initial(name, parameter, config)


@torch.no_grad()
def drawn(name: str, shape: Sequence[int], config: RunConfig) -> Tensor:
    """Draw the initial value of one parameter, in the type in which a stage holds it: bfloat16 for frozen matrices."""
    value = torch.empty(shape)
    if adapters.is_adapter(name):
        adapters.set_initial(name, value, config)
        return value
    _set_initial(name, value, config)
    return value.to(torch.bfloat16) if config.lora.is_on and value.ndim > 1 else value


def _set_initial(name: str, parameter: Tensor, config: RunConfig) -> None:
    """Set a parameter (on the CPU) to values that follow from the run's seed and the parameter's name.

    Biases, and the matrices of bottlenecks that _BOTTLENECK names, are 0, and other vectors 1. Other matrices are
    random with standard deviation `model.init_std`, which is divided by sqrt(2 * num_layers) if they project into the
    residual stream.
    """
    if parameter.ndim < 2:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    if name.endswith(_BOTTLENECK[config.model.bottleneck]):
        parameter.zero_()
        return
    depth_scale = math.sqrt(2 * config.model.num_layers) if name.endswith(_INTO_RESIDUAL) else 1.0
    draw(parameter, math.sqrt(3) * config.model.init_std / depth_scale, config.data.seed, name)


def filled(make: Callable[[], _Module], config: RunConfig, weights: Mapping[str, Tensor] | None) -> _Module:
    """Make a module, and give it weights, or draw them, and the run's adapters. Takes no more memory than is held in
    the end."""
    with torch.device("meta"):
        module = make()
    if module.fixed_columns is not None:
        module.fixed_columns = FixedColumns(config.model, config.data.seed)
    held = dict[str, Tensor]()
    in_4_bits = {f"{name}.weight": each for name, each in module.named_modules() if isinstance(each, Projection)}
    for name, parameter in list(module.named_parameters()):
        if config.lora.base == "nf4" and name in in_4_bits:
            weight = drawn(name, parameter.shape, config) if weights is None else weights[name]
            in_4_bits[name].freeze_in_4_bits(weight)
        elif weights is None:
            held[name] = drawn(name, parameter.shape, config)
        elif config.lora.is_on and parameter.ndim > 1:
            held[name] = weights[name]
        else:
            held[name] = weights[name].to(torch.float32, copy=True)
    module.load_state_dict(held, assign=True)
    if config.lora.is_on:
        adapters.adapt(module, config)
    return module


def parameter_shapes(config: RunConfig, stage: int) -> dict[str, torch.Size]:
    """The shapes of a stage's parameters in the built-in model, by name, without adapters. Allocates no parameters."""
    with torch.device("meta"):
        module = StageModule(config, stage, layer_ranges(config)[stage])
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def trained_shapes(config: RunConfig, stage: int) -> dict[str, torch.Size]:
    with torch.device("meta"):
        module = StageModule(config, stage, layer_ranges(config)[stage])
        if config.lora.is_on:
            adapters.adapt(module, config)
    return {name: parameter.shape for name, parameter in trained_parameters(module).items()}


class Transformer(StageModule):
    """All layers, with the embedding and the head; adapters are added by `build_transformer`.

    It maps tokens_BT to logits_BTV, or with targets to the sum of their losses (float32).
    Shards that meet only at the ends of stages meet here where the run's stages end.
    """

    def __init__(self, config: RunConfig, shards: Shards | None = None, *, fused: bool = False) -> None:
        super().__init__(config.uncut, 0, range(config.model.num_layers), shards, fused=fused)
        if self.shards is not None:
            self.stretches = [stretch for layers in layer_ranges(config) for stretch in stretches(config.model, layers)]

    def loss(self, tokens_BT1: Tensor, dropout_key: DropoutKey | None = None) -> Tensor:
        """The mean loss in nats per token, for T + 1 columns of tokens, of which each predicts the next."""
        return self.summed_loss({TOKENS: tokens_BT1}, dropout_key) / tokens_BT1[:, 1:].numel()

    def summed_loss(self, batch: Samples, dropout_key: DropoutKey | None = None) -> Tensor:
        """The loss in nats, summed over all targets."""
        loss: Tensor = self(
            batch[TOKENS][:, :-1].long(),
            dropout_key=dropout_key,
            documents_BT=samples.documents(batch),
            targets_BT=samples.targets(batch),
        )
        return loss


def build_transformer(config: RunConfig, *, device: torch.device | str) -> Transformer:
    """Make the built-in model with the initial weights that the stages of a swarm start from. Raises ValueError if the
    run has a `model.custom_class`; to compare with that, build it as a single stage."""
    if config.model.custom_class:
        raise ValueError(
            "there is no built-in reference for model.custom_class: use stages.num_stages = 1 and build_stage"
        )
    return filled(lambda: Transformer(config), config, None).to(device)
