"""The model as one worker has it: its stage of the pipeline, spread over the other axes of the mesh with torch's own.

Made by program.py, used by the loop. The order is torch's: tensor parallelism first, then what recomputes and compiles
layers, then FSDP or DDP around it all.
"""

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from peers.static import sharded, tensor_parallel, tensors
from peers.static.options import StaticOptions
from peers.static.workers import Shape, Workers
from swarm.config import RunConfig, StagesConfig
from swarm.model.adapters import trained_parameters
from swarm.model.loss import summed_loss_of_logits
from swarm.model.masks import DropoutKey
from swarm.model.stages import StageModule, build_stage, shared_parameters

TIED = "embedding.weight"
_WRAPPER = "_checkpoint_wrapped_module."
"""What torch adds to the names inside a layer that is computed again."""
ONE_BUCKET_MB = 1 << 20
"""More than any gradient: a codec gets all of them at once, as in a swarm."""


def cut(config: RunConfig, shape: Shape, *, is_sharded: bool) -> RunConfig:
    """The configuration with as many stages as the mesh has.

    Args:
        is_sharded: whether weights are cut over the axis dp.

    Raises:
        ValueError: the model, or its optimizer, does not fit the mesh.
    """
    tensor_parallel.check(config, shape.tp)
    if config.optimizer.name == "muon" and (is_sharded or shape.tp > 1):
        raise ValueError("optimizer.name = 'muon' steps whole matrices, which --fsdp and --tp cut")
    if shape.pp > config.model.num_layers:
        raise ValueError(f"--pp {shape.pp} needs as many layers, and model.num_layers is {config.model.num_layers}")
    if shape.pp > 1 and config.model.custom_class:
        raise ValueError("--pp is for the built-in model, not for a model.custom_class")
    stages = config.stages if config.stages.num_stages == shape.pp else StagesConfig(num_stages=shape.pp)
    return dataclasses.replace(config, stages=stages)


class Part(nn.Module):
    """What a worker computes of a microbatch: from tokens or the stage before, to the next one or to the loss."""

    def __init__(self, stage: nn.Module, seed: int, *, is_sharded: bool) -> None:
        """
        Args:
            is_sharded: whether the stage is one of sharded.py.
        """
        super().__init__()
        self._is_sharded = is_sharded
        self.stage = stage
        self._seed = seed

    def forward(
        self,
        inputs: torch.Tensor,
        *,
        microbatch_1: torch.Tensor,
        targets_BT: torch.Tensor | None = None,
        **extra: object,
    ) -> torch.Tensor:
        """
        Args:
            microbatch_1: its number, on the CPU; below 0 there is no dropout.
            targets_BT: for the last stage.
            extra: as StageModule.forward takes it.

        Returns:
            hidden_BTR, or at the last stage the sum of the targets' losses [1].
        """
        number = int(microbatch_1)
        key = None if number < 0 else DropoutKey(seed=self._seed, microbatch=number)
        if isinstance(self.stage, StageModule):
            extra |= {"dropout_key": key, "targets_BT": targets_BT}
            if self._is_sharded:
                output: torch.Tensor = functional_call(
                    self.stage, sharded.local_parameters(self.stage), (inputs,), extra
                )
            else:
                output = self.stage(inputs, **extra)
        else:
            output = summed_loss_of_logits(self.stage(inputs, dropout_key=key), cast(torch.Tensor, targets_BT))
        # Not a view, which FSDP warns of.
        return output if targets_BT is None else torch.stack([output])


