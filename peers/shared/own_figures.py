"""The figures that a process exports about itself.

Made by swarm-peer and swarm-trainer at their start. The part that knows the figures calls `follow`, and --metrics-port
exports them (exporter.py). Without that option nothing asks for them.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from peers.shared import cli
from swarm.machine import extras

logger = logging.getLogger(__name__)

Source = Callable[[], Any]
"""Gives a record of figures (peers/status); called in the event loop."""


class OwnFigures:
    """The figures of one process."""

    def __init__(self) -> None:
        self._source: Source = lambda: None
        self.labels: Mapping[str, str] = {}
        """Further labels of the process: its run, its stage."""

    def follow(self, source: Source, **labels: str) -> None:
        """From now on take the figures from this source. It returns None once it has no figures any more."""
        self._source, self.labels = source, labels

    def now(self) -> Any:
        """The figures now; None while there are none."""
        return self._source()


def require_exporter(host: str, port: int | None) -> None:
    """Raise ValueError if --metrics-port cannot be served. Without this check, the error would come only after the
    process has joined.

    Args:
        port: None if nothing is to be exported.
    """
    if port is None:
        return
    extras.require("--metrics-port", "prometheus-client", "metrics", modules=["prometheus_client"])
    cli.require_free_port("--metrics-port", host, port)


@asynccontextmanager
async def exporting(own: OwnFigures, prefix: str, *, host: str, port: int | None) -> AsyncIterator[None]:
    """Answer Prometheus' requests inside the block, if there is a port for that.

    Args:
        prefix: what the names of all metrics begin with.

    Raises:
        ValueError: the port cannot be had.
    """
    if port is None:
        yield
        return
    from peers.shared.exporter import Exporter  # The library that it imports is an extra.

    async with Exporter(own, prefix).serving(host, port) as url:
        logger.info("figures for Prometheus at %s", url)
        yield
