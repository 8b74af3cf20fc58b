"""Who may commit a round."""

from swarm.averaging.quorum import has_quorum


def test_available_takes_whoever_is_there() -> None:
    assert has_quorum("available", ["a"], last_members=["a", "b", "c"], announced=lambda: ["a", "b", "c"])


def test_majority_wants_most_of_the_last_rounds_members() -> None:
    last = ["a", "b", "c", "d"]
    assert has_quorum("majority", ["a", "b", "c", "x"], last_members=last, announced=list)
    assert not has_quorum("majority", ["a", "b", "x", "y", "z"], last_members=last, announced=list), "half is not most"


def test_before_any_round_those_who_are_announced_count() -> None:
    assert has_quorum("majority", ["a", "b"], last_members=(), announced=lambda: ["a", "b", "c"])
    assert not has_quorum("majority", ["a"], last_members=(), announced=lambda: ["a", "b", "c"])
