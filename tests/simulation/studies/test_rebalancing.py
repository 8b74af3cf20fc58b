"""The study `rebalancing`, on a small swarm for a few hours."""

import pytest

from swarm.simulation.studies.rebalancing import PAPER, Options, run


def test_a_small_run_gives_every_figure_of_every_rule() -> None:
    options = Options(num_traces=2, hours=3.0, num_peers=12, num_stages=2)
    figures = run(options)
    rules = {*PAPER, "petals", "ours"}
    for name in ("percent_of_optimal", "lowest_trace", "first_hour", "last_hour"):
        assert figures[name].keys() == rules
        assert all(0.0 < percent <= 100.0 for percent in figures[name].values()), name
    assert all(figures["lowest_trace"][rule] <= figures["percent_of_optimal"][rule] for rule in rules)
    assert figures["num_moves"]["none"] == 0
    assert figures["num_moves"]["ours"] > 0
    assert figures["percent_of_optimal"]["ours"] > figures["percent_of_optimal"]["none"]
    assert run(options) == figures, "the same options give the same figures"


@pytest.mark.parametrize("options", [{"num_stages": 1}, {"num_peers": 5}, {"num_traces": 0}, {"round_seconds": 0.0}])
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Options(**options)  # type: ignore[arg-type]
