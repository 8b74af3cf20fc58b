"""The study `rebalancing`, on a small swarm for a few hours."""

import pytest

import scripts.benches.simulate.studies.rebalancing as study
from scripts.benches.simulate.fluid.own_rule import NoRule
from scripts.benches.simulate.studies.rebalancing import PAPER, Options, run


def test_a_small_run_gives_every_figure_of_every_rule() -> None:
    options = Options(num_traces=2, hours=3.0, num_peers=12, num_stages=2)
    figures = run(options)
    rules = {*PAPER, "ours"}
    for name in ("percent_of_optimal", "percent_of_present", "lowest_trace", "last_hour"):
        assert figures[name].keys() == rules
        assert all(0.0 < percent <= 100.0 for percent in figures[name].values()), name
    assert all(figures["lowest_trace"][rule] <= figures["percent_of_optimal"][rule] for rule in rules)
    assert all(figures["percent_of_present"][rule] <= figures["percent_of_optimal"][rule] for rule in rules)
    assert figures["num_moves"]["none"] == 0
    assert figures["num_moves"]["ours"] > 0
    assert figures["percent_of_optimal"]["ours"] > figures["percent_of_optimal"]["none"]
    assert run(options) == figures, "the same options give the same figures"


def test_the_traces_are_fit_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a rule, and with the paper's rule every 300 seconds, results are near the paper's own."""
    rules = ("none", "swarm_300")
    monkeypatch.setattr(study, "RULES", study.RULES | {"swarm_60": NoRule, "ours": NoRule})
    percent = run(Options(num_traces=4))["percent_of_optimal"]
    for rule in rules:
        assert percent[rule] == pytest.approx(PAPER[rule], abs=1.5)
