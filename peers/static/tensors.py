"""Tensors that are cut over workers (DTensors) as this worker has them, and whole.

Used by whatever reads or changes weights, gradients and the optimizer's state.
"""

import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part, in the same memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_cuts(tensor: torch.Tensor) -> int:
    """Into how many parts it is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    cuts = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in cuts if isinstance(placement, Shard))


def whole(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor of which every worker has a part, cut as `like` is. All workers call it."""
    if not isinstance(like, DTensor) or part.ndim == 0:
        return part
    mesh, placements = like.device_mesh, like.placements
    spread = DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    return spread.full_tensor()


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor that every worker has whole; inverse of `whole`."""
    if not isinstance(like, DTensor) or tensor.ndim == 0:
        return tensor
    spread = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return spread.to_local()


def sum_over(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, *, weight: float = 1.0) -> None:
    """Replace each tensor by the sum over a group's workers, times `weight`, in one exchange."""
    tensors = list(tensors)
    if not tensors:
        return
    flat_N = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat_N, group=group)
    flat_N.mul_(weight)
    for tensor, part_N in zip(tensors, torch.split(flat_N, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part_N.view_as(tensor))


def squared_norm(tensors: Mapping[str, torch.Tensor], num_holders: Mapping[str, int]) -> float:
    """This worker's share of the sum of squares over all workers' tensors, each counted once.

    Args:
        num_holders: of every tensor, how many workers have the same part.
    """
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()]
    # Read together: on a GPU each reading waits for all that was queued before it.
    squares = torch.stack(norms).square().tolist() if norms else []
    return cast(float, sum((square / num_holders[name] for name, square in zip(tensors, squares, strict=True)), 0.0))
