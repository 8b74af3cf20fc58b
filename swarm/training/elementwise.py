"""Elementwise arithmetic on a whole model: piece by piece on a CPU, many tensors at once on a GPU.

An optimizer's step is many operations one after the other, of which each is rounded by itself. On a CPU they are
numpy's, which take a fraction of the time that torch needs to begin one; threads work on pieces of their own, and wait
for each other once and not after each operation; and square roots are rounded correctly, where torch has MKL's, whose
last bit depends on the processor. On a GPU they are torch's over lists of tensors, each of which is one launch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

CACHED_ELEMENTS = 1 << 16
"""How many elements a piece has at most, so that the result of one operation is in cache for the next."""
GPU_ELEMENTS = 1 << 24
"""How many elements of a tensor, or of several small ones, are treated at once on a GPU."""

Work = Callable[..., None]
"""Called as `work(xp, scratch, *pieces)`. The functions add, subtract, multiply, divide and sqrt of `xp` take the
pieces, numbers, and `out`. `scratch` is memory of a piece's shape. No piece may depend on another one."""


def treat(work: Work, groups: Sequence[Sequence[torch.Tensor]], *, together: bool) -> None:
    """Do elementwise work on every group of tensors; those of a group have one shape. `together` says whether many
    groups share an operation, as on a GPU. The results have the same bits, but for square roots on a CPU."""
    if not together:
        for group in groups:
            _in_pieces(work, *group)
        return
    for batch in _batches(piece for group in groups for piece in _cut(group)):
        columns = [list(column) for column in zip(*batch, strict=True)]
        work(_LISTS, [torch.empty_like(piece) for piece in columns[0]], *columns)


def treat_rows(work: Work, group: Sequence[torch.Tensor]) -> None:
    """Do work on tensors that have equally many rows, of any widths and types: `xp` is torch for what is on a GPU."""
    if group[0].device.type == "cpu":
        _in_pieces(work, *group)
        return
    for piece in _cut(group):
        work(torch, torch.empty_like(piece[0]), *piece)


def _stored(operation: Callable[..., tuple[torch.Tensor, ...] | list[torch.Tensor]]) -> Callable[..., None]:
    def store(*operands: Any, out: list[torch.Tensor]) -> None:
        torch._foreach_copy_(out, operation(*operands))

    return store


_LISTS = SimpleNamespace(
    add=_stored(torch._foreach_add), subtract=_stored(torch._foreach_sub), multiply=_stored(torch._foreach_mul),
    divide=_stored(torch._foreach_div), sqrt=_stored(torch._foreach_sqrt),
)  # fmt: skip
"""numpy's functions of these names, for lists of tensors."""


def _cut(group: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors whole, or groups of their rows of at most GPU_ELEMENTS."""
    tensors = [tensor.detach() for tensor in group]
    num_elements = tensors[0].numel()
    if num_elements <= GPU_ELEMENTS:
        return iter([tuple(tensors)])
    num_rows = max(1, GPU_ELEMENTS * len(tensors[0]) // num_elements)
    return zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)


def _batches(pieces: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Groups of pieces with at most GPU_ELEMENTS in all, so that what an operation allocates stays small."""
    batch: list[tuple[torch.Tensor, ...]] = []
    num_elements = 0
    for piece in pieces:
        if batch and num_elements + piece[0].numel() > GPU_ELEMENTS:
            yield batch
            batch, num_elements = [], 0
        batch.append(piece)
        num_elements += piece[0].numel()
    if batch:
        yield batch


def _in_pieces(work: Work, *tensors: torch.Tensor) -> None:
    rows = [tensor.detach() if tensor.ndim else tensor.detach().view(1) for tensor in tensors]
    num_pieces = max(1, -(-tensors[0].numel() // CACHED_ELEMENTS))
    num_threads = min(num_pieces, torch.get_num_threads())
    # Each thread gets equally many pieces.
    num_pieces = num_threads * -(-num_pieces // num_threads)
    num_rows = max(1, -(-len(rows[0]) // num_pieces))
    arrays = [tensor.numpy() for tensor in rows]

    def treat(start: int) -> None:
        pieces = [array[start : start + num_rows] for array in arrays]
        # Infinity and NaN are for others to find.
        with np.errstate(all="ignore"):
            work(np, np.empty_like(pieces[0]), *pieces)

    starts = range(0, len(rows[0]), num_rows)
    deque(map(treat, starts) if num_threads == 1 else _threads(num_threads).map(treat, starts), maxlen=0)


@lru_cache(maxsize=1)
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="elementwise")


# -- the steps of optimizers, on weights, their gradient, and what the optimizer remembers ----------------------------


def adamw(
    xp: Any, scratch: Any, weights: Any, gradient: Any, first: Any, second: Any, *, betas: tuple[float, float],
    epsilon: float, decay: float, size: float, unbiased: float,
) -> None:  # fmt: skip
    # m <- m + (1 - beta1) (g - m)
    xp.subtract(gradient, first, out=scratch)
    xp.multiply(scratch, 1.0 - betas[0], out=scratch)
    xp.add(first, scratch, out=first)
    # v <- beta2 v + (1 - beta2) g^2
    xp.multiply(gradient, gradient, out=scratch)
    xp.multiply(scratch, 1.0 - betas[1], out=scratch)
    xp.multiply(second, betas[1], out=second)
    xp.add(second, scratch, out=second)
    # p <- decay p - size m / (sqrt(v) unbiased + epsilon)
    xp.sqrt(second, out=scratch)
    xp.multiply(scratch, unbiased, out=scratch)
    xp.add(scratch, epsilon, out=scratch)
    xp.divide(first, scratch, out=scratch)
    xp.multiply(scratch, size, out=scratch)
    xp.multiply(weights, decay, out=weights)
    xp.subtract(weights, scratch, out=weights)


def nesterov(
    xp: Any, scratch: Any, weights: Any, gradient: Any, velocity: Any, *, momentum: float, rate: float
) -> None:
    # v <- mu v + g
    xp.multiply(velocity, momentum, out=velocity)
    xp.add(velocity, gradient, out=velocity)
    # p <- p - rate (mu v + g)
    xp.multiply(velocity, momentum, out=scratch)
    xp.add(scratch, gradient, out=scratch)
    sgd(xp, scratch, weights, scratch, rate=rate)


def sgd(xp: Any, scratch: Any, weights: Any, gradient: Any, *, rate: float) -> None:
    xp.multiply(gradient, rate, out=scratch)
    xp.subtract(weights, scratch, out=weights)
