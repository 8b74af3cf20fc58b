"""The bench of thin lines: how many numbers fit, and what its figures mean."""

from typing import Any

import pytest

from scripts.benches.thin_lines import Options, compared, configs
from swarm.stage.boundary import boundary_of


@pytest.mark.parametrize(("wire", "numbers"), [("fp32", 8), ("fp16", 15), ("int8", 31)])
def test_as_many_numbers_cross_a_bottleneck_as_fit_into_a_64th_of_the_bytes(wire: Any, numbers: int) -> None:
    found = dict(configs(Options(wire=wire, compressions=(64, 16))))
    kinds = ("fixed", "learned", "anchored")
    assert list(found) == ["none", "int8", *(f"{kind}_{times}" for times in (64, 16) for kind in kinds)]
    sizes = {name: boundary_of(config).spec(1, 256).num_bytes for name, config in found.items()}
    assert found["learned_64"].model.hidden_width == found["fixed_64"].model.hidden_width == numbers
    assert sizes["learned_64"] == sizes["fixed_64"] <= sizes["none"] / 64
    assert found["int8"].model.hidden_width == 512


def test_what_does_not_fit_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="not even one number"):
        dict(configs(Options(compressions=(4096,))))


def test_seconds_to_the_worst_arms_loss_are_compared() -> None:
    arms: dict[str, dict[str, Any]] = {
        "none": {"bytes_a_token": 128.0, "tokens_per_second": 10.0, "curve": [(100, 10.0, 3.0), (200, 20.0, 2.0)]},
        "learned_64": {"bytes_a_token": 2.0, "tokens_per_second": 40.0, "curve": [(100, 2.5, 3.5), (200, 5.0, 2.5)]},
    }
    found = compared({name: {**arm, "held_out_loss": arm["curve"][-1][2]} for name, arm in arms.items()})
    assert found["common_loss"] == 2.5
    assert found["arms"]["none"]["seconds_to_common_loss"] == pytest.approx(15.0)
    assert found["arms"]["learned_64"]["times_as_fast_to_common_loss"] == pytest.approx(3.0)
    assert found["arms"]["learned_64"]["loss_over_none"] == pytest.approx(0.25)
    assert found["passed"] is False
