"""How the bench `hop` takes calls of hivemind.moe that fail."""

from typing import Any

import pytest
import torch

from scripts.benches.hop import ATTEMPTS, TheirExpert
from swarm.errors import PeerUnavailable


def _expert(*failures: bool) -> TheirExpert:
    """An identity whose calls fail or not, one after another."""
    fails = iter(failures)

    def call(inputs: torch.Tensor) -> torch.Tensor:
        if next(fails):
            raise RuntimeError("half of it is lost")
        return inputs * 1.0

    expert: Any = call
    return TheirExpert(expert, None, torch.zeros(2, 2), torch.ones(2, 2))


def test_a_failed_call_is_counted_and_made_again_but_not_for_ever() -> None:
    expert = _expert(True, False, False)
    assert min(expert.call(), expert.call()) > 0
    assert expert.num_failed == 1
    with pytest.raises(PeerUnavailable, match="in a row"):
        _expert(*[True] * ATTEMPTS).call()
