"""The study `averaging`, on a stage that is small."""

import pytest

from swarm.simulation.stage_rounds import RoundEnd
from swarm.simulation.studies.averaging import Options, figures, run


def test_a_small_stage_without_failures_ends_every_round_at_once() -> None:
    options = Options(num_members=(3,), failure_percent=(0.0,), num_contributions=12)
    (setting,) = run(options)["settings"]
    for quorum in ("available", "majority"):
        assert setting[quorum]["num_rounds"] == 4
        assert setting[quorum]["first_attempt_share"] == setting[quorum]["took_part_share"] == 1.0
        assert 1.0 < setting[quorum]["p50_seconds"] < 20.0, "about as long as lines of 100 Mbit/s take for 64 MB"
    assert run(options)["settings"] == [setting], "the same options give the same figures"


def test_a_round_that_does_not_end_counts_once_it_is_beyond_the_bound() -> None:
    ends = [
        RoundEnd(num_attempts=1, seconds=10.0, took_part=1.0),
        RoundEnd(num_attempts=3, seconds=70.0, took_part=0.5),
    ]
    early, late = (figures(ends, pending_seconds=seconds, bound_seconds=60.0) for seconds in (59.0, 61.0))
    assert (early["num_rounds"], early["rounds_committed_share"], early["first_attempt_share"]) == (2, 0.5, 0.5)
    assert late["num_rounds"] == 3
    assert late["rounds_committed_share"] == pytest.approx(1 / 3)
    assert (early["attempts_per_round"], early["took_part_share"], early["p50_seconds"]) == (2.0, 0.75, 40.0)
    assert figures([], pending_seconds=61.0, bound_seconds=60.0)["p90_seconds"] is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_members", ()),
        ("num_members", (0,)),
        ("failure_percent", (101.0,)),
        ("failure_percent", (float("nan"),)),
        ("lifetime_hours", (0.0,)),
        ("payload_megabytes", 0.0),
        ("megabits_per_second", 7.0),
    ],
)
def test_bad_options_are_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match="--" + option.replace("_", "-")):
        Options(**{option: value})  # type: ignore[arg-type]


def test_mean_lifetimes_take_the_place_of_rates() -> None:
    assert Options().lifetimes == {"0.2 %": 30000.0, "0.4 %": 15000.0, "1 %": 6000.0}
    assert Options(lifetime_hours=(2.0,)).lifetimes == {"2 h": 7200.0}
