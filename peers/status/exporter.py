"""--metrics-port: exports the figures of a process in Prometheus' text format.

Every figure that peers/status defines for such a process becomes a metric of the same name. Needs the extra metrics.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from peers.shared import option_types
from peers.status.figure import Figure, figures
from swarm.machine import extras
from swarm.rpc.endpoint import endpoint_of

if TYPE_CHECKING:
    # prometheus_client is an extra: it is imported where it is used.
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""How long the event loop may take to give the figures."""
Source = Callable[[], Any]
"""Gives a record of figures (peers/status); called in the event loop."""


class OwnFigures:
    def __init__(self) -> None:
        self._sources: Sequence[tuple[Source, Mapping[str, str]]] = ()

    def follow(self, *sources: tuple[Source, Mapping[str, str]]) -> None:
        """From now on take the figures from these sources. Each has further labels: the run, and the stage where there
        is one. Several differ in the stage."""
        self._sources = sources

    def now(self) -> list[tuple[Any, Mapping[str, str]]]:
        """The figures now, with those labels; empty while there are none."""
        return [(source(), labels) for source, labels in self._sources]


def require_exporter(host: str, port: int | None) -> None:
    """Raise ValueError if --metrics-port cannot be served. Without this check, the error would come only after the
    process has joined. `port` is None if nothing is to be exported."""
    if port is None:
        return
    extras.require("--metrics-port", "prometheus-client", "metrics", modules=["prometheus_client"])
    option_types.require_free_port("--metrics-port", host, port)


@asynccontextmanager
async def exporting(own: OwnFigures, prefix: str, *, host: str, port: int | None) -> AsyncIterator[None]:
    """Answer Prometheus' requests inside the block, in other threads, if there is a port for that. `prefix` is what the
    names of all metrics begin with, such as swarm_peer. Raises ValueError if the port cannot be had."""
    if port is None:
        yield
        return
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    registry.register(_Collector(own, prefix))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(f"--metrics-port {port}: {error.strerror or error}; choose another port") from None
    logger.info("figures for Prometheus at http://%s/metrics", endpoint_of(host, server.server_port))
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


class _Collector:
    def __init__(self, own: OwnFigures, prefix: str) -> None:
        self._own = own
        self._prefix = prefix
        self._loop = asyncio.get_running_loop()

    def describe(self) -> "Iterable[Metric]":
        """Return nothing. Without this method the registry would collect all metrics at registration."""
        return ()

    def collect(self) -> "Iterable[Metric]":
        """The metrics now; none while the event loop is stuck. Called by a thread of the server."""
        asked = asyncio.run_coroutine_threadsafe(self._now(), self._loop)
        try:
            rows = asked.result(ANSWER_SECONDS)
        except TimeoutError:
            asked.cancel()
            logger.warning("Prometheus is told nothing: the event loop has been stuck for %.0f s", ANSWER_SECONDS)
            return ()
        return _together([(labels, list(metrics(self._prefix, record, labels))) for record, labels in rows])

    async def _now(self) -> list[tuple[Any, Mapping[str, str]]]:
        return self._own.now()


def _together(rows: "Sequence[tuple[Mapping[str, str], list[Metric]]]") -> "Iterable[Metric]":
    """The metrics of all rows. Where there are several, each sample has its row's stage as a label."""
    families: dict[str, Metric] = {}
    for labels, row in rows:
        for metric in row:
            if len(rows) > 1:
                stage = {"stage": labels["stage"]}
                metric.samples = [sample._replace(labels={**sample.labels, **stage}) for sample in metric.samples]
            if (known := families.setdefault(metric.name, metric)) is not metric:
                known.samples += metric.samples
    return families.values()


def metrics(prefix: str, record: Any, labels: Mapping[str, str]) -> "Iterable[Metric]":
    """The metrics of a record's figures. A number is exported under its name, and so is a mapping of numbers, with the
    label `kind`. For a tuple the length is exported; for a tuple of records also each number in a record, labelled with
    the texts in that record. The texts that tell this process from others are the labels of PREFIX_info."""
    from prometheus_client.core import InfoMetricFamily

    words = dict(labels)
    for name, each in figures(type(record)).items():
        value, metric = getattr(record, name), f"{prefix}_{name}"
        if each.is_label:
            words[name] = value
        elif isinstance(value, int | float):
            yield _family(metric, each, {(): value}, ())
        elif isinstance(value, Mapping):
            yield _family(metric, each, {(kind,): number for kind, number in value.items()}, ("kind",))
        elif isinstance(value, tuple):
            counted = dataclasses.replace(each, only_grows=False)
            yield _family(f"{prefix}_num_{name}", counted, {(): len(value)}, ())
            yield from _of_records(metric, each, [item for item in value if isinstance(item, Mapping)])
    yield InfoMetricFamily(prefix, "What this process is.", value=words)


def _of_records(metric: str, figure: Figure, records: Sequence[Mapping[str, Any]]) -> "Iterable[Metric]":
    names = sorted({name for record in records for name, value in record.items() if isinstance(value, str)})
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for record in records:
        words = tuple(str(record.get(name, "")) for name in names)
        for name, value in record.items():
            if isinstance(value, int | float):
                samples.setdefault(name, {})[words] = value
    for name, values in samples.items():
        yield _family(f"{metric}_{name}", figure, values, names)


def _family(name: str, figure: Figure, samples: Mapping[tuple[str, ...], float], labels: Sequence[str]) -> "Metric":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if figure.only_grows else GaugeMetricFamily
    family = kind(name, figure.help, labels=list(labels))
    for words, value in samples.items():
        family.add_metric(words, float(value))
    return family
