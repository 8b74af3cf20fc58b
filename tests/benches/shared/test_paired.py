"""Sides that take turns: who comes first, and what their ratio is."""

from scripts.benches.shared.paired import Ratio, figures, in_turns, median_interval, medians, ratio, spread


def test_every_second_repetition_is_the_other_way_round() -> None:
    order: list[tuple[str, int]] = []

    def side(name: str, value: float) -> float:
        order.append((name, len(order)))
        return value

    turns = in_turns({"a": lambda number: side("a", number), "b": lambda number: side("b", -number)}, 3)
    assert [name for name, _ in order] == ["a", "b", "b", "a", "a", "b"]
    assert turns == {"a": [0, 1, 2], "b": [0, -1, -2]}


def test_a_slow_minute_that_hits_both_sides_changes_nothing() -> None:
    ours, theirs = [10.0, 2.0, 10.0, 12.0], [5.0, 1.0, 5.0, 4.0]
    assert ratio(ours, theirs) == Ratio(median=2.0, extremes=(2.0, 3.0), interval=(2.0, 3.0))
    assert medians({"ours": ours, "theirs": theirs}) == {"ours": 10.0, "theirs": 4.5}


def test_of_one_value_there_is_no_spread() -> None:
    assert spread([2.0]) == 0.0
    assert spread([2.0, 4.0]) == 2**0.5


def test_ratios_are_named_with_their_extremes() -> None:
    one = Ratio(median=2.0, extremes=(1.0, 3.0), interval=(1.0, 3.0))
    assert figures({"ratio_to_limit": {"384": one}, "ratio_to_others": one}) == {
        "ratio_to_limit": {"384": 2.0},
        "ratio_to_others": 2.0,
        "ratio_range": {"ratio_to_limit": {"384": [1.0, 3.0]}, "ratio_to_others": [1.0, 3.0]},
    }


def test_where_the_median_lies_is_told_by_the_sign_test() -> None:
    """Table: of 12 values two at each end are left out, of 16 three, and of five none."""
    assert median_interval([float(n) for n in range(12, 0, -1)]) == (3.0, 10.0)
    assert median_interval([float(n) for n in range(1, 17)]) == (4.0, 13.0)
    assert median_interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0)
