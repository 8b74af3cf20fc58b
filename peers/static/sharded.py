"""Layers that have block types, with their shards spread over the workers of the axis tp.

Used by spread.py instead of tensor_parallel.py where the run's model has `model.block_types`: what is summed, and when,
is then the model's own affair (swarm/model/shards.py). Each worker has its parts of the matrices, as DTensors, of which
it computes with what is local.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from peers.static.options import StaticOptions
from swarm.config import RunConfig
from swarm.model.shards import Shards, cut_axis, part_of, sum_over
from swarm.model.stages import StageModule, layer_ranges


def check(config: RunConfig, options: StaticOptions) -> None:
    """Raise ValueError if the model's block types do not fit these options."""
    model = config.model
    if "parallel" in model.types_of_blocks and options.pp != config.stages.num_stages:
        raise ValueError(
            f"parallel blocks meet at the ends of the run's {config.stages.num_stages} stages: say --pp "
            f"{config.stages.num_stages}, or stages.num_stages = {options.pp} in the configuration"
        )
    if not model.block_types or options.tp == 1:
        return
    if model.num_shards % options.tp:
        raise ValueError(f"--tp {options.tp} does not divide model.num_shards, which is {model.num_shards}")
    if options.fsdp or options.compile:
        name = "--fsdp" if options.fsdp else "--compile"
        raise ValueError(f"{name} is not for model.block_types with --tp")


def spread(whole: StageModule, config: RunConfig, stage: int, mesh: DeviceMesh) -> StageModule:
    """A stage with this worker's shards alone, and its parts of the stage's weights.

    Args:
        whole: the stage with all of them.
    """
    num_shards, num_workers, place = config.model.num_shards, mesh.size(), mesh.get_local_rank()
    shards = Shards(
        num_shards=num_shards, num_held=num_shards // num_workers, reduce=sum_over(mesh.get_group())
    )  # fmt: skip
    with torch.device("meta"):
        module = StageModule(config, stage, layer_ranges(config)[stage], shards)
    for name, value in whole.named_parameters():
        part, axis = part_of(name, value.detach(), place, num_workers).clone(), cut_axis(name)
        held = part if axis is None else DTensor.from_local(part, mesh, [Shard(axis)], run_check=False)
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner).register_parameter(last, nn.Parameter(held))
    return module


def partial(stage: StageModule) -> set[str]:
    """The parameters of which each worker has a part of the gradient: those within layers that are whole at all."""
    return {name for name, _ in stage.named_parameters() if name.startswith("layers.") and cut_axis(name) is None}


def local_parameters(stage: StageModule) -> dict[str, torch.Tensor]:
    """What the stage computes with; gradients arrive at its parameters."""
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in stage.named_parameters()}
