"""The results that rounds of FakeStages must have."""

import numpy as np
import torch

from tests.averaging.fake_stage import FakeStage, gradient


def expected_mean(*indices: int) -> np.ndarray:
    """The mean gradient of some microbatches, as one vector."""
    return np.asarray(np.mean([gradient(i).double().numpy() for i in indices], axis=0))


def result_vector(stage: FakeStage, nth: int = 0) -> np.ndarray:
    """One of the averages that a stage has applied, as one vector."""
    tensors = stage.results[nth].tensors
    return torch.cat([tensors["b"], tensors["a"].reshape(-1)]).numpy()


def assert_equal_and_once(members: list[FakeStage], rounds: int = 1) -> None:
    """Assert that all peers came to the same round by commits, with the same bits and the same lineage."""
    assert {stage.round for stage in members} == {rounds}
    assert len({stage.digest for stage in members}) == 1
    assert len({stage.lineage for stage in members}) == 1
    assert all(len(stage.results) <= rounds for stage in members)
