"""The routing bench: what its figures of the DHT mean, and that real nodes are counted and gone afterwards."""

import os
from collections.abc import Iterator

import pytest

from scripts.benches.shared import proc
from scripts.benches.sides import routing_dht
from scripts.benches.sides.routing_dht import measure, records_per_second

RECORD_BYTES = 1000


@pytest.fixture(autouse=True)
def _few_members_are_counted_for_a_while(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(routing_dht, "NUM_COUNTED", 4)
    monkeypatch.setattr(routing_dht, "COUNTED_SECONDS", 120)
    records_per_second.cache_clear()
    yield
    records_per_second.cache_clear()


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
