"""How long peers stay."""

from swarm.rebalancing.judgement import PRIOR_SECONDS, Stays
from swarm.types import PeerId


def _peers(*numbers: int) -> frozenset[PeerId]:
    return frozenset(PeerId(str(number)) for number in numbers)


def test_departures_per_time_watched() -> None:
    stays = Stays()
    assert stays.mean_seconds == PRIOR_SECONDS
    now = 0.0
    for minute in range(1000):
        # One of ten peers is replaced each minute, so each stays for ten minutes.
        stays.look(_peers(*range(minute, minute + 10)), now)
        now += 60
    assert 590 < stays.mean_seconds < 610


def test_nobody_leaves() -> None:
    stays = Stays()
    for look in range(10):
        stays.look(_peers(1, 2), 3600.0 * look)
    assert stays.mean_seconds == 19 * 3600
