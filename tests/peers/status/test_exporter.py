"""Figures for Prometheus: its own parser reads the same values that swarm-status has."""

import asyncio
import json
import re
import socket
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peers.stage_peer import program as stage_peer
from peers.status.exporter import OwnFigures, exporting
from peers.status.figure import figures
from peers.status.peer_row import PeerRow
from peers.status.view import TrainerRow
from scripts.benches.shared.ports import free_ports

PEER = PeerRow(
    name='a "name"\\', peer_id="ab" * 20, state="serving", device="cpu", samples_per_second=12.5, queue_length=2,
    round=7, samples=3, forwards=71, backwards=70, committed=69, exchanged_bytes=123, aborted={"silent": 2, "left": 1},
    loop_lag_seconds=0.25, started_at=1.5e9, refusals=("a line",), recent_rounds=(5, 6),
)  # fmt: skip
GRAFANA = Path(__file__).parents[3] / "docs" / "grafana.json"


def _read(url: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """All samples by name and labels, as Prometheus' own parser understands them."""
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in samples.setdefault(sample.name, {})
            samples[sample.name][labels] = sample.value
    return samples


async def _scrape(record: Any, prefix: str = "swarm_peer", **labels: str) -> Any:
    """Export these figures, and return what Prometheus reads."""
    own = OwnFigures()
    own.follow((lambda: record, labels))
    (port,) = free_ports(1)
    async with exporting(own, prefix, host="127.0.0.1", port=port):
        return await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/metrics")


async def test_every_number_of_status_is_a_metric_of_the_same_name() -> None:
    samples = await _scrape(PEER, run="run", stage="1")
    told = json.loads(json.dumps({name: getattr(PEER, name) for name in figures(PeerRow)}))
    for name, each in figures(PeerRow).items():
        metric, value = f"swarm_peer_{name}{'_total' if each.only_grows else ''}", told[name]
        if isinstance(value, Mapping):
            assert samples[metric] == {(("kind", kind),): number for kind, number in value.items()}
        elif isinstance(value, int | float):
            assert samples[metric] == {(): value}, name
        elif isinstance(value, list):
            assert samples[f"swarm_peer_num_{name}"] == {(): len(value)}
    ((words, one),) = samples["swarm_peer_info"].items()
    expected = {"run": "run", "stage": "1"} | {name: told[name] for name in ("name", "peer_id", "device")}
    assert (dict(words), one) == (expected, 1.0)
    assert samples["process_cpu_seconds_total"][()] > 0.0


async def test_the_figures_are_those_of_the_moment_and_none_once_there_are_none() -> None:
    own, (port,) = OwnFigures(), free_ports(1)
    row = PEER
    async with exporting(own, "swarm_peer", host="127.0.0.1", port=port):
        url = f"http://127.0.0.1:{port}/metrics"
        assert "swarm_peer_round" not in await asyncio.to_thread(_read, url)
        own.follow((lambda: row, {}))
        assert (await asyncio.to_thread(_read, url))["swarm_peer_round"] == {(): 7.0}
        row = replace(PEER, round=8)
        assert (await asyncio.to_thread(_read, url))["swarm_peer_round"] == {(): 8.0}
        own.follow()
        assert "swarm_peer_info" not in await asyncio.to_thread(_read, url)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(_read, url)


@pytest.mark.parametrize(("program", "run"), [(stage_peer, "--preset tiny")])
def test_what_cannot_be_served_is_told_before_the_run_is_looked_up(
    program: ModuleType, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "find_entrance", lambda *arguments, **options: pytest.fail("it went on"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^--metrics-port {port}: Address already in use; choose another port$"):
            program.main([*run.split(), "--metrics-port", str(port)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--metrics-port needs prometheus-client; .*'\.\[metrics\]'$"):
        program.main([*run.split(), "--metrics-port", "0"])


async def test_the_grafana_dashboard_asks_for_metrics_that_are_there() -> None:
    exported = {*await _scrape(PEER), *await _scrape(TrainerRow(name="t", step=5, loss=2.5), "swarm_trainer")}
    dashboard = json.loads(GRAFANA.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\b(?:swarm|process)_\w+", query)}
    assert len(asked) > 12
    assert asked <= exported
    # Panels show how fast a counter grows, not its value.
    assert all(re.search(rf"(rate|increase)\({name}\[", "".join(queries)) for name in asked if name.endswith("_total"))
