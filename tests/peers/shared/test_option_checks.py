"""What options may say."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from peers.shared.option_checks import require_distinct, require_kinds, require_known, require_ports, require_positive


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


@pytest.mark.parametrize("port", [None, 0, 65535])
def test_a_port_or_none_is_taken(port: int | None) -> None:
    require_ports(SimpleNamespace(some_port=port), ["some_port"])


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"--some-port must be between 0 and 65535, not {port}"):
        require_ports(SimpleNamespace(some_port=port), ["some_port"])


def test_a_file_and_a_folder_do_not_take_each_others_place(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    given = SimpleNamespace(some_file=tmp_path, some_folder=file, left_out=None, to_come=tmp_path / "to-come")
    with pytest.raises(ValueError, match=f"^--some-file {tmp_path} is a folder: it takes a file$"):
        require_kinds(given, files=["some_file"])
    with pytest.raises(ValueError, match=f"^--some-folder {file} is no folder$"):
        require_kinds(given, folders=["some_folder"])
    both = ["left_out", "to_come"]
    require_kinds(given, files=[*both, "some_folder"], folders=[*both, "some_file"])
