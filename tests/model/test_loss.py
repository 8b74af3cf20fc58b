"""The loss in chunks is compared with torch's cross entropy of all logits at once."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.model import loss as loss_module
from swarm.model.functions import as_cast
from swarm.model.loss import chunk_length, summed_loss, summed_loss_of_logits
from swarm.training.samples import NO_TARGET

_Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
_LARGE = (2, 60, 8, 50_000)
"""B, T, D, V: two chunks of positions, four blocks of the vocabulary, the last ones smaller."""
_SMALL = (2, 60, 8, 50)


def _all_at_once(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> Tensor:
    logits_BTV = F.linear(hidden_BTD, weight_VD)
    return summed_loss_of_logits(logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32)), targets_BT)


def _inputs(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden state, weight, and targets, with positions without a target in the middle and at an end."""
    num_samples, length, d_model, vocab_size = shape
    generator = torch.Generator().manual_seed(0)
    targets_BT = torch.randint(vocab_size, (num_samples, length), generator=generator)
    targets_BT[0, 20:40] = NO_TARGET
    targets_BT[1, -1] = NO_TARGET
    hidden_BTD = torch.randn(num_samples, length, d_model, generator=generator)
    return hidden_BTD, 0.3 * torch.randn(vocab_size, d_model, generator=generator), targets_BT


def _loss_and_gradients(loss: _Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The loss, and its gradients scaled by a third, as for a mean over three targets."""
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    summed = loss(*leaves, targets)
    return summed.detach(), *torch.autograd.grad(summed / 3, leaves)


def _errors(ours: Iterable[Tensor], expected: Iterable[Tensor]) -> list[float]:
    pairs = [(a.double(), b.double()) for a, b in zip(ours, expected, strict=True)]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


@pytest.fixture(params=["lean", "fused"])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Loss:
    """The loss as a CPU computes it, and as a GPU does, there in two chunks as well."""
    monkeypatch.setattr(loss_module, "_FUSED_CHUNK", _LARGE[3] * 64)
    return partial(summed_loss, fused=request.param == "fused")


@pytest.mark.parametrize("shape", [_LARGE, _SMALL])
def test_loss_and_gradients_are_those_of_all_logits_at_once(shape: tuple[int, int, int, int], ours: _Loss) -> None:
    hidden, weight, targets = _inputs(shape)
    found = _loss_and_gradients(ours, hidden, weight, targets)
    at_once = _loss_and_gradients(_all_at_once, hidden, weight, targets)
    exact = _loss_and_gradients(_all_at_once, hidden.double(), weight.double(), targets)
    # How exact a product over the vocabulary is differs between processors: from 1e-7 to 4e-6.
    bounds = [max(1e-6, 1.5 * error) for error in _errors(at_once, exact)]
    assert all(error < bound for error, bound in zip(_errors(found, exact), bounds, strict=True))
    assert max(_errors(_loss_and_gradients(ours, hidden.double(), weight.double(), targets), exact)) < 1e-13
    assert all(
        torch.equal(a, b) for a, b in zip(_loss_and_gradients(ours, hidden, weight, targets), found, strict=True)
    )


def test_a_position_without_target_counts_nothing(ours: _Loss) -> None:
    hidden, weight, targets = _inputs(_SMALL)
    _, hidden_gradient, _ = _loss_and_gradients(ours, hidden, weight, targets)
    assert torch.equal(hidden_gradient.any(dim=-1), targets != NO_TARGET)
    nothing = torch.full_like(targets, NO_TARGET)
    assert not any(value.any() for value in _loss_and_gradients(ours, hidden, weight, nothing))


def test_large_logits_do_not_overflow(ours: _Loss) -> None:
    hidden, weight, targets = _inputs(_SMALL)
    found = _loss_and_gradients(ours, 300 * hidden, weight, targets)
    assert (
        max(_errors(found, _loss_and_gradients(_all_at_once, 300 * hidden.double(), weight.double(), targets))) < 1e-5
    )


@pytest.mark.parametrize("shape", [pytest.param(_LARGE, marks=pytest.mark.slow), _SMALL])
@pytest.mark.parametrize("shares_cast", [False, True])
def test_with_autocast_products_alone_are_in_bfloat16(
    shape: tuple[int, int, int, int], shares_cast: bool, ours: _Loss
) -> None:
    """The results are as near as autograd's."""
    hidden, weight, targets = _inputs(shape)

    def shared(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return ours(hidden, as_cast(weight, weight.detach().bfloat16()) if shares_cast else weight, targets)

    exact = _loss_and_gradients(summed_loss, hidden.double(), weight.double(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = _loss_and_gradients(shared, hidden, weight, targets)
        theirs = _loss_and_gradients(_all_at_once, hidden, weight, targets)
    assert [value.dtype for value in found] == [torch.float32] * 3
    loss_error, *gradient_errors = _errors(found, exact)
    assert loss_error < 1e-3
    assert all(a < 1.2 * b for a, b in zip(gradient_errors, _errors(theirs, exact)[1:], strict=True))
    assert min(gradient_errors) > 1e-4


def test_a_frozen_weight_may_be_of_another_type(ours: _Loss) -> None:
    hidden, weight, targets = _inputs(_LARGE)
    hidden.requires_grad_()
    (found,) = torch.autograd.grad(ours(hidden, weight.bfloat16(), targets), hidden)
    (expected,) = torch.autograd.grad(_all_at_once(hidden, weight.bfloat16().float(), targets), hidden)
    assert _errors([found], [expected])[0] < 1e-6


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Collects the bytes of memory of all operations' results, by address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.num_bytes: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(options or {}))
        if isinstance(result, Tensor):
            self.num_bytes[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
        return result


def test_logits_are_never_there_for_all_positions() -> None:
    """Besides a chunk's logits and the weight's gradient, no tensor as large is made."""
    hidden, weight, targets = _inputs(_LARGE)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with _Made() as made:
        loss = summed_loss(*leaves, targets)
    del made.num_bytes[weight.untyped_storage().data_ptr()]
    assert loss.requires_grad
    *others, gradient_bytes, logits_bytes = sorted(made.num_bytes.values())
    assert logits_bytes == 4 * chunk_length(120, 8, 50_000) * 50_000 == 4 * 80 * 50_000
    assert gradient_bytes == weight.nbytes
    assert max(others) < 10 * hidden.nbytes
