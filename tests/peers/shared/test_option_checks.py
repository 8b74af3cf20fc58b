"""What options may say."""

from types import SimpleNamespace

import pytest

from peers.shared.option_checks import require_distinct, require_known, require_positive


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_what_has_to_be_positive_is_finite_as_well(value: float) -> None:
    require_positive(SimpleNamespace(some_seconds=0.5), ["some_seconds"])
    with pytest.raises(ValueError, match=f"^--some-seconds must be positive, not {value}$"):
        require_positive(SimpleNamespace(some_seconds=value), ["some_seconds"])


def test_a_list_of_names_has_known_ones_alone() -> None:
    require_known(SimpleNamespace(some_names=("a", "b")), "some_names", ("a", "b", "c"))
    require_known(SimpleNamespace(some_names=()), "some_names", ("a",), at_least=0)
    with pytest.raises(ValueError, match=r"^--some-names: 'd' is none of a, b$"):
        require_known(SimpleNamespace(some_names=("a", "d")), "some_names", ("a", "b"))
    with pytest.raises(ValueError, match=r"^--some-names needs at least one name$"):
        require_known(SimpleNamespace(some_names=()), "some_names", ("a",))


@pytest.mark.parametrize("values", [(), ("a", "b", "a")])
def test_a_list_names_something_and_nothing_twice(values: tuple[str, ...]) -> None:
    require_distinct(SimpleNamespace(some_names=("a", "b")), ["some_names"])
    with pytest.raises(ValueError, match=r"^--some-names must name at least one, and none twice$"):
        require_distinct(SimpleNamespace(some_names=values), ["some_names"])
