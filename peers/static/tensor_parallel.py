"""Tensor parallelism: which matrices of a layer are cut, and how (Megatron-LM, arXiv 1909.08053), with torch's DTensor.

Used by spread.py. Of an attention and of a feed-forward block, the matrices that read the residual stream are cut by
outputs, and those that write to it by inputs. Each block then sums over the workers once in the forward and once in the
backward. Embedding, norms and head are whole at every worker, and compute the same everywhere.
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from swarm.config import RunConfig
from swarm.model.shards import READS, WRITES

PARTIAL = ("attention.q_norm.weight", "attention.k_norm.weight")
"""They are whole at every worker, and see the heads of one alone: their gradients are summed."""


def check(config: RunConfig, num_workers: int) -> None:
    """Raise ValueError if so many workers cannot share the model's layers."""
    model = config.model
    if num_workers == 1:
        return
    if model.custom_class or config.lora.is_on:
        raise ValueError("--tp is for the built-in model, and not for [lora]")
    counts = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": model.kv_heads,
        "the width of the feed-forward block": model.feed_forward_width,
    }
    for name, count in counts.items():
        if count % num_workers:
            raise ValueError(f"--tp {num_workers} does not divide {name}, which is {count}")


def spread(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a layer's matrices over the workers of the mesh, of which each keeps its part."""
    parts = dict(layer.named_modules())
    plan = {name: ColwiseParallel() for name in READS if name in parts} | {name: RowwiseParallel() for name in WRITES}
    parallelize_module(layer, mesh, plan)  # type: ignore[arg-type]  # torch says dict, and takes any style

    def whole(module: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        """What all of a block's matrices read, as one tensor, so that its gradients are summed once."""
        hidden_BTD = cast(torch.Tensor, inputs[0])
        return DTensor.from_local(hidden_BTD, mesh, [Replicate()], run_check=False), *inputs[1:]

    for block in ("attention", "feed_forward"):
        parts[block].register_forward_pre_hook(whole)
