"""Gives the dashboard's state and its changes to all viewers. Each message is made once for all of them.

program.py publishes the state, and app.py follows it. A slow viewer holds up no other one: it misses changes, and
gets the whole state instead.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

State = Mapping[str, Any]


class Hub:
    """The state of a dashboard."""

    def __init__(self, history: Callable[[], State]) -> None:
        """
        Args:
            history: gives the figures over time. Viewers get them only with the whole state: they add later figures
                themselves.
        """
        self._history = history
        self._state: State = {}
        self._number = 0
        self._patch = ""
        self._whole = ""
        self._news = asyncio.Event()

    def publish(self, state: State) -> None:
        """Replace the state. The caller must not change the object afterwards."""
        self._number += 1
        self._patch = _text({"number": self._number, "patch": merge_patch(self._state, state)})
        self._whole = ""
        self._state = state
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self) -> AsyncIterator[str]:
        """Messages for one viewer: the whole state as soon as there is one, and then its changes."""
        seen = -1
        while True:
            news = self._news
            if self._number in (0, seen):
                await news.wait()
                continue
            if seen == self._number - 1:
                text = self._patch
            else:
                # This text serves all viewers that come before the next publish.
                self._whole = self._whole or _text(
                    {"number": self._number, "whole": self._state, "history": self._history()}
                )
                text = self._whole
            seen = self._number
            yield text


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Merge Patch (RFC 7386) that turns `before` into `after`; the page applies it.

    Objects are compared field by field, and lists are replaced. A field that is null counts as missing.
    """
    patch: dict[str, Any] = {name: None for name in before if after.get(name) is None and before[name] is not None}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif value is not None and value != old:
            patch[name] = value
    return patch


def _text(message: State) -> str:
    return json.dumps(message, allow_nan=False, separators=(",", ":"))
