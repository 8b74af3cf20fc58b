"""Graphs between forward and backward: what autograd saves, how many may be kept, and the numbers at their ends.

Used by stage/backend and stage/captured on the compute thread, and by stage/shortage, which halves what may be kept.
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
    recorded_bytes: int = 0
    """What recordings take, which have memory for graphs of their own. They are given back if it is too much."""

    def has_room(self) -> bool:
        """Whether one more graph fits."""
        return (self.num_kept + 1) * self.graph_bytes + self.recorded_bytes <= self.limit_bytes

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


class Graph:
    """A forward that was computed, and that can be followed by one backward. This one is autograd's.

    Args:
        inputs: a leaf, or not differentiable.
        outputs: the hidden state, or the last stage's loss.
        parameters: those to differentiate by.
    """

    is_recorded = False
    """Whether a recording computes it."""

    def __init__(self, inputs: torch.Tensor, outputs: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        self.outputs = outputs
        self._inputs = inputs
        self._parameters = parameters

    def gradients(
        self, gradient: torch.Tensor | None, *, of_inputs: bool, of_weights: bool = True
    ) -> list[torch.Tensor]:
        """Compute the gradient of the inputs first, if wanted, and then that of each parameter, if wanted.

        They are to be used up before another gradient is computed.

        Args:
            gradient: that of the hidden state; None at the last stage.
        """
        wanted = [*([self._inputs] if of_inputs else []), *(self._parameters if of_weights else [])]
        root = self.outputs if gradient is None else with_gradient(self.outputs, gradient)
        return list(torch.autograd.grad(root, wanted, allow_unused=True, materialize_grads=True))

    def let_go(self) -> None:
        """Give the graph's memory back. Autograd's is free as soon as nothing refers to it."""


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


def read(loss: torch.Tensor | None, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Bring the loss to the CPU, or 0 if there is none, and find whether all gradients are finite.

    Waits for the device once, or not at all if there is nothing to read.
    """
    read = [] if loss is None else [loss.detach().float()]
    if gradients:
        read += torch._foreach_norm(list(gradients))
    numbers = torch.stack(read).cpu() if read else torch.zeros(1)
    return torch.zeros(()) if loss is None else numbers[0], bool(numbers[loss is not None :].isfinite().all())
