"""Compares two JSON objects, and gives the change as a JSON Merge Patch (RFC 7386), which the page applies.

Used by hub.py. A field that is null counts as missing.
"""

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The patch that turns `before` into `after`. Objects are compared field by field; lists are replaced."""
    patch: dict[str, Any] = {name: None for name in before if after.get(name) is None and before[name] is not None}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif value is not None and value != old:
            patch[name] = value
    return patch
