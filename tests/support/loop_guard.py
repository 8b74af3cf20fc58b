"""A guard against two things that must not happen on an event loop: to touch large tensors, and to block the loop for
long.

A loop counts as blocked if its thread computes for long within one callback. Only the processor time of the thread
counts, not the time by the clock, so tests do not fail because the machine is busy. Loops in virtual time are not
checked, because they run the work of threads themselves.
"""

import asyncio
import gc
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.virtual_time import VirtualTimeLoop

LARGEST_BYTES = 1 << 20
"""The largest tensor that may be read or written on the loop."""
LONGEST_SECONDS = 0.05
"""How long a callback may compute."""

_ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty}
"""Operations that touch no memory."""
_ELSEWHERE = str(Path(asyncio.__file__).parent), str(Path(torch.__file__).parent)
"""Frames in these folders are skipped, because they do not show which of our code is at fault."""


class _Tensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Records operations on large tensors, in the thread that has entered this context."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch's compiler is imported, which takes seconds; nothing here is compiled.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in _ALLOCATIONS):
            sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
            if max(sizes, default=0) > LARGEST_BYTES:
                ours = [f for f in traceback.extract_stack()[:-1] if not f.filename.startswith(_ELSEWHERE)]
                where = " < ".join(f"{f.filename}:{f.lineno}" for f in ours[:-4:-1])
                self._found.append(f"{func} touches {max(sizes)} bytes on the event loop: {where}")
        return result


class _Collections:
    """How many seconds the garbage collector took in each thread. It may run at any time, in any callback."""

    def __init__(self) -> None:
        self._seconds = threading.local()

    def __call__(self, phase: str, info: Any) -> None:
        sign = -1.0 if phase == "start" else 1.0
        self._seconds.total = self.total + sign * time.thread_time()

    @property
    def total(self) -> float:
        return getattr(self._seconds, "total", 0.0)


@contextmanager
def guarded_loops() -> Iterator[None]:
    """Fail if an event loop touches a large tensor, or is blocked for long, inside the block."""
    found: list[str] = []
    collections, run = _Collections(), asyncio.Handle._run

    def run_guarded(handle: asyncio.Handle) -> None:
        if isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
            run(handle)
            return
        began_at = time.thread_time() - collections.total
        with _Tensors(found):
            run(handle)
        seconds = time.thread_time() - collections.total - began_at
        if seconds > LONGEST_SECONDS:
            found.append(f"the event loop was held for {seconds:.3f} s by {handle}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", run_guarded)
        gc.callbacks.append(collections)
        try:
            yield
        finally:
            gc.callbacks.remove(collections)
    assert not found, "\n".join(found)
