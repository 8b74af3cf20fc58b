"""Reports figures to a service in a thread, so that the service can neither stall nor end the training.

Used by MetricsLog. A subclass sends the figures, in a thread of its own behind a bounded queue. Its first error is
logged and ends the reporting.
"""

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

_QUEUE_LENGTH = 1000
Figures = tuple[int, dict[str, Any]]
"""A step, and the figures that are known of it."""


class Reporter(ABC):
    """Hands each step's figures to one service."""

    def __init__(self, name: str) -> None:
        """Start the thread and return at once."""
        self._name = name
        self._queue: queue.Queue[Figures | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _send(self, steps: Iterator[Figures]) -> None:
        """Import the service's library, report all steps, and close. Called once, in the thread; may raise anything."""

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Queue the known figures of a step. They are dropped if the service is far behind, or has failed."""
        known = {name: value for name, value in values.items() if value is not None}
        try:
            self._queue.put_nowait((step, known))
        except queue.Full:
            logger.debug("%s is behind: step %d is not reported", self._name, step)

    def close(self, timeout_seconds: float) -> bool:
        """Send what is left and close. Returns whether that was done in time."""
        try:
            self._queue.put(None, timeout=timeout_seconds)
        except queue.Full:
            return False
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "%s did not finish within %.0f s: its last figures may be missing", self._name, timeout_seconds
            )
            return False
        return True

    def _run(self) -> None:
        try:
            self._send(iter(self._queue.get, None))
        except BaseException as error:  # noqa: BLE001 - such libraries raise all kinds, SystemExit among them
            logger.warning(
                "no more reports to %s, the training goes on: %s: %s", self._name, type(error).__name__, error
            )
            while self._queue.get() is not None:
                pass
