"""Variants of stages, the paths through them, and what of a round passes through a block."""

from fractions import Fraction
from typing import Any

import pytest

from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.types import Block

BLOCKS = (Block(0), Block(1, 0), Block(1, 1), Block(2, 0), Block(2, 1), Block(3))


def config_of(variants: tuple[int, ...] = (1, 2, 2, 1), **options: Any) -> RunConfig:
    stages = StagesConfig(num_stages=len(variants) or 4, variants=variants, **options)
    rounds = RoundsConfig(setting="synchronous", round_samples=16)
    return RunConfig(
        model=ModelConfig(num_layers=4), stages=stages, data=DataConfig(microbatch_size=2), rounds=rounds
    )  # fmt: skip


def test_without_variants_there_is_one_path_through_all_stages() -> None:
    config = config_of(())
    assert config.paths == ((0, 0, 0, 0),)
    assert config.blocks == tuple(map(Block, range(4)))
    assert config.neighbours(Block(1), 1) == (Block(2),)
    assert (config.neighbours(Block(0), -1), config.neighbours(Block(3), 1)) == ((), ())
    assert config.microbatches_after(48, Block(2)) == range(24, 32)
    assert config.round_samples_of(Block(2)) == 16


def test_paths_are_all_combinations_of_variants_and_take_turns() -> None:
    config = config_of()
    assert config.blocks == BLOCKS
    assert config.paths == ((0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (0, 1, 1, 0))
    assert [config.path_of(index) for index in range(5)] == [0, 1, 2, 3, 0]
    assert config.blocks_of(1) == (Block(0), Block(1), Block(2, 1), Block(3))
    assert config.neighbours(Block(1, 1), 1) == (Block(2, 0), Block(2, 1))
    assert config.neighbours(Block(2, 1), -1) == (Block(1, 0), Block(1, 1))


def test_a_block_gets_its_share_of_every_round() -> None:
    config = config_of()
    assert [config.share_of(block) for block in BLOCKS] == [1, *[Fraction(1, 2)] * 4, 1]
    assert list(config.microbatches_after(8, Block(1, 1))) == [10, 11, 14, 15]
    assert list(config.microbatches_after(8, Block(2, 1))) == [9, 11, 13, 15]
    for stage in range(4):
        blocks = [block for block in BLOCKS if block.stage == stage]
        assert sum(config.round_samples_of(block) for block in blocks) == 16
        before = 16 // len(blocks)
        assert sorted(i for block in blocks for i in config.microbatches_after(before, block)) == list(range(8, 16))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"variants": (1, 2)}, "stages.variants has 2 entries for 4 stages"),
        ({"variants": (1, 1025, 1, 1)}, "makes 1025 paths, and a run has at most 1024"),
        ({"variants": (1, 2, 1, 1), "paths": ((0, 2, 0, 0),)}, "must name a variant of each stage"),
        ({"variants": (1, 2, 1, 1), "paths": ((0, 0, 0, 0),)}, "no path leads through variant 1 of stage 1"),
    ],
)
def test_impossible_paths_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        StagesConfig(num_stages=4, **options)


def test_every_path_has_as_many_microbatches_of_a_round() -> None:
    with pytest.raises(ValueError, match="makes 8 microbatches, and these must be a multiple of the 3 paths"):
        config_of((1, 3, 1, 1))
