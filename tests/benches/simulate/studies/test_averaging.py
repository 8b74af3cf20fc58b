"""The study of how a stage's rounds end, at its smallest."""

import math
import random

import pytest

from scripts.benches.simulate.studies.averaging import (
    CONTRIBUTION_BYTES,
    LINE_BYTES_PER_SECOND,
    NOTICE_SECONDS,
    WAYS,
    Member,
    Options,
    exchange_seconds,
    groups,
    mended,
    moshpit,
    one_group,
    run,
)


def _members(*deaths: float, size: int = 64) -> list[Member]:
    ends = [*deaths, *[math.inf] * (size - len(deaths))]
    return [Member(line=LINE_BYTES_PER_SECOND, dies_at=end) for end in ends]


def test_without_deaths_every_way_takes_about_one_exchange_and_groups_three() -> None:
    usual = exchange_seconds([LINE_BYTES_PER_SECOND] * 64, CONTRIBUTION_BYTES)
    assert usual == pytest.approx(2 * CONTRIBUTION_BYTES / LINE_BYTES_PER_SECOND, rel=0.1)
    for name, way in WAYS.items():
        ended = way(_members(), 8)
        assert sum(len(one.members) for one in ended) == 64
        expected = 3 * usual if name == "groups" else usual
        assert all(one.num_attempts == 1 and one.seconds == pytest.approx(expected, rel=0.2) for one in ended)


def test_a_death_voids_the_exchange_of_one_group_and_is_mended_otherwise() -> None:
    usual = exchange_seconds([LINE_BYTES_PER_SECOND] * 64, CONTRIBUTION_BYTES)
    death = 0.75 * usual
    (again,) = one_group(_members(death))
    assert (again.num_attempts, len(again.members)) == (2, 63)
    assert again.seconds > death + NOTICE_SECONDS + 0.9 * usual
    (ended,) = mended(_members(death))
    assert (ended.num_attempts, len(ended.members)) == (1, 63)
    assert ended.seconds < death + NOTICE_SECONDS + 1.0


def test_a_death_leaves_out_its_group_among_groups_and_voids_nothing_once_there_is_a_result() -> None:
    usual = exchange_seconds([LINE_BYTES_PER_SECOND] * 64, CONTRIBUTION_BYTES)
    (ended,) = groups(_members(0.5 * usual), 8)
    assert (ended.num_attempts, len(ended.members)) == (1, 64 - 8)
    (ended,) = groups(_members(1.5 * usual), 8)
    assert (ended.num_attempts, len(ended.members)) == (2, 63), "it was among groups"
    (ended,) = groups(_members(2.2 * usual), 8)
    assert (ended.num_attempts, len(ended.members)) == (1, 64)


def test_a_death_holds_up_its_own_group_alone() -> None:
    ended = moshpit(_members(1.0), 8)
    assert sorted(one.num_attempts for one in ended) == [1] * 7 + [2]
    assert min(one.seconds for one in ended) < 0.6 * max(one.seconds for one in ended)


def test_of_a_thousand_members_one_group_loses_rounds_and_groups_commit_them() -> None:
    (setting,) = run(Options(num_members=(1000,), failure_percent=(1.0,), num_rounds=200))["settings"]
    assert setting["one_group"]["committed_percent"] < 70.0
    assert min(setting[way]["committed_percent"] for way in ("groups", "mended", "moshpit")) >= 97.0


def test_the_same_seed_gives_the_same_figures_and_replicas_of_groups_differ() -> None:
    options = Options(num_members=(100,), failure_percent=(1.0,), num_rounds=5, seed=random.Random(0).randrange(99))
    figures = run(options)
    assert figures == run(options)
    assert 0.05 < figures["moshpit_replicas_differ"]["100"] < 0.3
