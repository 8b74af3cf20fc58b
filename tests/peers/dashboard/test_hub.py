"""Viewers get the whole state once, and then changes. Each message is made once for all viewers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.dashboard.hub import Hub, merge_patch

_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
_OBJECTS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), _LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), _LEAVES | inner, max_size=3),
    max_leaves=12,
)


def apply(target: Any, patch: Any) -> Any:
    """Apply a merge patch: RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply(merged.get(name), value)
    return merged


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return value


@settings(max_examples=50)
@given(_OBJECTS, _OBJECTS)
def test_a_patch_leads_from_one_state_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = merge_patch(before, after)
    assert _without_nulls(apply(before, patch)) == _without_nulls(after)
    assert merge_patch(after, after) == {}


async def _next(viewer: AsyncIterator[str]) -> Any:
    return json.loads(await asyncio.wait_for(anext(viewer), 5.0))


async def test_a_viewer_gets_everything_and_then_what_changes() -> None:
    hub = Hub(lambda: {"hour": [1, 2]})
    viewer = hub.follow()
    first = asyncio.create_task(_next(viewer))
    await asyncio.sleep(0)
    assert not first.done()
    hub.publish({"a": 1, "b": {"c": 2, "d": 3}})
    assert await first == {"number": 1, "whole": {"a": 1, "b": {"c": 2, "d": 3}}, "history": {"hour": [1, 2]}}
    following = asyncio.create_task(_next(viewer))
    await asyncio.sleep(0)
    hub.publish({"a": 1, "b": {"c": 4}})
    assert await following == {"number": 2, "patch": {"b": {"c": 4, "d": None}}}


async def test_a_viewer_that_is_slow_gets_everything_again() -> None:
    hub = Hub(dict)
    viewer = hub.follow()
    for number in range(4):
        hub.publish({"a": number})
    assert (await _next(viewer))["whole"] == {"a": 3}
    hub.publish({"a": 4})
    hub.publish({"a": 5})
    assert (await _next(viewer))["whole"] == {"a": 5}


async def test_fifty_viewers_share_one_text() -> None:
    asked = 0

    def history() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {}

    hub = Hub(history)
    hub.publish({"a": 1})
    viewers = [hub.follow() for _ in range(50)]
    wholes = [await anext(viewer) for viewer in viewers]
    assert asked == 1
    assert all(text is wholes[0] for text in wholes)
    hub.publish({"a": 2})
    changes = [await anext(viewer) for viewer in viewers]
    assert all(text is changes[0] for text in changes)


def test_what_json_does_not_know_is_a_bug() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Hub(dict).publish({"a": float("nan")})
