"""Recordings of what a device computes: replayed as one launch, at the same addresses, without Python.

On a GPU a recording is a CUDA graph: for a small model, Python takes longer to launch a computation's hundreds of
operations than the GPU to compute them.

What is recorded uses the same memory in each replay. So its inputs are tensors that the caller keeps, and copies new
values into. Numbers that Python sees meanwhile stay as they are. Nothing that is recorded may read the device from
Python, since nothing is computed until the first replay.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

_Result = TypeVar("_Result")

_ONE_AT_A_TIME = threading.RLock()
"""Held while something is recorded, and by each replay: torch before 2.12 refuses replays while another thread records
on the same GPU, because both use its random generator."""
WARM_UPS = 3
"""How often something is computed before it is recorded, as torch recommends for CUDA graphs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording(Generic[_Result]):
    """Something that was recorded.

    Attributes:
        replay: computes it again, in the order of the current stream.
        result: what the recorded function returned. Its tensors have values from the first replay on.
        num_bytes: the device memory that the recording takes, beyond what its pool had.
    """

    replay: Callable[[], None]
    result: _Result
    num_bytes: int


class Recorder(Protocol):
    """Makes recordings. To be used on one thread, the same one that replays them."""

    def pool(self) -> object:
        """Make a pool: memory that several recordings share.

        A replay may write to whatever the pool's other recordings made, but for those results that were in use when it
        was recorded. So results are to be consumed before another recording of the pool is replayed.
        """

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run `work` a few times before the like of it is recorded: libraries choose kernels, and make buffers."""

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        """Run `work` once, and record it. `pool` is made by `pool`, and kept as long as its recordings; None for memory
        that no other recording shares. Raises RuntimeError if something in it cannot be recorded. The device's memory
        may run out, too."""


class CudaRecorder(Recorder):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for everything: a backward runs on its forward's stream, and libraries have buffers for each stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's

    def pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        # torch names no type for pools.
        memory: Any = torch.cuda.graph_pool_handle() if pool is None else pool
        # Leaving this block makes the present stream the current one, which torch forgets where a capture fails.
        present = torch.cuda.current_stream(self._device)
        with _ONE_AT_A_TIME, torch.cuda.device(self._device), torch.cuda.stream(present):
            # torch empties the cache itself, so what it had must not count.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
            try:
                # Other threads copy from and to the device meanwhile, which the mode "global" forbids.
                with torch.cuda.graph(graph, pool=memory, stream=self._stream, capture_error_mode="thread_local"):
                    result = work()
            except RuntimeError as error:
                # torch before 2.12 forgets this, too, and then frees no memory any more that another stream has used.
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory)
                # And it refuses all replays, until another capture ends.
                with (
                    contextlib.suppress(RuntimeError),
                    torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"),
                ):
                    torch.zeros(1, device=self._device)
                # What `work` raised says more than that its capture cannot be ended.
                raise error.__context__ or error from None
            num_bytes = max(0, torch.cuda.memory_reserved() - before)

        def replay() -> None:
            with _ONE_AT_A_TIME:
                graph.replay()

        return Recording(replay=replay, result=result, num_bytes=num_bytes)


def recorder_of(device: torch.device) -> Recorder | None:
    """The recorder for a device; None where torch has none."""
    return CudaRecorder(device) if device.type == "cuda" else None
