"""Sides that take turns: who comes first, what their ratio is, and how long the bench waits for them."""

from scripts.benches.shared.paired import Ratio, figures, in_turns, ratio


def test_every_second_repetition_is_the_other_way_round() -> None:
    order: list[tuple[str, int]] = []

    def side(name: str, value: float) -> float:
        order.append((name, len(order)))
        return value

    turns = in_turns({"a": lambda number: side("a", number), "b": lambda number: side("b", -number)}, 3)
    assert [name for name, _ in order] == ["a", "b", "b", "a", "a", "b"]
    assert turns == {"a": [0, 1, 2], "b": [0, -1, -2]}


def test_a_slow_minute_that_hits_both_sides_changes_nothing() -> None:
    one = ratio([10.0, 2.0, 10.0, 12.0], [5.0, 1.0, 5.0, 4.0])
    assert one == Ratio(median=2.0, extremes=(2.0, 3.0))
    assert figures({"to_limit": {"384": one}, "to_others": one}) == {
        "to_limit": {"384": 2.0}, "to_others": 2.0,
        "ratio_range": {"to_limit": {"384": [2.0, 3.0]}, "to_others": [2.0, 3.0]},
    }  # fmt: skip