class Spread:
    """The model's trained parameters at this worker, and the module that computes with them.

    Attributes:
        module: a Part, perhaps inside DDP.
        parameters: by their names in the whole model, as torch has spread them.
    """

    def __init__(self, config: RunConfig, options: StaticOptions, workers: Workers) -> None:
        """
        Args:
            config: cut into the mesh's stages.
        """
        shape, mesh = workers.shape, workers.mesh
        plain = dataclasses.replace(config.model, gradient_checkpointing=False)
        stage = build_stage(dataclasses.replace(config, model=plain), workers.place("pp"), device="cpu")
        is_sharded = shape.tp > 1 and bool(config.model.block_types)
        self._partial = set[str]()
        if is_sharded:
            assert isinstance(stage, StageModule)
            stage = sharded.spread(stage, config, workers.place("pp"), mesh["tp"])
            self._partial = sharded.partial(stage)
        elif shape.tp > 1:
            for layer in _layers(stage):
                tensor_parallel.spread(layer, mesh["tp"])
            self._partial = {name for name, _ in stage.named_parameters() if name.endswith(tensor_parallel.PARTIAL)}
        stage.to(workers.device)
        if config.model.gradient_checkpointing and isinstance(stage, StageModule) and not is_sharded:
            # The model's own way binds parameters before FSDP has gathered them.
            stage.layers = nn.ModuleDict({name: checkpoint_wrapper(layer) for name, layer in stage.layers.items()})
        for layer in _layers(stage) if options.compile else ():
            layer.compile()
        self.module: nn.Module = Part(stage, config.data.seed, is_sharded=is_sharded)
        self._averages_itself = options.fsdp is not None
        if options.fsdp:
            for part in (*_layers(stage), self.module):
                fully_shard(part, mesh=mesh["dp"], reshard_after_forward=options.fsdp == "zero3")
        elif shape.dp > 1 and shape.tp == shape.pp == 1:
            self.module = DistributedDataParallel(
                self.module,
                process_group=mesh.get_group("dp"),
                bucket_cap_mb=ONE_BUCKET_MB if options.compress else None,
                gradient_as_bucket_view=True,
            )
            self._averages_itself = True
        self._workers = workers
        self.parameters = {name.replace(_WRAPPER, ""): value for name, value in trained_parameters(stage).items()}
        self._tied = _tied_group(config, workers)
        self._num_holders = {
            name: shape.dp * shape.tp // tensors.num_cuts(value) * (2 if self._tied and name == TIED else 1)
            for name, value in self.parameters.items()
        }

    @property
    def local_parameters(self) -> dict[str, torch.Tensor]:
        """This worker's parts of the parameters, in the same memory."""
        return {name: tensors.local(value) for name, value in self.parameters.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """This worker's parts of the gradients, averaged over the axis dp. All workers call it once a step."""
        shape, mesh = self._workers.shape, self._workers.mesh
        found = {name: tensors.local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        if shape.tp > 1:
            partial = [gradient for name, gradient in found.items() if name in self._partial]
            tensors.sum_over(partial, mesh.get_group("tp"))
        if shape.dp > 1 and not self._averages_itself:
            tensors.sum_over(found.values(), mesh.get_group("dp"), weight=1 / shape.dp)
        if self._tied is not None and TIED in found:
            tensors.sum_over([found[TIED]], self._tied)
        return found

    def squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """This worker's share of the whole gradient's squared norm: the workers' shares add up to it."""
        return tensors.squared_norm(gradients, self._num_holders)

    def clear_gradients(self) -> None:
        """Forget what was summed."""
        for parameter in self.parameters.values():
            parameter.grad = None


def _layers(stage: nn.Module) -> list[nn.Module]:
    """Those of the built-in model; a custom class is spread as a whole."""
    return list(stage.layers.values()) if isinstance(stage, StageModule) else []


def _tied_group(config: RunConfig, workers: Workers) -> dist.ProcessGroup | None:
    """The two workers whose tied embeddings add their gradients up, if this is one of them. All workers call it."""
    if not shared_parameters(config):
        return None
    ranks = workers.mesh.mesh
    pairs = [(int(first), int(last)) for first, last in zip(ranks[0].flatten(), ranks[-1].flatten(), strict=True)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    return next((group for pair, group in groups.items() if dist.get_rank() in pair), None)
