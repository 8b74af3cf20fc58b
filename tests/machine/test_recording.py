"""Recordings compute again what was recorded, with what their inputs hold by then.

On a GPU these are CUDA graphs; on the CPU the tapes that stand in for them in other tests are held to the same.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from swarm.machine.recording import CudaRecorder, Recorder
from tests.support.tape import TapeRecorder

_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def _recorder(device: str) -> Recorder:
    return CudaRecorder(torch.device(device)) if device == "cuda" else TapeRecorder()


@pytest.mark.parametrize("device", _DEVICES)
def test_a_forward_and_its_backward_are_computed_again_from_new_inputs(device: str) -> None:
    recorder = _recorder(device)
    options: dict[str, Any] = {"device": device}
    weight = torch.randn(4, 4, **options, requires_grad=True)
    inputs = torch.zeros(3, 4, **options)
    sum_of_all = torch.zeros(4, 4, **options)
    ran = []

    def forward() -> torch.Tensor:
        ran.append("forward")
        output: torch.Tensor = (inputs @ weight).tanh().square().sum()
        return output

    def gradient(output: torch.Tensor) -> torch.Tensor:
        ran.append("backward")
        (found,) = torch.autograd.grad(output, weight)
        sum_of_all.add_(found)
        return found

    recorder.warm_up(lambda: gradient(forward()))
    ahead = recorder.record(forward)
    back = recorder.record(lambda: gradient(ahead.result), recorder.pool())
    ran.clear()
    sum_of_all.zero_()
    expected = torch.zeros_like(sum_of_all)
    for number in range(3):
        new = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to(device)
        inputs.copy_(new)
        with torch.no_grad():
            weight.mul_(0.9)
        ahead.replay()
        back.replay()
        leaf = weight.detach().clone().requires_grad_()
        loss = (new @ leaf).tanh().square().sum()
        (alone,) = torch.autograd.grad(loss, leaf)
        expected += alone
        torch.testing.assert_close(ahead.result.detach(), loss.detach())
        torch.testing.assert_close(back.result, alone)
    torch.testing.assert_close(sum_of_all, expected)
    assert not ran, "Python does not run again"


@pytest.mark.parametrize("device", _DEVICES)
def test_nothing_is_read_while_something_is_recorded(device: str) -> None:
    recorder: Any = _recorder(device)
    tensor = torch.ones(3, device=device)
    earlier = recorder.record(lambda: tensor + 3)
    with pytest.raises(RuntimeError, match=r"not permitted|captur"):
        recorder.record(lambda: float(tensor.sum()))
    if device == "cuda":
        assert torch.cuda.current_stream() == torch.cuda.default_stream(), "what is computed next is not in the way"
    earlier.replay()
    recording = recorder.record(lambda: tensor + 1)
    recording.replay()
    assert (earlier.result.tolist(), recording.result.tolist()) == ([4.0] * 3, [2.0] * 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_thread_replays_once_nothing_is_recorded_any_more() -> None:
    """Several models may write text on one GPU, each on a thread of its own."""
    recorders, tensor = [CudaRecorder(torch.device("cuda")) for _ in range(2)], torch.ones(3, device="cuda")
    first = recorders[0].record(lambda: tensor + 1)
    with ThreadPoolExecutor(1) as thread:

        def work() -> tuple[torch.Tensor, Future[None]]:
            replayed = thread.submit(first.replay)
            wait([replayed], timeout=0.1)
            return tensor + 2, replayed

        second = recorders[1].record(work)
        second.result[1].result()
    second.replay()
    assert (first.result.tolist(), second.result[0].tolist()) == ([2.0] * 3, [3.0] * 3)


def test_on_a_tape_results_come_with_replays_and_go_with_those_of_its_pool() -> None:
    """So a test on the CPU fails where a CUDA graph would compute garbage."""
    recorder, one = TapeRecorder(), torch.ones(3)
    pool = recorder.pool()
    first = recorder.record(lambda: one + 1, pool)
    second = recorder.record(lambda: one + 2, pool)
    apart = recorder.record(lambda: one + 3)
    assert all(bool(recording.result.isnan().all()) for recording in (first, second, apart))
    for recording in (apart, first, second):
        recording.replay()
    assert [float(recording.result[0]) for recording in (first, second, apart)] == [2.0, 3.0, 4.0]
    first.replay()
    assert bool(second.result.isnan().all()), "the first was recorded before there was a second"
    assert (float(apart.result[0]), recorder.num_replays) == (4.0, 4)
