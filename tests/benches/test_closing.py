"""The closing bench: both members of a case commit, and its default options make a stage of 100 million parameters."""

import pytest

from scripts.benches.closing import SETTINGS, Options, run_case, run_config
from swarm.model.stages import build_stage


@pytest.mark.e2e
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_case_runs(setting: str) -> None:
    members = run_case(run_config(setting, Options(d_model=128, layers=1, rounds=2)), 2)
    assert len(members[0]["digests"]) == 2
    assert members[0]["digests"] == members[1]["digests"]
    for member in members:
        assert 0.0 < member["commit_beyond_step_cpu_seconds"] < member["commit_cpu_seconds"]


def test_the_usual_stage_has_a_hundred_million_parameters() -> None:
    module = build_stage(run_config("diloco", Options()), 0, device="meta")
    assert 100e6 <= sum(parameter.numel() for parameter in module.parameters()) < 110e6
