"""The paths of a trainer: with DiLoCo those stand still of which a block has no peers; and the window of each."""

import dataclasses
from collections import Counter
from collections.abc import Collection

import pytest

from swarm.config import RoundsConfig, RunConfig, StagesConfig
from swarm.pipeline.trainer_paths import LEFT_ALONE_SECONDS, TrainerPaths, Window, Windows
from swarm.types import Block, PeerRecord, PeerState
from tests.support.manual_clock import ManualClock

SYNCHRONOUS = RunConfig(
    stages=StagesConfig(num_stages=3, variants=(1, 2, 2), paths=((0, 0, 0), (0, 1, 0), (0, 1, 1))),
    rounds=RoundsConfig(setting="synchronous", round_samples=48),
)
DILOCO = dataclasses.replace(SYNCHRONOUS, rounds=RoundsConfig(setting="diloco", round_samples=48))
ONE_PATH = dataclasses.replace(DILOCO, stages=StagesConfig(num_stages=3))


def _record(block: Block, state: PeerState = PeerState.SERVING) -> PeerRecord:
    return PeerRecord(
        peer_id="0" * 40, announced_at=0.0, stage=block.stage, variant=block.variant, endpoint="127.0.0.1:1",
        state=state,
    )  # fmt: skip


class _World:
    def __init__(self, config: RunConfig, chosen: Collection[int] = ()) -> None:
        self.clock = ManualClock()
        self.records = {block: [_record(block)] for block in config.blocks}
        self.paths = TrainerPaths(config, self.clock, lambda block: self.records[block], chosen)

    @property
    def live(self) -> list[int]:
        return list(filter(self.paths.is_live, self.paths.paths))


@pytest.mark.parametrize(("empty", "live"), [
    (Block(0), []), (Block(1), [1, 2]), (Block(1, 1), [0]), (Block(2), [2]), (Block(2, 1), [0, 1]),
])  # fmt: skip
@pytest.mark.parametrize("state", [None, PeerState.JOINING, PeerState.LEAVING])
def test_a_path_stands_still_while_a_block_on_it_has_no_peer_that_serves(
    empty: Block, live: list[int], state: PeerState | None
) -> None:
    world = _World(DILOCO)
    assert world.live == [0, 1, 2]
    world.records[empty] = [] if state is None else [_record(empty, state)]
    assert world.live == live
    assert world.paths.missing == (None if live else empty)
    followed = {block for path in live or range(3) for block in DILOCO.blocks_of(path)}
    assert world.paths.followed() == tuple(sorted(followed))


@pytest.mark.parametrize("config", [SYNCHRONOUS, ONE_PATH])
def test_in_the_synchronous_setting_and_with_one_path_nothing_stands_still(config: RunConfig) -> None:
    world = _World(config)
    world.records = {block: [] for block in config.blocks}
    world.paths.leave_alone(0, "stage 1 has no peers")
    assert world.live == list(range(len(config.paths)))
    assert (world.paths.followed(), world.paths.missing) == (config.blocks, None)


def test_a_path_of_which_a_microbatch_came_back_is_left_alone_for_a_while() -> None:
    """The peers that stage 0 knows may have died a moment ago, and their records still be there."""
    world = _World(DILOCO)
    world.paths.leave_alone(4, "stage 1.1 has no peers")
    assert world.live == [0, 2]
    world.clock.advance(LEFT_ALONE_SECONDS)
    assert world.live == [0, 1, 2]


def test_a_trainer_of_some_paths_knows_of_no_others() -> None:
    world = _World(DILOCO, chosen=[2, 0])
    assert (world.paths.paths, world.paths.entries) == ((0, 2), (Block(0),))
    assert world.paths.blocks == (Block(0), Block(1), Block(1, 1), Block(2), Block(2, 1))
    assert [world.paths.through(block) for block in (Block(0), Block(1, 1), Block(2))] == [(0, 2), (2,), (0,)]
    assert _World(SYNCHRONOUS, chosen=[0]).paths.followed() == SYNCHRONOUS.blocks, "they are waited for all the same"


@pytest.mark.parametrize(("config", "chosen", "complaint"), [
    (DILOCO, [0, 3], "there is no path 3: this run has the paths 0 to 2"),
    (ONE_PATH, [1], "there is no path 1: this run has one path, which is 0"),
])  # fmt: skip
def test_a_path_that_the_run_does_not_have_is_refused(config: RunConfig, chosen: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        _World(config, chosen)


# -- the window --------------------------------------------------------------------------------------------------------


def test_a_full_window_nearly_doubles_in_a_round_trip_until_somebody_is_busy() -> None:
    window = Window(start=16, largest=64)
    for _ in range(16):
        window.finished(num_busy=0, in_flight=window.size)
    assert window.size == 30


def test_each_path_is_wanted_as_often_as_its_window_has_room() -> None:
    windows = Windows([0, 1, 2], num_stages=2, max_in_flight=30)
    for _ in range(16):
        windows[0].finished(num_busy=0, in_flight=windows[0].size)
        windows[1].finished(num_busy=1, in_flight=1)
    assert [windows[path].size for path in range(3)] == [10, 1, 4], "of 30 in flight each path may have 10"
    held = Counter({0: 7, 1: 5})
    assert windows.wish([0, 1, 2], held) == [0, 2, 0, 2, 0, 2, 2]
    assert windows.wish([1, 2], held, ahead=0.5) == [2] * 6
    assert windows.wish([], held) == []
