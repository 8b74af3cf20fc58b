"""The command line of benches and studies: its exit code, and what it lists."""

import sys
from types import ModuleType
from typing import Any

import pytest

from scripts.benches.menu import run_named
from scripts.benches.shared.common import OutputOptions


def _module(figures: dict[str, Any]) -> ModuleType:
    """A bench that gives these figures."""
    module = ModuleType("bench")
    vars(module).update(Options=OutputOptions, run=lambda options: figures)
    return module


@pytest.mark.parametrize(
    ("figures", "code"),
    [({"passed": False}, 1), ({"passed": True}, 0), ({"passed": None}, 0), ({"ratio": 0.5}, 0)],
)
def test_what_has_not_passed_is_exit_code_1(
    figures: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "gate", "--json"])
    assert run_named("bench", "benches", {"gate": ""}, lambda name: _module(figures)) == code
