"""The bench of thin lines: how many numbers fit, and what its figures mean."""

from typing import Any

import pytest

from scripts.benches.thin_lines import Options, configs
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
