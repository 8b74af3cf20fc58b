"""Checks that several sections share, and the marks of fields: a new one is ADDED, and AMENDABLE if it may be amended
while the run trains; other marks say what may change when a run is resumed.

Each check raises ValueError with one line, which names the section and the field.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict

from swarm.types import LARGEST_COUNT

STRICT = ConfigDict(extra="forbid")
"""pydantic's setting for every section: unknown keys are refused."""


def may_change(when: Callable[[Any], bool]) -> Mapping[str, Any]:
    """Metadata of a field, or of a section for all its fields: it may change when a run goes on from a checkpoint,
    where `when` holds for the RunConfig that has the new value. A field without such a mark may not change.

    Marked are those that decide how the run goes on, and not what it is: its parameters, and what they learnt from.
    """
    return {"may_change": when}


MAY_CHANGE = may_change(lambda run: True)
NO_CHANGE = {"may_change": None}
"""Metadata of a field that only says where the text or the tokenizer is: `data.digest` covers the contents of both, so
another value is no change. Earlier releases did not write all such fields."""
ADDED = {"is_added": True}
"""Metadata of a field that the release before does not have. It is left out of the canonical JSON while it has its
default, so that a run which does not use it has the same configuration, and the same digest, for both releases."""
AMENDABLE = {"is_amendable": True}
"""Metadata of a field that can be amended (config/amendments): a peer or a trainer reads it anew in each round, and it
does not change what they hold."""


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_usable_numbers(section: str, values: Any) -> None:
    """Check that every number of a section is finite and at most LARGEST_COUNT, the largest in messages."""
    for name, value in vars(values).items():
        if isinstance(value, float):
            require(math.isfinite(value), f"{section}.{name} must be finite, not {value}")
        elif isinstance(value, int) and name != "seed":
            require(value <= LARGEST_COUNT, f"{section}.{name} must be at most {LARGEST_COUNT}, not {value}")


def require_at_least_one(section: str, values: Any, *names: str) -> None:
    for name in names:
        require(getattr(values, name) >= 1, f"{section}.{name} must be at least 1, not {getattr(values, name)}")


def require_positive(section: str, values: Any, *names: str) -> None:
    for name in names:
        require(getattr(values, name) > 0, f"{section}.{name} must be positive, not {getattr(values, name)}")


def require_not_negative(section: str, values: Any, *names: str) -> None:
    for name in names:
        require(getattr(values, name) >= 0, f"{section}.{name} must not be negative, not {getattr(values, name)}")


def is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
