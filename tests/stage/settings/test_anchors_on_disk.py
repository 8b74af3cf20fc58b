"""Anchors and outer momentum in mapped files are the same numbers, and in no other memory."""

from pathlib import Path

import pytest
import torch

from swarm.stage.settings.diloco_weights import DilocoWeights
from swarm.stage.stage import weights_of
from swarm.stage.state import digest_of
from swarm.stage.weights import Round, StageWeights
from tests.stage.linear import accumulate, config_of, gradients, linear
from tests.support.commits import end_round, state_tensors


def _mapped_ranges() -> list[range]:
    """The addresses of this process's deleted files."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("(deleted)")]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]


def _are_on_disk(tensors: dict[str, torch.Tensor]) -> bool:
    ranges = _mapped_ranges()
    return all(any(tensor.data_ptr() in each for each in ranges) for tensor in tensors.values())


def _outer(weights: StageWeights) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.state().items() if name.startswith("outer/")}


@pytest.mark.parametrize("keeps_freed", [True, False])
def test_rounds_have_the_same_bits(keeps_freed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not keeps_freed:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    config = config_of("diloco")
    there = weights_of(config, linear(), lineage="", anchors=tmp_path)
    here = weights_of(config, linear(), lineage="")
    assert isinstance(there, DilocoWeights)
    for number in range(3):
        for weights in (there, here):
            accumulate(weights, 2 * number, 2 * number + 1)
            end_round(weights, weights.contribute().tensors, num_samples=4)
        anchor = there.anchor(number + 1)
        assert anchor is not None
        assert _are_on_disk(anchor)
        assert _are_on_disk(_outer(there))
        assert not _are_on_disk(there.version.parameters)
        assert digest_of(there.state()) == digest_of(here.state())
    assert not list(tmp_path.iterdir())
    newcomer = weights_of(config, linear(7), lineage="", anchors=tmp_path)
    newcomer.install(state_tensors(here), Round(number=3))
    assert digest_of(newcomer.state()) == digest_of(here.state())
    assert _are_on_disk(_outer(newcomer))
    assert _outer(newcomer).keys() == {f"outer/{name}/momentum_buffer" for name in gradients(0)}
    assert all(torch.equal(value, newcomer.masters[name]) for name, value in here.masters.items())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be had in"):
        weights_of(config_of("diloco"), linear(), lineage="", anchors=tmp_path / "none")
