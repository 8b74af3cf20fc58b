"""Variants of stages, the paths through them, and what of a round passes through a block."""

from fractions import Fraction
from typing import Any

import pytest

from swarm.config import (
    DataConfig,
    ModelConfig,
    RoundsConfig,
    RunConfig,
    StagesConfig,
    forbidden_changes,
    from_json,
    to_json,
)
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


def _of_classes(custom_class: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=3, custom_class=custom_class),
        stages=StagesConfig(num_stages=3, variants=(2, 1, 2), paths=((0, 0, 0), (1, 0, 1))),
    )


def test_each_path_may_have_classes_of_its_own() -> None:
    config = _of_classes((("a:B", "", "a:C"), ("d:E", "", "d:E")))
    assert dict(config.classes) == {
        Block(0): "a:B", Block(1): "", Block(2): "a:C", Block(0, 1): "d:E", Block(2, 1): "d:E"
    }  # fmt: skip
    assert config.own_classes == ("a:B", "a:C", "d:E")
    assert from_json(to_json(config), source="DHT") == config
    one = _of_classes("a:B")
    assert set(one.classes.values()) == {*one.own_classes} == {"a:B"}
    assert _of_classes(("a:B", "a:B")).classes == one.classes
    assert _of_classes("").own_classes == ()


def test_a_run_that_goes_on_keeps_its_classes() -> None:
    before, after = _of_classes("a:B"), _of_classes((("a:B", "a:B", "a:B"), ("c:D", "a:B", "c:D")))
    assert forbidden_changes(before, after).keys() == {"model.custom_class"}
    assert to_json(before).count('"custom_class":"a:B"') == 1, "as earlier releases write it"
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("classes", "line"),
    [
        (("a:B",), "model.custom_class has 1 entry, and the run has 2 paths: each needs one"),
        ((), "model.custom_class has 0 entries, and the run has 2 paths: each needs one"),
        (("a:B", ("a:B", "c:D")), "has 2 entries for path 1, and the run has 3 stages: name one class for the whole"),
        (("a:B", "c:D"), r"two classes for stage 1, 'a:B' and 'c:D' \(of path 1\): paths that share it name the same"),
        (("a:B", ("c:D", "", "c:D")), r"two classes for stage 1, 'a:B' and '' \(of path 1\)"),
        (("", ""), "model.custom_class names no class: leave it out"),
    ],
)
def test_every_block_has_one_class(classes: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line) as raised:
        _of_classes(classes)
    assert "\n" not in str(raised.value)


def test_every_path_has_as_many_microbatches_of_a_round() -> None:
    with pytest.raises(ValueError, match="makes 8 microbatches, and these must be a multiple of the 3 paths"):
        config_of((1, 3, 1, 1))
