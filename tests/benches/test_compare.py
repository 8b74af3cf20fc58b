"""Two files of figures: what changed, and which way."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.benches import compare
from scripts.benches.catalogue import MEASURING, module_of
from scripts.benches.compare import Options, verdict
from scripts.benches.shared.judged import LESS, MORE, MORE_OF_DIFFERENCE, Judgement

Outcomes = Mapping[str, Mapping[str, Any]]
"""The results of some benches."""


def _files(tmp_path: Path, *contents: Any) -> tuple[Path, Path]:
    paths = tmp_path / "old.json", tmp_path / "new.json"
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    return paths


def _compare(tmp_path: Path, *contents: Outcomes) -> dict[str, Any]:
    files = [{"benches": {name: {"version": "1", **outcome} for name, outcome in one.items()}} for one in contents]
    return compare.run(Options(files=_files(tmp_path, *files)))


def _verdicts(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: change["verdict"] for name, change in found["changes"].items()}


def test_only_what_a_bench_declares_is_judged(tmp_path: Path) -> None:
    before: Outcomes = {
        "memory": {"figures": {"recompute_seconds_ratio": 1.3, "parameters": 4}},
        "peers": {"figures": {"ratio_to_hivemind_moe": 1.5, "tokens_per_second": {"swarm": 9.0, "moe": 6.0}}},
        "parity": {"figures": {"passed": True, "max_loss_rel_diff": 2e-8}},
    }
    after: Outcomes = {
        "memory": {"figures": {"recompute_seconds_ratio": 1.2, "parameters": 5}},
        "peers": {"figures": {"ratio_to_hivemind_moe": 1.2, "tokens_per_second": {"swarm": 9.0, "moe": 7.5}}},
        "parity": {"figures": {"passed": False, "max_loss_rel_diff": 9e-8}},
    }
    found = _compare(tmp_path, before, after)
    assert _verdicts(found) == {
        "memory.parameters": "changed",
        "memory.recompute_seconds_ratio": "better",
        "parity.max_loss_rel_diff": "changed",
        "parity.passed": "worse",
        "peers.ratio_to_hivemind_moe": "worse",
        "peers.tokens_per_second.moe": "changed",
    }
    assert found["worse"] == ["parity.passed", "peers.ratio_to_hivemind_moe"]
    assert compare.exit_code(found) == 1


def test_rows_are_known_by_their_fields_and_lists_of_numbers_left_out(tmp_path: Path) -> None:
    rows = [{"megabits": 500.0, "round_trip_ms": ms, "share": share} for ms, share in ((0, 1.0), (100, 0.9))]
    before = {"wan": {"figures": {"rows": {"gpt3": rows}, "curve": [1.0, 2.0]}}}
    after = {"wan": {"figures": {"rows": {"gpt3": [{**rows[1], "share": 0.7}, rows[0]]}, "curve": [3.0, 4.0]}}}
    found = _compare(tmp_path, before, after)
    assert _verdicts(found) == {"wan.rows.gpt3.500.0 100.share": "worse"}


def test_a_bench_that_fails_now_is_worse(tmp_path: Path) -> None:
    figures, error = {"figures": {"ratio_to_hivemind_moe": 2.0}}, {"error": "exit code 1"}
    assert _verdicts(_compare(tmp_path, {"hop": figures}, {"hop": error})) == {"hop": "worse"}
    assert _verdicts(_compare(tmp_path, {"hop": error}, {"hop": figures})) == {"hop": "better"}
    assert _verdicts(_compare(tmp_path, {"hop": error}, {"hop": error})) == {}


def test_a_judged_figure_that_is_gone_is_worse(tmp_path: Path) -> None:
    before: Outcomes = {
        "hop": {"figures": {"ratio_to_hivemind_moe": 2.0, "warm_up": 3}},
        "gpu": {"error": "exit code 2"},
    }
    after: Outcomes = {
        "hop": {"figures": {"ratio_to_hivemind_moe": None, "calls": 5}},
        "wire": {"figures": {"steps": 600}},
    }
    found = _compare(tmp_path, before, after)
    assert found["worse"] == ["hop.ratio_to_hivemind_moe"]
    assert found["gone"] == ["gpu", "hop.warm_up"]
    assert found["new"] == ["hop.calls", "wire"]


@pytest.mark.parametrize(
    ("judgement", "old", "new", "expected"),
    [
        (MORE, 1.0, 0.96, None),
        (MORE, 1.0, 0.9, "worse"),
        (LESS, 1.0, 0.9, "better"),
        (None, 1.0, 0.9, "changed"),
        (MORE_OF_DIFFERENCE, 0.04, 0.0, None),
        (MORE_OF_DIFFERENCE, 0.04, -0.04, "worse"),
        (LESS, 1.0, math.nan, "worse"),
        (MORE, 1.0, math.inf, "worse"),
        (MORE, math.nan, 1.0, "better"),
        (MORE, math.nan, math.nan, None),
        (None, 1.0, math.nan, "changed"),
    ],
)
def test_verdicts(judgement: Judgement | None, old: float, new: float, expected: str | None) -> None:
    assert verdict(judgement, old, new, 0.05) == expected


@pytest.mark.parametrize("name", MEASURING)
def test_every_bench_says_what_is_judged(name: str) -> None:
    assert module_of(name).JUDGED
    assert all(isinstance(judgement, Judgement) for judgement in module_of(name).JUDGED.values())


def test_what_is_no_file_of_figures_is_named(tmp_path: Path) -> None:
    old, new = _files(tmp_path, {"benches": {}}, [])
    with pytest.raises(ValueError, match=r"new\.json is no file of figures"):
        Options(files=(old, new))
