"""Brings tensors to the computing device and back, and measures how long the device computed.

The compute thread uses it. Another thread waits for copies to the CPU (stage/computation), or reads a round's whole
state while training goes on (stage/member).

A GPU works through queues ("streams"): calls return before their work is done, and reading a result waits for
everything that was queued before it. So copies have queues of their own. They use pinned memory, because only then can
the GPU copy and compute at the same time: while a microbatch is computed, the last one is copied to the CPU and the
next one to the GPU. What comes over the network is written into pinned memory, and stays there until it is
acknowledged; other tensors are there only for a short time. torch provides this memory, and does not use it again
before the copy is made, even if nothing waits for the copy.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

Convert = Callable[[torch.Tensor], torch.Tensor]

PIECE_ELEMENTS = 4 << 20
"""A large tensor is read beside the compute thread in pieces of this size, through pinned memory for one piece."""


class Arrival(Protocol):
    """Something to wait for until a copy to or from the device is made, such as a CUDA event."""

    def synchronize(self) -> None:
        """Block the thread until the copy is made."""


class Download:
    """A tensor on its way to the CPU, or there.

    Args:
        tensor: the tensor that arrives, or has arrived.
        arrival: ends when the tensor is there; None if it is there already.
        convert: makes the wanted tensor from the one that arrived, in memory of its own.
    """

    def __init__(self, tensor: torch.Tensor, arrival: Arrival | None = None, convert: Convert = torch.clone) -> None:
        self._tensor = tensor
        self._arrival = arrival
        self._convert = convert

    def wait(self) -> torch.Tensor:
        """Block the thread until the tensor is there, and return it, converted. Only one thread at a time may call
        this."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._tensor, self._arrival = self._convert(self._tensor), None
        return self._tensor

    async def arrived(self) -> torch.Tensor:
        """Like `wait`, without blocking the event loop. If this is cancelled, the copy is still made."""
        return self.wait() if self._arrival is None else await asyncio.to_thread(self.wait)


class HostReader:
    """Reads large tensors beside the compute thread, piece by piece. This one is for tensors on the CPU.

    Any thread may use it. Nothing may write to the tensors meanwhile.
    """

    def pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """All elements in their order, on the CPU, in one dimension; each piece is valid until the next one."""
        yield tensor.detach().cpu().contiguous().reshape(-1)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        rest = copy.view(-1)
        for piece in self.pieces(tensor):
            rest[: piece.numel()].copy_(piece)
            rest = rest[piece.numel() :]
        return copy


class Stopwatch:
    """Measures the seconds that a task takes, from the moment in which it is made."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        """Stop the watch on the compute thread, at the end of the task."""
        self._seconds = time.perf_counter() - self._started_at

    async def seconds(self) -> float:
        """How long the task took. To be called once stopped."""
        return self._seconds


class Staging:
    """The staging of the CPU. It copies nothing, because tensors arrive and leave in the memory with which the CPU
    computes."""

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Make memory on the CPU for a tensor that comes over the network and is to be uploaded. Any thread may."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a CPU tensor to the device. Returns a copy, which may be changed. On the CPU, returns the tensor
        itself."""
        return tensor

    def download(self, tensor: torch.Tensor, convert: Convert | None = None) -> Download:
        """Begin to bring a tensor to the CPU. If `convert` is given, its result shares no memory with the tensor."""
        return Download(tensor if convert is None else convert(tensor))

    def reader(self) -> HostReader:
        """Make a reader, which reads tensors as they are after all work queued by now."""
        return HostReader()

    def stopwatch(self) -> Stopwatch:
        return Stopwatch()


class CopyingStaging(Staging):
    """The staging of a device for which torch has no queues for copies and no pinned memory (MPS): each copy is waited
    for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, copy=True)

    def download(self, tensor: torch.Tensor, convert: Convert | None = None) -> Download:
        return super().download(tensor.detach().to("cpu", copy=True), convert)


class CudaStopwatch(Stopwatch):
    """Measures the GPU's time, because the compute thread goes on to the next task before the GPU has begun with this
    one.

    The time until the GPU begins with the task does not count, but waits within the task do.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._started = self._stopped = _Mark(self._stream)

    def stop(self) -> None:
        self._stopped = _Mark(self._stream)

    async def seconds(self) -> float:
        """How long the task took; waits until the GPU has come to its end."""
        await asyncio.to_thread(self._stopped.synchronize)
        return float(self._started.event.elapsed_time(self._stopped.event)) / 1e3


class CudaReader(HostReader):
    """Reads from a GPU, in the queue of downloads, through pinned memory for one piece."""

    def __init__(self, device: torch.device, downloads: torch.cuda.Stream) -> None:
        """To be made on the compute thread."""
        self._device, self._stream = device, downloads
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def pieces(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        if tensor.device.type == "cpu":
            yield from super().pieces(tensor)
            return
        flat = tensor.detach().view(-1)
        pinned = torch.empty(min(PIECE_ELEMENTS, flat.numel()), dtype=flat.dtype, pin_memory=True)
        for piece in torch.split(flat, PIECE_ELEMENTS):
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                pinned[: piece.numel()].copy_(piece, non_blocking=True)
            # The caller keeps the tensor at least until then, so its memory is not used again.
            _Mark(self._stream).synchronize()
            yield pinned[: piece.numel()]


class CudaStaging(Staging):
    """The staging of a GPU. To be used by the compute thread alone, except for `host_bytes`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._downloads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._newest: _Mark | None = None

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        # So the compute thread has nothing to copy: `pin_memory` gives what is pinned back as it is.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.pin_memory()
        with self._on(self._uploads):
            arrived = pinned.to(self._device, non_blocking=True)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_stream(self._uploads)
        # Its memory belongs to the stream of uploads, which would use it again as soon as nothing refers to it.
        arrived.record_stream(compute)
        return arrived

    def download(self, tensor: torch.Tensor, convert: Convert | None = None) -> Download:
        source = tensor.contiguous()
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._downloads.wait_stream(torch.cuda.current_stream(self._device))
        with self._on(self._downloads):
            host.copy_(source, non_blocking=True)
        # This works like `upload`, in the other direction.
        source.record_stream(self._downloads)
        mark = _Mark(self._downloads)
        before, self._newest = self._newest, mark
        if before is not None:
            # One task queued behind the running one keeps the GPU busy. With more of them, a new backward would have to
            # wait for forwards, and the compute thread's queue would look too short.
            before.synchronize()
        # Converted into ordinary memory, of which there is more than of pinned memory: sent tensors are kept until they
        # are acknowledged.
        return Download(host, mark, convert or torch.clone)

    def reader(self) -> HostReader:
        # torch has 32 queues, and hands them out again and again. If each reader took one, it would sometimes copy in
        # the queue in which the compute thread records something.
        return CudaReader(self._device, self._downloads)

    def stopwatch(self) -> Stopwatch:
        return CudaStopwatch(self._device)

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # The device comes first: to leave a stream of another GPU would make a context of hundreds of MB on the first.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield


class _Mark(Arrival):
    """A place in a queue."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # A thread that waits for a blocking event sleeps; to wait for another kind of event takes a core.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]  # torch's
        self.event.record(stream)
        self._device = stream.device

    def synchronize(self) -> None:
        # A thread that has not named a device would make a context on the first GPU, like in `_on`.
        with torch.cuda.device(self._device):
            self.event.synchronize()


def staging_of(device: torch.device) -> Staging:
    if device.type == "cuda":
        return CudaStaging(device)
    return Staging() if device.type == "cpu" else CopyingStaging(device)
