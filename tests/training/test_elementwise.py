"""Work on tensors in pieces treats every element once, on any number of threads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swarm.training import elementwise
from swarm.training.elementwise import treat


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Set the number of threads, and make pieces small."""
    monkeypatch.setattr(elementwise, "CACHED_ELEMENTS", 64)
    monkeypatch.setattr(elementwise, "GPU_ELEMENTS", 100)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _add_product(xp: Any, scratch: Any, sums: Any, values: Any) -> None:
    """sums <- sums + 3 values"""
    xp.multiply(values, 3.0, out=scratch)
    xp.add(sums, scratch, out=sums)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (64,), (65,), (3, 500), (5, 4, 30)])
def test_every_element_has_its_turn_once(shape: tuple[int, ...], num_threads: int, together: bool) -> None:
    sums, values = torch.rand(shape), torch.rand(shape)
    expected, before = sums + 3.0 * values, values.clone()
    treat(_add_product, [[sums.requires_grad_(), values]], together=together)
    assert torch.equal(sums, expected)
    assert torch.equal(values, before)


@pytest.mark.parametrize("together", [False, True])
def test_rows_need_not_lie_one_after_the_other(num_threads: int, together: bool) -> None:
    sums, values = torch.rand(40, 70).T, torch.rand(70, 80)[:, ::2]
    expected = sums + 3.0 * values
    treat(_add_product, [[sums, values]], together=together)
    assert torch.equal(sums, expected)


def test_what_is_no_number_warns_of_nothing_and_what_fails_is_raised(num_threads: int) -> None:
    """Any warning fails a test."""
    sums = torch.full((200,), 3e38)
    treat(_add_product, [[sums, sums.clone()]], together=False)
    assert torch.isinf(sums).all()

    def fail(xp: Any, scratch: Any, piece: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        treat(fail, [[sums]], together=False)
