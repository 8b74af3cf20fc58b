"""The closing bench: both members of a case commit, and its default options make a stage of 100 million parameters."""

import pytest

from scripts.benches.closing import Options, run_case, run_config


@pytest.mark.e2e
@pytest.mark.parametrize("setting", ["diloco", pytest.param("synchronous", marks=pytest.mark.slow)])
def test_a_case_runs(setting: str) -> None:
    members = run_case(run_config(setting, Options(d_model=128, layers=1, rounds=2)), 2)
    assert len(members[0]["digests"]) == 2
    assert members[0]["digests"] == members[1]["digests"]
    for member in members:
        assert 0.0 < member["commit_beyond_step_cpu_seconds"] < member["commit_cpu_seconds"]
