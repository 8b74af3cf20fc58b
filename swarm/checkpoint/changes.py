"""Which fields of the configuration may change when a run goes on from a checkpoint, and which of them did."""

import dataclasses
from collections.abc import Callable
from typing import Any

from swarm import config as configs
from swarm.config import RunConfig

Difference = tuple[Any, Any]
"""The checkpoint's value of a field, and that of the run which goes on from it."""


def forbidden(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    """The differences that make the checkpoint one of another run, by field."""
    return {name: pair for name, pair in _differences(checkpoint, run).items() if not _may_change(name, run)}


def allowed(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    """All differences that are not forbidden, by field."""
    return {name: pair for name, pair in _differences(checkpoint, run).items() if _may_change(name, run)}


def _differences(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    # Values that [outer] leaves out, and `auto`, are replaced by what they stand for, because earlier releases wrote
    # the actual values.
    whole = (
        dataclasses.replace(each, outer=each.outer_step, optimizer=each.gradient_step) for each in (checkpoint, run)
    )
    differing = configs.differences(*whole)
    return {name: pair for name, pair in differing.items() if _rule(name, run) is not None}


def _may_change(name: str, run: RunConfig) -> bool:
    rule = _rule(name, run)
    return rule is not None and rule(run)


def _rule(name: str, run: RunConfig) -> Callable[[RunConfig], bool] | None:
    """When a field may change, by the mark at it or its section (config/checks). None: another value is no change."""
    marks: dict[str, Any] = {"may_change": lambda run: False}
    part: Any = run
    for step in name.split("."):
        marks |= next(each.metadata for each in dataclasses.fields(part) if each.name == step)
        part = getattr(part, step)
    rule: Callable[[RunConfig], bool] | None = marks["may_change"]
    return rule
