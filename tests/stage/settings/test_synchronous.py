"""Weights in the synchronous setting, against torch's optimizer in one process."""

import dataclasses

import pytest
import torch

from swarm.config import Amendment
from swarm.config.schedule import learning_rate
from swarm.errors import IntegrityError
from swarm.stage.stage import weights_of
from swarm.stage.state import digest_of
from swarm.stage.weights import Round, StageWeights
from swarm.training.tally import Given
from tests.stage.linear import accumulate, assert_same, config_of, gradients, linear, weights_in
from tests.support.commits import end_round, result_of, state_tensors
from tests.support.locked import OWNER


def test_synchronous_commits_are_adamw_in_one_process() -> None:
    """Clipping is by the norm of the whole model, and the rate follows the run's samples."""
    options: dict[str, float | str] = {
        "weight_decay": 0.1, "clip_norm": 1.0, "schedule": "cosine", "warmup_samples": 8, "total_samples": 64,
    }  # fmt: skip
    weights = weights_in("synchronous", **options)
    config = config_of("synchronous", **options).optimizer
    reference = dict(linear().named_parameters())
    adamw = torch.optim.AdamW(
        [{"params": [reference["weight"]], "weight_decay": 0.1}, {"params": [reference["bias"]], "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )
    for number in range(3):
        accumulate(weights, 2 * number)
        accumulate(weights, 2 * number + 1)
        assert weights.round_samples == 4
        contribution = weights.contribute().tensors
        used = end_round(weights, contribution, total_squared_norm=9.0, num_members=4, lineage=f"after {number}")
        for group in adamw.param_groups:
            group["lr"] = learning_rate(config, 16 * number)
        assert used == learning_rate(config, 16 * number)
        for name, parameter in reference.items():
            parameter.grad = (gradients(2 * number)[name] + gradients(2 * number + 1)[name]) / 2 / 3.0
        adamw.step()
        assert_same(weights.masters, reference)
        assert_same(weights.version.parameters, reference)
        current = weights.round
        assert (current.number, current.run_samples, current.num_members) == (number + 1, 16 * (number + 1), 4)
        assert (current.lineage, current.closed, weights.round_samples) == (f"after {number}", False, 0)


def test_a_round_is_stepped_under_the_amendments_of_its_result() -> None:
    given: dict[str, float | str] = {"learning_rate": 0.1, "weight_decay": 0.0}
    later: dict[str, float | str] = {"learning_rate": 0.02, "weight_decay": 0.1, "clip_norm": 0.5}
    config = dataclasses.replace(config_of("synchronous", **given), owner=OWNER.authority.fingerprint)
    amended, other = weights_of(config, linear(), lineage=""), weights_of(config, linear(), lineage="")
    settings = [f"optimizer.{name}={value}" for name, value in later.items()]
    amended.timeline.add([Amendment.sign(OWNER, amended.timeline, 0, settings).text])

    def learn(weights: StageWeights, number: int, digest: str = "") -> float:
        accumulate(weights, 2 * number, 2 * number + 1)
        return end_round(weights, weights.contribute().tensors, total_squared_norm=9.0, amended=digest)

    # It is in force in round 0, but the group that has committed this round did not know it.
    assert learn(amended, 0) == learn(other, 0) == 0.1
    assert_same(amended.masters, other.masters)
    from_now_on = weights_in("synchronous", **given | later)
    from_now_on.install(state_tensors(other), Round(number=1, run_samples=16))
    for number in (1, 2):
        assert learn(amended, number, amended.timeline.last) == learn(from_now_on, number) == 0.02
        assert_same(amended.masters, from_now_on.masters)
    assert digest_of(amended.state()) == digest_of(from_now_on.state())
    with pytest.raises(IntegrityError, match="is not known here"):
        learn(amended, 3, "another")


def test_what_was_signed_in_a_round_is_forgotten_after_it() -> None:
    weights = weights_in("synchronous")
    weights.round.signed["ann"] = {4: torch.ones(1)}
    accumulate(weights, 0)
    contribution = weights.contribute().tensors
    weights.reopen()
    assert list(weights.round.signed) == ["ann"]
    end_round(weights, contribution)
    assert weights.round.signed == {}


def test_a_round_is_sketched_unless_one_peer_alone_made_the_last_one() -> None:
    weights = weights_in("synchronous")
    found = [weights.sketch is not None]
    for members in (["ann"], ["ann", "bob"], ["ann"]):
        average = {name: torch.zeros_like(master) for name, master in weights.masters.items()}
        result = result_of(weights.round.number, average)
        given = dict.fromkeys(members, Given(samples=1))
        tally = weights.round.tally.after(result.round, parent="", result="", given=given)
        weights.commit(dataclasses.replace(result, tally=tally))
        found.append(weights.sketch is not None)
    assert found == [True, False, True, False]
