"""Copies to a device and back: those of the CPU, and the order in which a GPU's queues wait for each other.

Simulated queues take the place of torch.cuda. They do work only when somebody waits for it, and then no more than
necessary. So a result for which nobody waited is missing. tests/stage/test_cuda.py tests the same on a GPU.
"""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from swarm.config import RunConfig
from swarm.stage.staging import Convert, CopyingStaging, CudaStaging, Download, Staging, staging_of
from tests.support.chain import DILOCO, INT8, SYNCHRONOUS, Chain, eventually, running_chain

_NOTHING = float("nan")
"""Stands for the contents of memory that was not written to."""


def test_the_cpu_computes_with_what_it_receives_and_sends_what_it_computes() -> None:
    staging, tensor = staging_of(torch.device("cpu")), torch.ones(3)
    assert type(staging) is Staging
    assert staging.upload(tensor) is tensor
    assert staging.download(tensor).wait() is tensor
    assert staging.download(tensor, lambda ones: 2 * ones).wait().tolist() == [2, 2, 2]


def test_a_device_without_queues_for_copies_is_copied_to_and_from() -> None:
    """MPS is such a device. Here the CPU stands in for it: a copy shares no memory with its source."""
    assert type(staging_of(torch.device("mps"))) is CopyingStaging
    staging, tensor = CopyingStaging(torch.device("cpu")), torch.ones(3)
    uploaded = staging.upload(tensor)
    downloaded, doubled = staging.download(uploaded).wait(), staging.download(uploaded, lambda ones: 2 * ones).wait()
    uploaded.zero_()
    assert (tensor.tolist(), downloaded.tolist(), doubled.tolist()) == ([1] * 3, [1] * 3, [2] * 3)


async def test_a_chain_trains_with_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.chain.staging_of", CopyingStaging)
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all(range(4))
        chain.assert_accumulated(range(4))


# -- what is waited for elsewhere --------------------------------------------------------------------------------------


class _Late(Staging):
    """The staging of a device from which results arrive when the test says so."""

    def __init__(self, arrives: threading.Event) -> None:
        self._arrives = arrives
        self.num_downloads = 0

    def download(self, tensor: torch.Tensor, convert: Convert | None = None) -> Download:
        self.num_downloads += 1
        host = torch.full_like(tensor, _NOTHING)
        return Download(host, _Arrival(self._arrives, lambda: host.copy_(tensor)), convert or torch.clone)


class _Arrival:
    def __init__(self, arrives: threading.Event, copy: Callable[[], Any]) -> None:
        self._arrives = arrives
        self._copy = copy

    def synchronize(self) -> None:
        assert self._arrives.wait(20)
        self._copy()


def _make_late(chain: Chain, arrives: threading.Event) -> Sequence[_Late]:
    stagings = [_Late(arrives) for _ in chain.peers]
    for peer, staging in zip(chain.peers, stagings, strict=True):
        peer.backend.staging = staging
    return stagings


async def test_a_download_keeps_its_buffer_until_it_has_arrived_and_not_longer() -> None:
    arrives = threading.Event()
    download = _Late(arrives).download(torch.ones(3), lambda ones: 2 * ones)
    buffer = weakref.ref(download._tensor)
    waiting = asyncio.create_task(download.arrived())
    await asyncio.sleep(0.02)
    assert not waiting.done(), "and the event loop goes on"
    assert buffer() is not None
    arrives.set()
    assert (await waiting).tolist() == [2, 2, 2]
    assert download.wait() is await download.arrived() is waiting.result()
    gc.collect()
    assert buffer() is None


@pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO, INT8])
async def test_what_arrives_late_is_the_same_to_the_last_bit(config: RunConfig) -> None:
    """Hidden states and gradients, through real servers."""
    arrives = threading.Event()
    arrives.set()
    async with running_chain(config) as usual, running_chain(config) as late:
        stagings = _make_late(late, arrives)
        losses = [[(await chain.train_all([index]))[0] for index in range(3)] for chain in (usual, late)]
        assert losses[0] == losses[1]
        expected = usual.sums()
        assert all(torch.equal(value, expected[name]) for name, value in late.sums().items())
        # In the synchronous setting each gradient of the weights has a sketch besides.
        num_sketches = 3 if config.rounds.synchronous else 0
        assert [staging.num_downloads - num_sketches for staging in stagings] == [3, 6, 3]
        late.assert_idle()


async def test_the_compute_thread_goes_on_while_a_result_is_on_its_way() -> None:
    arrives = threading.Event()
    async with running_chain(SYNCHRONOUS) as chain:
        first, *others = _make_late(chain, arrives)
        training = asyncio.create_task(chain.train_all(range(3)))
        await eventually(lambda: first.num_downloads == 3)
        assert await chain.peers[0].runtime.control(lambda: 1) == 1
        assert [staging.num_downloads for staging in others] == [0, 0], "nothing is handed on before it is there"
        arrives.set()
        await training
        chain.assert_accumulated(range(3))
        chain.assert_idle()


# -- a GPU's queues ----------------------------------------------------------------------------------------------------


class _Stream:
    """A queue of a GPU. Its work is done when something waits for an event behind it."""

    device = torch.device("cuda", 1)

    def __init__(self, device: Any = None) -> None:
        self.work: deque[Callable[[], Any]] = deque()

    def wait_stream(self, other: "_Stream") -> None:
        event = _Event()
        event.record(other)
        self.work.append(event.synchronize)


