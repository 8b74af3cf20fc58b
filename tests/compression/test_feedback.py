import torch

from swarm.compression.feedback import ErrorFeedback, Owed, Residual


def residual(contribution: list[float] | None, *owed: Owed) -> Residual:
    return Residual(contribution_D=None if contribution is None else torch.tensor(contribution), owed=owed)


def test_what_was_dropped_comes_with_the_next_contribution() -> None:
    feedback = ErrorFeedback(0.5)
    contribution = torch.tensor([1.0, 2.0])
    assert feedback.compensate(contribution) is contribution
    feedback.commit(residual([4.0, -2.0]))
    assert feedback.compensate(contribution).tolist() == [3.0, 1.0]
    assert contribution.tolist() == [1.0, 2.0]
    assert feedback.num_bytes == 8


def test_a_round_without_a_contribution_leaves_the_residual() -> None:
    feedback = ErrorFeedback(1.0)
    feedback.commit(residual([1.0]))
    feedback.commit(residual(None))
    assert feedback.compensate(torch.zeros(1)).tolist() == [1.0]


def test_sums_are_owed_where_the_parts_overlap() -> None:
    feedback = ErrorFeedback(0.5)
    assert feedback.owed(slice(0, 4)) is None
    feedback.commit(residual(None, Owed(slice(2, 5), torch.tensor([2.0, 4.0, 6.0]))))
    owed = feedback.owed(slice(0, 4))
    assert owed is not None
    assert owed.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert feedback.owed(slice(5, 9)) is None
    inner = feedback.owed(slice(3, 4))
    assert inner is not None
    assert inner.tolist() == [2.0]
