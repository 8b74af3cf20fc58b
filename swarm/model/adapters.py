"""LoRA's adapters (arXiv 2106.09685): freezing a stage, adding adapters to it, and merging them into its weights.

The modules are in projection.py. An adapter's parameters are named after its matrix: `layers.3.attention.q.adapter.a`.

Shape suffixes: D inputs of a matrix, E outputs, R rank.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from swarm.config import LoraConfig, RunConfig
from swarm.model.layers import draw
from swarm.model.projection import Adapter, Projection


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a stage that are trained, by name: only the adapters, if the run has them."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def adapt(module: nn.Module, config: RunConfig) -> None:
    """Freeze a stage's parameters, and add the run's adapters to its layers, at their initial values. `module` is a
    stage of the built-in model."""
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    groups = config.lora.groups(config.model)
    for number, layer in cast(nn.ModuleDict, module.layers).items():
        for group in groups:
            _add(layer, config.lora, group, f"layers.{number}")
    for name, parameter in trained_parameters(module).items():
        if not parameter.is_meta:
            set_initial(name, parameter, config)


def is_adapter(name: str) -> bool:
    return ".adapter." in name


@torch.no_grad()
def set_initial(name: str, parameter: Tensor, config: RunConfig) -> None:
    """Set an adapter's A to numbers drawn uniformly between +-1 / sqrt(its inputs), as in peft, and its B to 0."""
    if name.endswith(".b"):
        parameter.zero_()
    else:
        draw(parameter, 1 / math.sqrt(parameter.shape[1]), config.data.seed, name)


def _add(layer: nn.Module, lora: LoraConfig, group: tuple[str, ...], site: str) -> None:
    a_RD: nn.Parameter | None = None
    for name in group:
        projection = cast(Projection, layer.get_submodule(name))
        if a_RD is None:
            a_RD = nn.Parameter(torch.empty(lora.rank, projection.in_features))
        projection.adapt(Adapter(lora, a_RD, projection.out_features, f"{site}.{group[0]}.adapter"))


@dataclass(frozen=True, kw_only=True)
class AdapterNames:
    a: str
    b: str


def adapter_names(config: RunConfig) -> dict[str, AdapterNames]:
    """The names of all adapters of the whole model, by the name of the weight to which each is added."""
    return {
        f"layers.{layer}.{name}.weight": AdapterNames(
            a=f"layers.{layer}.{group[0]}.adapter.a", b=f"layers.{layer}.{name}.adapter.b"
        )
        for layer in range(config.model.num_layers)
        for group in (config.lora.groups(config.model) if config.lora.is_on else ())
        for name in group
    }


def merged(weight_ED: Tensor, a_RD: Tensor, b_ER: Tensor, scale: float) -> Tensor:
    return torch.addmm(weight_ED.float(), b_ER, a_RD, alpha=scale)
