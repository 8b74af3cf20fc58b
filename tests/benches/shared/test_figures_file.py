"""The file of `bench all`: a file of another form is refused in one line, and figures have their origin."""

from pathlib import Path

import pytest

import swarm
from scripts.benches.shared import figures_file


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    entries = {"hop": {**figures_file.origin(), "figures": {"ratio_to_hivemind_moe": 2.0}}}
    figures_file.write(tmp_path / "all.json", entries)
    assert figures_file.read(tmp_path / "all.json") == entries
    assert {"version", "measured_at", "machine", "torch"} < entries["hop"].keys()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"benches": []}', '{"benches": {"hop": 1}}', '{"benches": {"hop": {"version": "1"}}}'],
)
def test_anything_else_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "all.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"all\.json is no file of figures") as refusal:
        figures_file.read(path)
    assert len(str(refusal.value).splitlines()) == 1


def test_without_git_the_version_is_the_package_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert figures_file.version() == swarm.__version__
