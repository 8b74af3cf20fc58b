"""A stage whose forward and backward are recorded computes what it computes without recordings.

On the CPU a tape stands in for CUDA graphs (tests/support/tape.py).
"""

import dataclasses
import gc
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypeVar
from weakref import WeakSet

import pytest
import torch

from swarm.config import LoraConfig, OptimizerConfig, RoundsConfig, RunConfig
from swarm.errors import MalformedMessage
from swarm.machine.recording import CudaRecorder, Recording
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS
from swarm.stage.buckets import Version
from swarm.stage.graphs import CapturedStage, Example, Graph
from tests.stage.backends import (
    CONFIG,
    DROPOUT,
    GPT2,
    PLENTY,
    arrived,
    backend_of,
    begin,
    hidden_of,
    inputs_of,
    require_near,
    story,
    sums_of,
    tokens_of,
)
from tests.support.partial import partial_config
from tests.support.tape import TapeRecorder

_Result = TypeVar("_Result")

_OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_samples=0)
_SYNCHRONOUS = dataclasses.replace(CONFIG, optimizer=_OPTIMIZER)
# A bucket has room for two microbatches, so one is taken out of a sum.
_DILOCO = dataclasses.replace(
    CONFIG, optimizer=_OPTIMIZER, rounds=RoundsConfig(setting="diloco", round_samples=16, inner_batch_samples=4)
)
_ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")
_DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_ON_A_GPU)])
_KINDS = {
    "checkpointing": dataclasses.replace(_DILOCO, model=dataclasses.replace(CONFIG.model, gradient_checkpointing=True)),
    "bottleneck": dataclasses.replace(_DILOCO, model=dataclasses.replace(CONFIG.model, bottleneck_dim=8)),
    "learned": dataclasses.replace(
        _DILOCO,
        model=dataclasses.replace(CONFIG.model, bottleneck_dim=8, bottleneck="learned", bottleneck_layers=(1, 2)),
    ),
    "gpt2": dataclasses.replace(_DILOCO, model=GPT2),
    "lora": dataclasses.replace(
        _DILOCO, lora=LoraConfig(rank=2), model=dataclasses.replace(CONFIG.model, autocast="bf16")
    ),
    "chat": partial_config(num_stages=3),
}


