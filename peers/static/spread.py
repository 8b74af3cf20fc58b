"""The model as one worker has it: its stage of the pipeline, its shards of every layer, inside torch's DDP or FSDP2.

`--tp` cuts layers as block types do: the worker holds some of the shards of swarm/model/shards.py, and the sums over
shards are all-reduces. A model without block types is cut into shards of type `tp`, which together compute the same
(Megatron-LM, arXiv 1909.08053).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from peers.static.options import StaticOptions
from peers.static.run_config import in_shards
from peers.static.workers import Workers
from swarm.config import RunConfig
from swarm.interchange.weights import Weights
from swarm.model import adapters, shards
from swarm.model.adapters import trained_parameters
from swarm.model.functions import fuses
from swarm.model.layers import FixedColumns
from swarm.model.loss import summed_loss_of_logits
from swarm.model.masks import DropoutKey
from swarm.model.shards import Shards
from swarm.model.stage_module import StageModule
from swarm.model.stages import TIED, build_stage, drawn, layer_ranges, parameter_shapes, tied_stages, trained_shapes
from swarm.training.scaling import squared_norms

ONE_BUCKET_MB = 1 << 20
"""The size of DDP's buckets. It is larger than any model, so that the codec gets all gradients at once, as in a
swarm."""


class Part(nn.Module):
    """Computes one stage's part of a microbatch: from tokens or hidden states, hidden states or the loss."""

    def __init__(self, stage: nn.Module, seed: int) -> None:
        super().__init__()
        self.stage = stage
        self._seed = seed

    def forward(
        self, inputs: torch.Tensor, *, microbatch_1: torch.Tensor, targets_BT: torch.Tensor | None = None,
        **extra: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """
        Args:
            microbatch_1: the microbatch's number; below 0 there is no dropout.
            targets_BT: given to the last stage alone.
            extra: as StageModule.forward takes it.

        Returns:
            hidden_BTR, or at the last stage the sum of the targets' losses [1].
        """
        number = int(microbatch_1)
        key = None if number < 0 else DropoutKey(seed=self._seed, microbatch=number)
        output: torch.Tensor
        if isinstance(self.stage, StageModule):
            output = self.stage(inputs, dropout_key=key, targets_BT=targets_BT, **extra)
        else:
            output = summed_loss_of_logits(self.stage(inputs, dropout_key=key), cast(torch.Tensor, targets_BT))
        # `stack` makes a new tensor, because FSDP warns of a view.
        return output if targets_BT is None else torch.stack([output])


class Spread:
    """The model's trained parameters at this worker, and the module that computes with them.

    Attributes:
        module: a Part, perhaps inside DDP.
        parameters: the parameters by their names in the whole model. With FSDP they are DTensors.
        shapes: the shapes of the whole parameters. With FSDP or tensor parallelism each worker has a part of them.
    """

    def __init__(self, config: RunConfig, options: StaticOptions, workers: Workers, given: Weights | None) -> None:
        """`config` is cut into the mesh's stages. `given` are the weights with which the run begins; None draws
        them."""
        self._workers, self._cuts_rows = workers, options.fsdp is not None
        shape, mesh, number = workers.shape, workers.mesh, workers.place("pp")
        is_custom = bool(config.model.custom_class)
        # What a custom class makes of its weights is not known, so each worker makes all of them.
        stage = build_stage(config, number, device=workers.device) if is_custom else _own_stage(config, workers, given)
        # A custom class is one unit for FSDP: its layers are not known.
        layers = [] if is_custom else list(cast(StageModule, stage).layers.values())
        # torch requires this order: checkpointing of activations, then compilation, then FSDP or DDP around the whole.
        for layer in layers if config.model.gradient_checkpointing else ():
            checkpoint(layer, preserve_rng_state=False)
        if options.compile == "on":
            cast(StageModule, stage).compile_layers()
        self.module: nn.Module = Part(stage, config.data.seed)
        if options.fsdp:
            for part in (*layers, self.module):
                fully_shard(part, mesh=mesh["dp"], reshard_after_forward=options.fsdp == "zero3")
        if not is_custom:
            self._fill(stage, config, given)
        if shape.dp > 1 and not options.fsdp:
            self.module = DistributedDataParallel(
                self.module,
                process_group=mesh.get_group("dp"),
                bucket_cap_mb=ONE_BUCKET_MB if options.compress else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )
        self.parameters = trained_parameters(stage)
        own_shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        self.shapes = own_shapes if is_custom else trained_shapes(config, number)
        self._shared = {TIED} if tied_stages(config) else set[str]()
        self._ends = _ends(workers) if self._shared else None

    @torch.no_grad()
    def _fill(self, stage: nn.Module, config: RunConfig, given: Weights | None) -> None:
        """Give a stage on the meta device this worker's parts of the initial weights. Of a file it reads those alone,
        but a tensor is drawn whole. So a worker holds its part of the stage and one whole tensor. A frozen matrix that
        is not cut stays in its file."""
        number, device = self._workers.place("pp"), self._workers.device
        # All parts get their memory first: between tensors that are freed again they would leave holes.
        made = {
            parameter: nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            for parameter in stage.parameters()
        }
        # Adapters may share a parameter, which then has several names. FSDP pads its parts when they are loaded.
        names = stage.named_parameters(remove_duplicate=False)
        stage.load_state_dict({name: made[parameter] for name, parameter in names}, assign=True)
        shapes = parameter_shapes(config, number) | trained_shapes(config, number)
        for name, parameter in stage.named_parameters():
            if given is None or adapters.is_adapter(name):
                part = self.part_of(name, drawn(name, shapes[name], config))
            else:
                part = given.load({name}, self.part_of)[name]
            if parameter.requires_grad or self._cuts_rows or self._is_cut(name):
                _local(parameter).copy_(part)
            else:
                parameter.data = part.to(device, parameter.dtype)

    @property
    def local_parameters(self) -> dict[str, torch.Tensor]:
        return {name: _local(value) for name, value in self.parameters.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """This worker's parts of the gradients, averaged over the axis dp. All workers call it once a step."""
        found = {name: _local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        if self._workers.shape.tp > 1:
            partial = [found[name] for name in found if name.startswith("layers.") and shards.cut_axis(name) is None]
            _sum_over(partial, self._workers.mesh.get_group("tp"))
        if self._ends is not None:
            _sum_over([found[name] for name in found if name in self._shared], self._ends)
        return found

    def squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """This worker's share of the whole gradient's squared norm: the workers' shares add up to it."""
        squares = squared_norms(gradients.values())
        return sum((square / self._num_holders(name) for name, square in zip(gradients, squares, strict=True)), 0.0)

    def _num_holders(self, name: str) -> int:
        dp = 1 if isinstance(self.parameters[name], DTensor) else self._workers.shape.dp
        tp = 1 if self._is_cut(name) else self._workers.shape.tp
        return dp * tp * (2 if name in self._shared else 1)

    def _is_cut(self, name: str) -> bool:
        return self._workers.shape.tp > 1 and shards.cut_axis(name) is not None

    # -- for checkpoints -------------------------------------------------------------------------------------------

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This worker's part of a tensor of the same shape as a parameter, or of a scalar."""
        if tensor.ndim == 0:
            return tensor
        if self._is_cut(name):
            tensor = shards.part_of(name, tensor, self._workers.place("tp"), self._workers.shape.tp)
        if not self._cuts_rows:
            return tensor
        # FSDP cuts like this. A tensor may have fewer rows than there are workers.
        rows, place = tensor.chunk(self._workers.shape.dp), self._workers.place("dp")
        return rows[place] if place < len(rows) else tensor[:0]

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, put together from the workers' parts; the inverse of `part_of`. All workers call it."""
        like = self.parameters[name]
        if part.ndim == 0:
            return part
        if isinstance(like, DTensor):
            part = DTensor.from_local(
                part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
            ).full_tensor()
        if not self._is_cut(name):
            return part
        parts = [torch.empty_like(part) for _ in range(self._workers.shape.tp)]
        dist.all_gather(parts, part.contiguous(), group=self._workers.mesh.get_group("tp"))
        return shards.whole_of(name, parts)


def _own_stage(config: RunConfig, workers: Workers, given: Weights | None) -> StageModule:
    """The stage with only this worker's shards of its layers, on the meta device: it has no weights yet."""
    number, tp = workers.place("pp"), workers.shape.tp
    # The model's own gradient checkpointing would bind parameters before FSDP has gathered them.
    model = dataclasses.replace(in_shards(config.model, tp), gradient_checkpointing=False)
    config, held = dataclasses.replace(config, model=model), None
    if tp > 1:
        reduce = shards.sum_over(workers.mesh.get_group("tp"))
        held = Shards(num_shards=model.num_shards, num_held=model.num_shards // tp, reduce=reduce)
    with torch.device("meta"):
        stage = StageModule(config, number, layer_ranges(config)[number], held, fused=fuses(workers.device))
        if config.lora.is_on:
            adapters.adapt(stage, config)
    for name, parameter in stage.named_parameters():
        if not parameter.requires_grad and parameter.ndim > 1:
            dtype = torch.bfloat16 if given is None else given.index.entries[name].torch_dtype
            parameter.data = parameter.data.to(dtype)
    if stage.fixed_columns is not None:
        stage.fixed_columns = FixedColumns(model, config.data.seed).to(workers.device)
    return stage


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ends(workers: Workers) -> dist.ProcessGroup | None:
    """The group of the first and the last worker of this worker's pipeline; None if this worker is neither. All workers
    call it."""
    first, last = workers.mesh.mesh[0].flatten().tolist(), workers.mesh.mesh[-1].flatten().tolist()
    groups = {pair: dist.new_group(list(pair)) for pair in zip(first, last, strict=True)}
    return next((group for pair, group in groups.items() if dist.get_rank() in pair), None)


def _sum_over(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor by the sum over a group's workers, in one exchange."""
    if tensors:
        flat_N = parameters_to_vector(tensors)
        dist.all_reduce(flat_N, group=group)
        vector_to_parameters(flat_N, tensors)