class _Event:
    def __init__(self, **_: bool) -> None:
        self.is_done = False

    def record(self, stream: _Stream) -> None:
        self._stream = stream
        stream.work.append(self._come)

    def synchronize(self) -> None:
        while not self.is_done:
            self._stream.work.popleft()()

    def elapsed_time(self, later: "_Event") -> float:
        assert self.is_done
        assert later.is_done
        return 250.0

    def _come(self) -> None:
        self.is_done = True


class _Gpu:
    """Stands in for torch.cuda and tensors, as far as CudaStaging uses them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compute = _Stream()
        self.held: list[tuple[torch.Tensor, _Stream]] = []
        """Memory that waits for another queue than its own, because of record_stream."""
        self._current = self.compute
        for name, value in {
            "Stream": _Stream, "Event": _Event, "stream": self._within,
            "device": contextlib.nullcontext, "current_stream": lambda device: self._current,
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, value)
        self._copy, self._empty = torch.Tensor.copy_, torch.empty
        patch.setattr(torch, "empty", self._pinned)
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        patch.setattr(torch.Tensor, "to", lambda tensor, *to, **how: self._to(tensor, *to, **how))
        patch.setattr(torch.Tensor, "copy_", lambda tensor, *of, **how: self._copy_later(tensor, *of, **how))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.held.append((tensor, stream)))

    def compute_later(self, work: Callable[[], Any]) -> _Event:
        self.compute.work.append(work)
        event = _Event()
        event.record(self.compute)
        return event

    @contextlib.contextmanager
    def _within(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def _pinned(self, shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return self._empty(shape, dtype=dtype).fill_(_NOTHING)

    def _to(self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        assert device.type == "cuda"
        return self._copy_later(torch.full_like(tensor, _NOTHING), tensor, non_blocking=non_blocking)

    def _copy_later(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        self._current.work.append(lambda: self._copy(target, source))
        return target


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    return _Gpu(monkeypatch)


def _staging() -> CudaStaging:
    staging = staging_of(torch.device("cuda"))
    assert isinstance(staging, CudaStaging)
    return staging


def test_the_gpu_computes_with_what_was_uploaded(gpu: _Gpu) -> None:
    """Later changes to the CPU's tensor do not reach it."""
    staging, received, computed = _staging(), torch.full((3,), 7.0), torch.zeros(3)
    uploaded = staging.upload(received)
    received.zero_()
    assert uploaded.isnan().all(), "nobody has waited for it yet"
    gpu.compute_later(lambda: computed.add_(uploaded)).synchronize()
    assert computed.tolist() == [7, 7, 7]
    assert [(tensor is uploaded, stream is gpu.compute) for tensor, stream in gpu.held] == [(True, True)]


@pytest.mark.parametrize("convert", [None, lambda tensor: 2 * tensor])
def test_what_arrives_is_what_the_gpu_has_computed(gpu: _Gpu, convert: Convert | None) -> None:
    staging, computed = _staging(), torch.zeros(3)
    gpu.compute_later(lambda: computed.fill_(7))
    download = staging.download(computed, convert)
    assert not computed.any(), "whoever asks for it does not wait"
    arrived = download.wait()
    assert arrived.tolist() == ([7, 7, 7] if convert is None else [14, 14, 14])
    ((tensor, stream),) = gpu.held
    assert tensor is computed
    assert stream is not gpu.compute


def test_copies_are_made_while_the_gpu_computes(gpu: _Gpu) -> None:
    staging, computed = _staging(), torch.full((3,), 5.0)
    download = staging.download(computed)
    busy = gpu.compute_later(lambda: None)
    uploaded = staging.upload(torch.full((3,), 7.0))
    event = _Event()
    event.record(staging._uploads)  # type: ignore[arg-type]
    event.synchronize()
    assert uploaded.tolist() == [7, 7, 7]
    assert download.wait().tolist() == [5, 5, 5]
    assert not busy.is_done


def test_the_compute_thread_is_one_task_ahead_of_the_gpu(gpu: _Gpu) -> None:
    staging, done = _staging(), []
    for number in range(4):
        gpu.compute_later(lambda number=number: done.append(number))  # type: ignore[misc]
        staging.download(torch.zeros(1))
        assert done == list(range(number))


def test_a_state_is_read_as_the_queued_work_leaves_it(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read on another thread, piece by piece, beside later work of the GPU."""
    monkeypatch.setattr("swarm.stage.staging.PIECE_ELEMENTS", 2)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    staging, moment = _staging(), torch.zeros(5)
    gpu.compute_later(lambda: moment.add_(torch.arange(5)))
    reader = staging.reader()
    next_task = gpu.compute_later(lambda: None)
    pieces = [piece.tolist() for piece in reader.pieces(moment)]
    assert pieces == [[0, 1], [2, 3], [4]]
    assert not next_task.is_done


def test_reading_takes_no_queue_of_its_own(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would hand out one that records something, or one that copies for another reader."""
    staging, made = _staging(), list[Any]()
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    for _ in range(40):
        staging.reader()
    assert not made


def test_who_waits_names_the_device(gpu: _Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    download, named = _staging().download(torch.zeros(3)), list[Any]()

    @contextlib.contextmanager
    def within(device: Any) -> Iterator[None]:
        named.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", within)
    download.wait()
    assert named == [_Stream.device]


async def test_a_task_of_the_gpu_is_measured_there(gpu: _Gpu) -> None:
    stopwatch, done = _staging().stopwatch(), []
    gpu.compute.work.append(lambda: done.append(1))
    stopwatch.stop()
    assert not done
    assert await stopwatch.seconds() == 0.25
    assert done
