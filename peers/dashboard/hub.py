"""Gives the dashboard's state and its changes to all viewers. Each message is made once for all of them.

program.py publishes the state, and app.py follows it. A slow viewer holds up no other one: it misses changes, and
gets the whole state instead.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from peers.dashboard.merge import merge_patch

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


def _text(message: State) -> str:
    return json.dumps(message, allow_nan=False, separators=(",", ":"))
