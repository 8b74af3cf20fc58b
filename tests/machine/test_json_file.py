"""JSON that anybody may have written."""

from pathlib import Path

import pytest

from swarm.machine import json_file

FAULTS = [
    (b"", "it is not valid JSON: Expecting value"), (b"{", "it is not valid JSON: Expecting property name"),
    (b"\xff", "it is not UTF-8 text"), (b"[" * 200_000, "it is not valid JSON: it is nested too deeply"),
    (b'{"a": ' + b"1" * 5000 + b"}", "it has a number of more than 4,300 digits"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "fault"), FAULTS)
def test_what_is_no_json_is_one_line(content: bytes, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{fault}"):
        json_file.parse(content)
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^cannot read {path}: {fault}") as raised:
        json_file.read_object(path, is_optional=True)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["[1]", "5", "null", '"a"'])
def test_what_holds_no_object_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: it holds no JSON object$"):
        json_file.read_object(path)


def test_a_file_may_be_missing_where_it_is_optional(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert json_file.read_object(path, is_optional=True) == {}
    with pytest.raises(ValueError, match=r"cannot read .*config\.json: No such file"):
        json_file.read_object(path)
    path.write_text('{"a": 1}')
    assert json_file.read_object(path) == {"a": 1}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    json_file.write_object(tmp_path / "summary.json", {"loss": 2.5, "files": ["a"]})
    assert json_file.read_object(tmp_path / "summary.json") == {"loss": 2.5, "files": ["a"]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_file.write_object(tmp_path / "summary.json", {"loss": float("nan")})
