"""Autograd graphs between forward and backward: measures one, limits how many are kept, makes the start of a
backward, and looks at its end.

Used by stage/backend on the compute thread, and by stage/shortage, which halves what may be kept. Never keeps a graph
itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from swarm.stage.buckets import Version


@dataclass
class GraphBudget:
    """Bytes of autograd graphs that may be kept between forward and backward."""

    limit_bytes: int
    graph_bytes: int = 0
    """The bytes of one microbatch's graph, measured at the first forward."""
    num_kept: int = 0
    num_recomputed: int = 0
    """Forwards that were computed again, because there was no room for their graphs."""

    def has_room(self) -> bool:
        """Whether one more graph fits."""
        return (self.num_kept + 1) * self.graph_bytes <= self.limit_bytes

    def keep(self, *, recomputed: bool = False) -> None:
        """Count one more graph that is kept, even beyond the limit."""
        self.num_kept += 1
        self.num_recomputed += recomputed

    def let_go(self) -> None:
        """Count one graph less."""
        self.num_kept -= 1

    def halve(self) -> None:
        """Allow half as many graphs as are kept now."""
        self.limit_bytes = self.num_kept // 2 * self.graph_bytes

    def build(self, compute: Callable[[], torch.Tensor], version: Version) -> torch.Tensor:
        """Run `compute` with these weights. The first time, measure what autograd saves for the backward.

        The weights themselves are not counted.
        """
        if self.graph_bytes:
            return compute()
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = compute()
        # After `compute`, because it may have made the casts.
        for tensor in (*version.parameters.values(), *version.casts.values()):
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        self.graph_bytes = max(1, sum(storages.values()))
        return outputs


class _Scalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return outputs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def with_gradient(outputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Make a scalar that has `gradient` as its gradient by `outputs`.

    torch.autograd.grad takes such a gradient itself, but then imports sympy, with hundreds of modules: a new peer's
    compute thread would stand still for a second or more at its first backward.
    """
    scalar: torch.Tensor = _Scalar.apply(outputs, gradient)  # type: ignore[no-untyped-call]  # torch's
    return scalar


def are_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether all numbers are finite. Waits for the device."""
    return bool(torch.stack(torch._foreach_norm(list(gradients))).isfinite().all())
