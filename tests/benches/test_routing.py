"""The routing bench: what its figures of the DHT mean, and that real nodes are counted and gone afterwards."""

import os

import pytest

from scripts.benches.shared import proc
from scripts.benches.sides import routing_dht
from scripts.benches.sides.routing_dht import Counters, measure, traffic

RECORD_BYTES = 1000


def _used(size: int, sent: float, busiest: float) -> Counters:
    """The counters of ten seconds. Each peer receives `sent` bytes/s, and sends as much on average; the busiest one
    sends `busiest`."""
    others = (size * sent - busiest) / (size - 1)
    passed = [10 * (sent + others)] * (size - 1) + [10 * (sent + busiest)]
    return Counters(
        seconds=10.0,
        process_cpu_seconds=0.2 * size,
        p2pd_cpu_seconds=0.1 * size,
        passed_bytes=tuple(map(round, passed)),
    )


def test_a_line_through_the_sizes_that_have_all_copies_is_extrapolated() -> None:
    figures = traffic({2: _used(2, 100.0, 100.0), 8: _used(8, 2900.0, 5000.0), 16: _used(16, 4900.0, 9400.0)})
    assert figures["dht_bytes_per_second"] == {"2": 100.0, "8": 2900.0, "16": 4900.0}
    # 900 bytes/s and 250 for each peer. So many peers read a third as often.
    assert figures["dht_extrapolated_bytes_per_second"] == pytest.approx(
        {"100": 900.0 + 25_000.0 / 3, "1000": 900.0 + 250_000.0 / 3, "10000": 900.0 + 2_500_000.0 / 3}
    )


def test_the_busiest_peer_sends_more_with_the_square() -> None:
    figures = traffic({8: _used(8, 2900.0, 5000.0), 10: _used(10, 4500.0, 9000.0)})
    assert figures["dht_busiest_bytes_per_second"] == pytest.approx({"8": 5000.0, "10": 9000.0})
    extrapolated = figures["dht_extrapolated_busiest_bytes_per_second"]
    assert extrapolated == pytest.approx({"100": 3e5, "1000": 3e7, "10000": 3e9})


@pytest.mark.slow
def test_real_nodes_are_counted_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RENEW_SECONDS", 0.5), ("REFRESH_SECONDS", 0.2), ("SETTLE_SECONDS", 3.0)):
        monkeypatch.setattr(routing_dht, name, seconds)
    monkeypatch.setattr(routing_dht, "REPLICAS", 0)
    before = proc.children(os.getpid())
    figures = measure((1, 2), seconds=1.0, seed=0)
    assert proc.children(os.getpid()) == before
    assert figures["dht_bytes_per_second"]["2"] > RECORD_BYTES
    assert figures["dht_busiest_bytes_per_second"]["2"] > RECORD_BYTES
    assert figures["dht_p2pd_bytes"]["2"] > 1 << 20
