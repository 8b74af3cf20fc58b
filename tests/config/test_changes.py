"""Which fields of the configuration may change when a run is resumed."""

import dataclasses
from typing import Any

import pytest

from swarm.config import OuterConfig, RoundsConfig, RunConfig, allowed_changes, forbidden_changes

SYNCHRONOUS = RunConfig(rounds=RoundsConfig(setting="synchronous"))
DILOCO = RunConfig()


def _set(run: RunConfig, name: str, value: Any) -> RunConfig:
    section, _, field = name.rpartition(".")
    if not section:
        return dataclasses.replace(run, **{field: value})
    return dataclasses.replace(run, **{section: dataclasses.replace(getattr(run, section), **{field: value})})


@pytest.mark.parametrize("run", [SYNCHRONOUS, DILOCO], ids=["synchronous", "diloco"])
@pytest.mark.parametrize(
    ("name", "value", "may_change"),
    [
        ("run", "other", False),
        ("owner", "ab" * 32, True),
        ("model.d_model", 128, False),
        ("model.dropout", 0.1, True),
        ("model.autocast", "bf16", True),
        ("stages.num_stages", 2, True),
        ("data.seed", 1, False),
        ("data.microbatch_size", 4, False),
        ("data.digest", "ab" * 32, False),
        ("rounds.round_samples", 512, None),
        ("optimizer.learning_rate", 3e-3, True),
        ("averaging.codec", "int8", True),
    ],
)
def test_what_may_change(run: RunConfig, name: str, value: Any, may_change: bool | None) -> None:
    """`None` stands for a change that only DiLoCo allows."""
    before = _set(run, name, value)
    found, other = (allowed_changes, forbidden_changes)
    if may_change is False or (may_change is None and run.rounds.synchronous):
        found, other = other, found
    ((section, _, field),) = [name.rpartition(".")]
    meant = dataclasses.replace(run, outer=run.outer_step, optimizer=run.gradient_step)
    now = getattr(getattr(meant, section) if section else meant, field)
    assert found(before, run) == {name: (value, now)}
    assert other(before, run) == {}


def test_stages_may_not_change_where_shards_meet_at_their_ends() -> None:
    cut = {"stages.num_stages": (2, 3)}
    for kind, found in (("spd", allowed_changes), ("parallel", forbidden_changes)):
        run = _set(DILOCO, "model", dataclasses.replace(DILOCO.model, block_types=kind, num_shards=2))
        assert found(_set(run, "stages.num_stages", 2), run) == cut


def test_the_setting_may_change_to_diloco_alone() -> None:
    assert forbidden_changes(DILOCO, SYNCHRONOUS) == {"rounds.setting": ("diloco", "synchronous")}
    assert forbidden_changes(SYNCHRONOUS, DILOCO) == {}
    assert allowed_changes(SYNCHRONOUS, DILOCO)["rounds.setting"] == ("synchronous", "diloco")
    longer = _set(DILOCO, "rounds.round_samples", 512)
    assert forbidden_changes(SYNCHRONOUS, longer) == {}


def test_an_outer_step_that_is_left_out_is_what_it_means() -> None:
    """Earlier releases wrote 0.7 and 0.9 where nothing was configured."""
    earlier = _set(DILOCO, "outer", OuterConfig(learning_rate=0.7, momentum=0.9))
    assert allowed_changes(earlier, DILOCO) == {"outer.momentum": (0.9, DILOCO.outer_step.momentum)}
    same = _set(DILOCO, "outer", DILOCO.outer_step)
    assert allowed_changes(same, DILOCO) == allowed_changes(DILOCO, same) == {}
