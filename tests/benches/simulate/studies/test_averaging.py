"""The study of how a stage's rounds end, at its smallest."""

import random

from scripts.benches.simulate.studies.averaging import Options, run


def test_of_a_thousand_members_one_group_loses_rounds_and_groups_commit_them() -> None:
    (setting,) = run(Options(num_members=(1000,), failure_percent=(1.0,), num_rounds=200))["settings"]
    assert setting["one_group"]["committed_percent"] < 70.0
    assert min(setting[way]["committed_percent"] for way in ("groups", "mended", "moshpit")) >= 97.0


def test_the_same_seed_gives_the_same_figures_and_replicas_of_groups_differ() -> None:
    options = Options(num_members=(100,), failure_percent=(1.0,), num_rounds=5, seed=random.Random(0).randrange(99))
    figures = run(options)
    assert figures == run(options)
    assert 0.05 < figures["moshpit_replicas_differ"]["100"] < 0.3
