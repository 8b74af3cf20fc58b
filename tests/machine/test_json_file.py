"""JSON files of strangers."""

from pathlib import Path

import pytest

from swarm.machine import json_file


@pytest.mark.parametrize(("text", "values"), [('{"a": 1}', {"a": 1}), ("[1]", {}), ("5", {})])
def test_what_holds_no_object_is_empty(text: str, values: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert json_file.read_object(path) == {}
    path.write_text(text)
    assert json_file.read_object(path) == values


@pytest.mark.parametrize("text", ["{", "\xff", "[" * 200_000])
def test_what_is_no_json_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        json_file.read_object(path)
