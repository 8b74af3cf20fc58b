"""Which blocks of a run are served, as --stage and --path say."""

import dataclasses

import pytest

from peers.shared.stage_choice import StageChoice
from swarm.config import ModelConfig, RoundsConfig, RunConfig, StagesConfig

PATHS = RunConfig(
    model=ModelConfig(num_layers=3), rounds=RoundsConfig(round_samples=48),
    stages=StagesConfig(num_stages=3, variants=(2, 1, 3), paths=((0, 0, 0), (1, 0, 1), (1, 0, 2))),
)  # fmt: skip


@pytest.mark.parametrize(
    ("word", "path", "blocks"),
    [
        ("0", None, "0 0.1"),
        ("0.0", None, "0"),
        ("0.1", None, "0.1"),
        ("1-2", None, "1 2 2.1 2.2"),
        ("all", None, "0 0.1 1 2 2.1 2.2"),
        ("all", 2, "0.1 1 2.2"),
        ("1-2", 1, "1 2.1"),
    ],
)
def test_blocks_are_named_by_stages_and_a_variant_or_a_path(word: str, path: int | None, blocks: str) -> None:
    span = StageChoice.parse(word)
    assert span is not None
    assert str(span) == word
    assert " ".join(map(str, dataclasses.replace(span, path=path).of(PATHS))) == blocks
