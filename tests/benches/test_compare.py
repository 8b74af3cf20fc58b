"""Two files of figures: what changed, and which way."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.benches import compare


def _files(tmp_path: Path, *figures: Any) -> tuple[Path, Path]:
    paths = tmp_path / "old.json", tmp_path / "new.json"
    for path, values in zip(paths, figures, strict=True):
        path.write_text(json.dumps(values))
    return paths


def test_what_changed_is_judged_by_its_name(tmp_path: Path) -> None:
    before = {
        "ratio_to_limit": {"384": 0.9, "768": 0.95}, "error_ratio_int8": 0.2, "median_seconds": 2.0, "width": 4,
        "tensors": [{"name": "embedding", "nmse_ours": 0.8}], "passed": True, "gone": 1.0,
    }  # fmt: skip
    after = {
        "ratio_to_limit": {"384": 0.7, "768": 0.96}, "error_ratio_int8": 0.1, "median_seconds": 3.0, "width": 8,
        "tensors": [{"name": "embedding", "nmse_ours": 0.5}], "passed": False, "new": 1.0,
    }  # fmt: skip
    found = compare.run(compare.Options(files=_files(tmp_path, before, after)))
    assert {name: change["verdict"] for name, change in found["changes"].items()} == {
        "ratio_to_limit.384": "worse", "error_ratio_int8": "better", "median_seconds": "worse", "width": "changed",
        "tensors.embedding.nmse_ours": "better",
    }  # fmt: skip
    assert (found["worse"], found["gone"], found["new"]) == (
        ["median_seconds", "ratio_to_limit.384"],
        ["gone"],
        ["new"],
    )
    assert compare.exit_code(found) == 1


def test_noise_is_no_change(tmp_path: Path) -> None:
    found = compare.run(compare.Options(files=_files(tmp_path, {"seconds": 1.0}, {"seconds": 1.05})))
    assert (found["changes"], compare.exit_code(found)) == ({}, 0)


def test_what_is_no_file_of_figures_is_named(tmp_path: Path) -> None:
    old, new = _files(tmp_path, {}, [])
    with pytest.raises(ValueError, match=r"new\.json holds no figures"):
        compare.run(compare.Options(files=(old, new)))