class _CountedGraphs(CudaRecorder):
    """CUDA graphs whose replays are counted."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.num_replays = 0

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        recording = super().record(work, pool)

        def replay() -> None:
            self.num_replays += 1
            recording.replay()

        return dataclasses.replace(recording, replay=replay)


def _limit_bytes(device: str) -> int:
    """A few places on a CPU. A GPU gives each recording some MiB."""
    return 2 << 20 if device == "cpu" else PLENTY


def _captured(
    config: RunConfig, stage: int, limit_bytes: int | None = None, *, device: str = "cpu", compiles: bool = False
) -> tuple[StageBackend, TapeRecorder | _CountedGraphs]:
    recorder = TapeRecorder() if device == "cpu" else _CountedGraphs()
    limit_bytes = limit_bytes or _limit_bytes(device)
    backend = backend_of(config, stage, limit_bytes, fused=True, recorder=recorder, device=device, compiles=compiles)
    backend.warm_up()
    return backend, recorder


@_DEVICES
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize(
    ("rounds", "autocast", "tolerance"),
    [("synchronous", "off", 1e-6), ("diloco", "off", 1e-6), ("diloco", "bf16", 1e-2), ("diloco", "fp16", 2e-3)],
)
def test_gradients_are_those_without_recordings(
    device: str, stage: int, rounds: str, autocast: Literal["off", "bf16", "fp16"], tolerance: float
) -> None:
    config = _SYNCHRONOUS if rounds == "synchronous" else _DILOCO
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, autocast=autocast))
    captured, recorder = _captured(config, stage, device=device)
    before = recorder.num_replays
    require_near(story(captured), story(backend_of(config, stage, fused=True, device=device)), tolerance)
    # Four microbatches, and the one that is computed again, have a forward and a backward.
    assert recorder.num_replays - before == 10
    assert (captured.budget.num_kept, captured.budget.num_recomputed) == (0, 0)


@_DEVICES
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("config", _KINDS.values(), ids=_KINDS)
def test_models_of_all_kinds_are_recorded(device: str, stage: int, config: RunConfig) -> None:
    captured, _ = _captured(config, stage, device=device)
    assert captured.function.num_recorded
    tolerance = 1e-6 if config.model.autocast == "off" else 1e-2
    require_near(story(captured), story(backend_of(config, stage, fused=True, device=device)), tolerance)


# The same as in test_backend_compiled.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")
@_ON_A_GPU
@pytest.mark.parametrize("stage", range(3))
def test_compiled_layers_are_recorded(stage: int) -> None:
    config = dataclasses.replace(_DILOCO, model=dataclasses.replace(CONFIG.model, autocast="bf16"))
    captured, _ = _captured(config, stage, device="cuda", compiles=True)
    assert captured.function.num_recorded
    require_near(story(captured), story(backend_of(config, stage, fused=True, device="cuda")), 1e-2)


# -- what recordings do not compute ------------------------------------------------------------------------------------


@_DEVICES
def test_with_more_in_flight_than_places_forwards_are_computed_again(device: str) -> None:
    whole, _ = _captured(_DILOCO, 1, PLENTY, device=device)
    few, recorder = _captured(_DILOCO, 1, whole.budget.recorded_bytes // 4, device=device)
    assert 1 < few.function.num_recorded < whole.function.num_recorded
    plain, results = backend_of(_DILOCO, 1, fused=True, device=device), []
    num_forwards = few.function.num_recorded + 1
    for backend in (few, plain):
        assert backend.function.has_room()
        backwards = [begin(backend, number) for number in range(num_forwards)]
        assert backend.function.has_room() == (backend is plain)
        results.append([backward()[0] for backward in backwards])
    for found, expected in zip(*results, strict=True):
        require_near(found, expected, 1e-6)
    require_near(sums_of([few]), sums_of([plain]), 1e-6)
    assert (few.budget.num_kept, few.budget.num_recomputed, few.function.has_room()) == (0, 2, True)
    assert few.budget.recorded_bytes <= few.budget.limit_bytes
    # Two forwards were computed again.
    assert recorder.num_replays == 2 * few.function.num_recorded + 2 * num_forwards + 2


def test_another_shape_is_computed_without_recordings() -> None:
    captured, recorder = _captured(_DILOCO, 2)
    before, found = recorder.num_replays, []
    inputs = {TOKENS: tokens_of(0)[:1, :6], HIDDEN: hidden_of(0)[:1, :5]}
    for backend in (captured, backend_of(_DILOCO, 2, fused=True)):
        loss, answer, _ = backend.forward_loss(0, 0, inputs, accumulate=True)
        found.append({"loss": torch.tensor(loss), "answer": arrived(answer), **sums_of([backend])})
    require_near(found[0], found[1], 1e-6)
    assert recorder.num_replays == before


def test_a_gradient_leaves_the_sum_as_it_came() -> None:
    """One that was not recorded is computed again without recordings."""
    recorder = TapeRecorder()
    backend = backend_of(_SYNCHRONOUS, 1, fused=True, recorder=recorder)
    _, plain = begin(backend, 0)()
    backend.warm_up()
    _, recorded = begin(backend, 1)()
    for entry, num_replays in ((plain, 0), (recorded, 2)):
        before = recorder.num_replays
        _, staying = begin(backend, 2)()
        backend.settle(staying)
        between = recorder.num_replays
        backend.roll_back([entry])
        assert (between - before, recorder.num_replays - between) == (2, num_replays)


def test_what_is_not_finite_leaves_nothing_behind() -> None:
    captured, _ = _captured(_DILOCO, 1)
    gradient = hidden_of(1)
    gradient[0, 3] = float("nan")
    with pytest.raises(MalformedMessage):
        captured.backward(captured.forward(0, 0, inputs_of(0)), gradient, accumulate=True)
    assert (captured.weights.version.users, captured.budget.num_kept) == (0, 0)
    assert captured.weights.buckets.num_samples == 0
    require_near(story(captured), story(backend_of(_DILOCO, 1, fused=True)), 1e-6)


@_DEVICES
@pytest.mark.parametrize("stage", [1, 2])
def test_what_overflows_float16_is_computed_again_by_recordings(
    device: str, stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, autocast="fp16"))
    recorder, results = TapeRecorder() if device == "cpu" else _CountedGraphs(), []
    for of_backend in (recorder, None):
        backend = backend_of(config, stage, _limit_bytes(device), fused=True, recorder=of_backend, device=device)
        if stage == 2:
            with torch.no_grad():
                # The gradient of a hidden state goes through the head's matrix.
                backend.weights.version.parameters["head.output.weight"].mul_(30_000.0)
        backend.warm_up()
        num_before = recorder.num_replays
        with caplog.at_level("INFO"):
            results.append(_large_gradients(backend))
        assert (backend.budget.num_kept, backend.budget.num_recomputed) == (0, 0)
        if of_backend is not None:
            num_halvings = caplog.text.count("overflows float16: computed again with half the scale")
            assert num_halvings > 2
            assert backend.function.num_recorded
            # Each of two microbatches has a forward and a backward, and both again for each halving.
            assert recorder.num_replays - num_before == 2 * (2 + num_halvings)
    require_near(results[0], results[1], 2e-3)


def _large_gradients(backend: StageBackend) -> dict[str, torch.Tensor]:
    """Two microbatches, both in flight if the stage is not the last one."""
    found = dict[str, torch.Tensor]()
    if backend.is_last:
        for number in range(2):
            _, answer, _ = backend.forward_loss(number, 0, inputs_of(number), accumulate=True)
            found[f"answer {number}"] = arrived(answer)
        return found | sums_of([backend])
    forwards = [backend.forward(number, 0, inputs_of(number)) for number in range(2)]
    for number, forward in enumerate(forwards):
        answer, _ = backend.backward(forward, 200.0 * hidden_of(100 + number), accumulate=True)
        found[f"answer {number}"] = arrived(answer)
    return found | sums_of([backend])


def test_what_changes_with_each_microbatch_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    backend, recorder = _captured(DROPOUT, 1)
    assert (backend.function.num_recorded, backend.budget.recorded_bytes, recorder.num_replays) == (0, 0, 0)
    assert not caplog.records


# -- memory and faults -------------------------------------------------------------------------------------------------


class _OnePool(TapeRecorder):
    """Has forwards share the memory of backwards."""

    def __init__(self) -> None:
        super().__init__()
        self._one = super().pool()

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        return super().record(work, self._one)


class _Unable(TapeRecorder):
    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.\nsee the docs")


@pytest.mark.parametrize(
    ("kind", "limit_bytes", "reason"),
    [
        (_OnePool, PLENTY, "what was recorded differs by nan, and the largest number is .*"),
        (_Unable, PLENTY, "CUDA out of memory. Tried to allocate 4.00 GiB. see the docs"),
        (TapeRecorder, 1, "this takes .* KiB, and graphs may take 1 bytes"),
    ],
)
def test_a_stage_that_cannot_be_recorded_goes_on_without(
    kind: type[TapeRecorder], limit_bytes: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = kind()
    backend = backend_of(_DILOCO, 1, limit_bytes, fused=True, recorder=recorder)
    backend.warm_up()
    (line,) = [record.message for record in caplog.records]
    assert re.fullmatch(f"stage 1 goes on without CUDA graphs, and so slower: {reason}", line)
    assert (backend.function.num_recorded, backend.budget.recorded_bytes) == (0, 0)
    before = recorder.num_replays
    require_near(story(backend), story(backend_of(_DILOCO, 1, fused=True)), 1e-6)
    assert recorder.num_replays == before


@pytest.mark.parametrize("factor", [1.0, 1.1, float("nan")])
def test_recordings_are_compared_with_what_is_computed_without_them(factor: float) -> None:
    weights = {name: torch.ones(2, requires_grad=True) for name in ("a", "b")}

    def compute(weights: Mapping[str, torch.Tensor], arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return arguments["inputs"] * weights["a"] + weights["b"]

    def plain(arguments: Mapping[str, torch.Tensor]) -> Graph:
        b = weights["b"] * 1.0
        b.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]  # torch's
        inputs = arguments["inputs"].requires_grad_()
        return Graph(inputs, inputs * weights["a"] + b, list(weights.values()))

    def capture() -> CapturedStage:
        return CapturedStage(
            TapeRecorder(), compute, plain, lambda _: Example({"inputs": torch.ones(2)}, torch.ones(2)),
            Version(parameters=weights), cast_types={}, limit_bytes=PLENTY,
        )  # fmt: skip

    if factor == 1.0:
        assert capture().num_places
        return
    with pytest.raises(RuntimeError, match="what was recorded differs"):
        capture()


class _Watched(TapeRecorder):
    """Tells which of its recordings something refers to."""

    def __init__(self) -> None:
        super().__init__()
        self._replays: WeakSet[Callable[[], None]] = WeakSet()

    @property
    def num_alive(self) -> int:
        return len(self._replays)

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        recording = super().record(work, pool)
        self._replays.add(recording.replay)
        return recording


@pytest.fixture
def _no_cycles() -> Iterator[None]:
    """Without its collector, Python frees only what nothing refers to, as it does in time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_cycles")
