"""Elementwise arithmetic on tensors that are larger than a processor's cache, piece by piece.

Used by training/optim, whose steps are many operations one after the other. On a CPU they are numpy's, which take a
fraction of the time that torch needs to begin one; threads work on pieces of their own, and wait for each other once
and not after each operation; and square roots are rounded correctly, where torch has MKL's, whose last bit depends on
the processor. Elsewhere they are torch's. Never decides what is computed.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch

CACHED_ELEMENTS = 1 << 16
"""How many elements a piece has at most, so that the result of one operation is in cache for the next."""
GPU_ELEMENTS = 1 << 24
"""Likewise on a GPU, where fewer and larger operations are faster."""


def in_pieces(work: Callable[..., None], *tensors: torch.Tensor) -> None:
    """Call `work(xp, scratch, *pieces)` with groups of rows of tensors of one shape, until all had their turn.

    `xp` is the library to compute with, numpy or torch: the functions of both that are called add, subtract, multiply,
    divide and sqrt take the pieces, numbers, and `out`. `scratch` is memory of a piece's shape. No piece may depend on
    another one.
    """
    on_cpu = tensors[0].device.type == "cpu"
    rows: list[Any] = [tensor.detach() if tensor.ndim else tensor.detach().view(1) for tensor in tensors]
    num_pieces = max(1, -(-tensors[0].numel() // (CACHED_ELEMENTS if on_cpu else GPU_ELEMENTS)))
    num_threads = min(num_pieces, torch.get_num_threads()) if on_cpu else 1
    # Each thread gets equally many pieces.
    num_pieces = num_threads * -(-num_pieces // num_threads)
    num_rows = max(1, -(-len(rows[0]) // num_pieces))
    xp: Any = np if on_cpu else torch
    arrays = [tensor.numpy() for tensor in rows] if on_cpu else rows

    def treat(start: int) -> None:
        pieces = [array[start : start + num_rows] for array in arrays]
        # Infinity and NaN are for others to find, and torch warns of neither.
        with np.errstate(all="ignore"):
            work(xp, xp.empty_like(pieces[0]), *pieces)

    starts = range(0, len(rows[0]), num_rows)
    deque(map(treat, starts) if num_threads == 1 else _threads(num_threads).map(treat, starts), maxlen=0)


@lru_cache(maxsize=1)
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="elementwise")
