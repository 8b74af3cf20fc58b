"""How many records, and bytes, are kept under one key."""

import pytest

from swarm.dht import known_records
from swarm.dht.known_records import KeyQuota


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in {
        "MAX_KEY_RECORDS": 4,
        "MAX_KEY_BYTES": 100,
        "MAX_OWNER_RECORDS": 2,
        "MAX_OWNER_BYTES": 50,
    }.items():
        monkeypatch.setattr(known_records, name, limit)


def test_an_owner_has_so_many_records_and_others_have_theirs() -> None:
    kept = KeyQuota()
    assert [kept.take(f"a{number}", "a", 10, 5.0, 0.0) for number in range(4)] == [True, True, False, False]
    assert [kept.take(f"b{number}", "b", 10, 5.0, 0.0) for number in range(3)] == [True, True, False]
    assert not kept.take("c", "c", 10, 5.0, 0.0), "the key is full"
    assert kept.num_bytes == 40


def test_a_record_is_counted_in_the_place_of_the_one_before() -> None:
    kept = KeyQuota()
    for number in range(10):
        assert kept.take("a1", "a", 40 + number, 5.0, 0.0)
    assert not kept.take("a1", "a", 101, 5.0, 0.0)
    assert kept.num_bytes == 49


def test_what_has_expired_makes_room_and_what_has_not_stays() -> None:
    kept = KeyQuota()
    assert kept.take("a1", "a", 10, 5.0, 0.0)
    assert kept.take("a2", "a", 10, 9.0, 0.0)
    assert not kept.take("a3", "a", 10, 9.0, 4.9)
    assert kept.take("a3", "a", 10, 9.0, 5.0)
    assert not kept.take("a1", "a", 10, 9.0, 5.0)
