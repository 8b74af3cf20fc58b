"""The parts of the allreduce bench that could favour or harm a side unnoticed: values, distances, formula, orders."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.local.supervisor import Supervisor
from scripts.benches.allreduce import MAX_ERROR, Arm, Group, Options, _round, held
from scripts.benches.sides.averaging_peer import as_tensors, compare, distance, exact_mean, values
from swarm.errors import IntegrityError

NUM_PARAMETERS = 1000


def test_distances_are_shares_of_the_mean_and_name_what_is_held() -> None:
    means = {"all": [0, 1, 2], "survivors": [0, 1]}
    survivors_P = (values(0, NUM_PARAMETERS) + values(1, NUM_PARAMETERS)) / 2
    assert distance([2 * survivors_P], exact_mean([0, 1], NUM_PARAMETERS)) == pytest.approx(1.0)
    compared = compare(as_tensors(survivors_P), means, NUM_PARAMETERS)
    assert held(compared["distances"]) == "the mean of survivors"
    half_P = torch.where(torch.arange(NUM_PARAMETERS) < 500, survivors_P, exact_mean(range(3), NUM_PARAMETERS)).float()
    torn = compare(as_tensors(half_P), means, NUM_PARAMETERS)
    assert held(torn["distances"]) == "neither mean"
    assert torn["digest"] != compared["digest"]


class _Answering(Group):
    """A group whose members have already averaged, and report it with these messages."""

    def __init__(
        self, folder: Path, children: Supervisor, finished: list[dict[str, Any]], errors: Sequence[float] = (0.0, 0.0)
    ) -> None:
        super().__init__("hivemind", "", Options(parameters=NUM_PARAMETERS), children, folder)
        self.members = {number: children.start(f"idle-{number}", ["sleep", "60"]) for number in range(len(finished))}
        self._answers = {"finish": finished, "compare": [{"distances": {"all": error}} for error in errors]}

    def order(self, name: str, **arguments: Any) -> int:
        return 0

    def ask(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        return self._answers.get(name, [])


@pytest.mark.parametrize("errors", [(MAX_ERROR + 0.1, 0.0), (0.0, math.nan), (math.nan, 0.0), (0.0, math.inf)])
def test_who_holds_something_else_or_no_numbers_has_not_averaged(errors: tuple[float, float], tmp_path: Path) -> None:
    finished = [{"num_members": 2, "seconds": 1.0}, {"num_members": 2, "seconds": 1.0}]
    arm = Arm("ours", "fp16")
    with Supervisor(tmp_path) as children:
        assert _round(_Answering(tmp_path, children, finished), arm).error == 0.0
        with pytest.raises(IntegrityError, match="ours_fp16 has not averaged"):
            _round(_Answering(tmp_path, children, finished, errors), arm)
        failed: list[dict[str, Any]] = [finished[0], {"seconds": 60.0, "error": "TimeoutError: no group"}]
        with pytest.raises(IntegrityError, match=r"not averaged.*TimeoutError: no group"):
            _round(_Answering(tmp_path, children, failed), arm)