def test_recordings_are_given_back_when_memory_runs_out(caplog: pytest.LogCaptureFixture) -> None:
    recorder = _Watched()
    captured = backend_of(_DILOCO, 1, fused=True, recorder=recorder)
    captured.warm_up()
    assert recorder.num_alive == 2 * captured.function.num_recorded
    plain, results = backend_of(_DILOCO, 1, fused=True), []
    for backend in (captured, plain):
        first = begin(backend, 1)
        if backend is captured:
            captured.budget.halve()
        second = begin(backend, 2)
        replays = recorder.num_replays
        results += [{**first()[0], **{f"second {name}": value for name, value in second()[0].items()}}]
        results[-1] |= sums_of([backend])
        assert recorder.num_replays == replays + (backend is captured), "the one in flight goes on"
    require_near(results[0], results[1], 1e-6)
    assert [record.message for record in caplog.records] == [
        "stage 1 goes on without CUDA graphs: their memory is needed"
    ]
    assert (captured.function.num_recorded, captured.budget.recorded_bytes, captured.budget.num_kept) == (0, 0, 0)
    del first, second, backend
    assert recorder.num_alive == 0


@pytest.mark.usefixtures("_no_cycles")
def test_recordings_go_with_their_stage() -> None:
    """A peer that moves to another stage needs the memory."""
    recorder = _Watched()
    backend = backend_of(_DILOCO, 1, fused=True, recorder=recorder)
    backend.warm_up()
    assert recorder.num_alive
    del backend
    assert recorder.num_alive == 0
