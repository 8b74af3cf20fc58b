"""What peers decide by themselves: which stages they take, and when they go."""

import asyncio
import dataclasses
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from swarm.checkpoint import file
from swarm.config import AveragingConfig
from swarm.errors import Fatal
from swarm.types import Block, ClaimState
from tests.peers.stage_peer.world import CONFIG, PERIOD_SECONDS, VARIANTS, Peer, World, living, make_world
from tests.support.virtual_time import in_virtual_time, run


@in_virtual_time
async def test_newcomers_that_start_together_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch)
    async with living(world, [0, *[None] * 8]):
        assert world.counts() == [3, 3, 3]
    assert world.moves == []


@in_virtual_time
async def test_peers_spread_over_variants_and_one_takes_over_from_the_last_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(monkeypatch, config=VARIANTS)

    def served() -> dict[str, int]:
        return dict(sorted(Counter(str(block) for peer in world.peers for block in peer.span).items()))

    async with living(world, [None] * 6):
        assert served() == {"0": 2, "1": 1, "1.1": 1, "2": 2}
        [last] = [peer for peer in world.peers if Block(1, 1) in peer.span]
        last.kill()
        await world.clock.sleep(3 * PERIOD_SECONDS)
        assert served() in ({"0": 1, "1": 1, "1.1": 1, "2": 2}, {"0": 2, "1": 1, "1.1": 1, "2": 1})
        assert len(world.moves) == 1


@in_virtual_time
async def test_a_path_that_has_not_begun_is_for_newcomers_that_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch, config=VARIANTS, round_number=3)
    async with living(world, [0, 1, 2]):
        assert await world.peers[3].rebalancer.choose_span() in [(Block(stage),) for stage in range(3)]
        assert await Peer(world, 12, starts_over=True).rebalancer.choose_span() == (Block(1, 1),)


@pytest.mark.parametrize("stage", [0, 1])
@in_virtual_time
async def test_a_peer_that_was_killed_and_is_back_at_once_fills_the_gap_that_it_left(
    monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    """Its former record stays for some more seconds, as if a peer still served its stage."""
    world = make_world(monkeypatch)
    async with living(world, [0, 1, 2]):
        world.peers[stage].kill()
        async with asyncio.TaskGroup() as tasks:
            world.peers[stage].start(tasks)
            await world.clock.sleep(10.0)
            assert world.counts() == [1, 1, 1]
            world.peers[stage].kill()


@in_virtual_time
async def test_a_gap_is_filled_by_as_many_as_are_needed_and_then_all_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(monkeypatch)
    async with living(world, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]):
        killed_at = world.clock.monotonic()
        for peer in [p for p in world.peers if p.stage == 1][:3]:
            peer.kill()
        await world.clock.sleep(2 * PERIOD_SECONDS)
        assert world.counts() == [3, 3, 3]
        assert len(world.moves) == 2, "two moved, whoever else wanted to"
        assert {target for _, _, target in world.moves} == {1}
        assert {source for _, source, _ in world.moves} == {0, 2}
        assert all(at - killed_at < 2 * PERIOD_SECONDS for at, _, _ in world.moves)
        await world.clock.sleep(5 * PERIOD_SECONDS)
        assert len(world.moves) == 2
    assert world.least >= 1


@in_virtual_time
async def test_nobody_leaves_silent_peers_alone_nor_goes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent peers are announced, but dead or cut off from here."""
    world = make_world(monkeypatch, silent=lambda peer: peer.stage == 1)
    async with living(world, [0, 0, 0, 0, 1, 2, 2]):
        await world.clock.sleep(5 * PERIOD_SECONDS)
        assert world.moves == []


@in_virtual_time
async def test_nobody_leaves_a_mate_alone_that_has_fallen_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other peer of the stage still has to get the state, and only this peer has it."""
    world = make_world(monkeypatch, round_number=7)
    first, second = world.peers[:2]
    async with living(world, [0, 0, 1, 2]):
        assert await first.rebalancer.can_spare(Block(0), round_number=7)
        second.round = 6
        assert not await first.rebalancer.can_spare(Block(0), round_number=7)


@in_virtual_time
async def test_nobody_leaves_its_stage_to_a_mate_that_has_learnt_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mate began the stage anew at the same round, when it saw no other peer."""
    world = make_world(monkeypatch, round_number=7)
    first, second = world.peers[:2]
    async with living(world, [0, 0, 1, 2]):
        assert await first.rebalancer.can_spare(Block(0), round_number=7, lineage="one")
        second.lineage = "another"
        assert not await first.rebalancer.can_spare(Block(0), round_number=7, lineage="one")
        second.round = 8
        assert await first.rebalancer.can_spare(Block(0), round_number=7, lineage="one")


@in_virtual_time
async def test_where_rounds_need_a_majority_nobody_leaves_too_few_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining peers would wait for ever for a peer that serves another stage."""
    world = make_world(monkeypatch, config=dataclasses.replace(CONFIG, averaging=AveragingConfig(quorum="majority")))
    first, second, third, fourth, *_ = world.peers
    three = {peer.peer_id for peer in (first, second, third)}
    async with living(world, [0, 0, 0, 1, 1, 2]):
        assert not await fourth.rebalancer.can_spare(Block(1))
        assert await first.rebalancer.can_spare(Block(0))
        assert await first.rebalancer.can_spare(Block(0), last_members=three)
        assert not await first.rebalancer.can_spare(Block(0), last_members={first.peer_id, second.peer_id}), (
            "third is new"
        )
        gone = {"d" * 40, "e" * 40}
        assert not await first.rebalancer.can_spare(Block(0), last_members={*three, *gone})
        second.lineage = "another"
        assert not await first.rebalancer.can_spare(Block(0), lineage="one", last_members=three)
        assert world.moves == []


def test_what_a_run_has_learnt_is_not_replaced_by_initial_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def moves(round_number: int, checkpoints: Path | None = None) -> set[int]:
        world = make_world(monkeypatch, round_number=round_number, checkpoints=checkpoints)
        async with living(world, [0, 0, 0, 0, 2, None]):
            await world.clock.sleep(3 * PERIOD_SECONDS)
            return {stage for stage, count in enumerate(world.counts()) if count}

    assert run(moves(5)) == {0, 2}, "stage 1 is lost, until somebody has a checkpoint"
    assert run(moves(0)) == {0, 1, 2}, "nothing was learnt yet"
    (tmp_path / "stage-1-of-3.round-5.safetensors").touch()
    assert run(moves(5, tmp_path)) == {0, 1, 2}

    def broken(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(file, "names", broken)
    assert run(moves(5, tmp_path)) == {0, 2}, "and it goes on all the same"


@in_virtual_time
async def test_no_dht_no_moves_and_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(monkeypatch)
    async with living(world, [0, 0, 0, 1, 2, 2]):
        world.store.is_gone = True
        await world.clock.sleep(3 * PERIOD_SECONDS)
        assert world.moves == []
        world.store.is_gone = False
        await world.clock.sleep(2 * PERIOD_SECONDS)
        assert [target for _, _, target in world.moves] == [1]


@in_virtual_time
async def test_a_stage_that_could_not_be_entered_is_left_alone_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(monkeypatch)
    peer = world.peers[0]

    async def fail() -> None:
        while True:
            target = await peer.rebalancer.next_move((Block(0),), dict)
            world.moves.append((world.clock.monotonic(), 0, target[0].stage))
            await peer.rebalancer.gave_up(target, before=(Block(0),))
            assert [claim.state for claim in await peer.directory.claims()] == [ClaimState.WITHDRAWN]

    async with asyncio.TaskGroup() as tasks:
        for other, stage in zip(world.peers[:6], (0, 0, 0, 1, 2, 2), strict=True):
            other.stage = stage
            other.tasks = [tasks.create_task(other.keep_announced())]
        failing = tasks.create_task(fail())
        await world.clock.sleep(3600)
        failing.cancel()
        for other in world.peers:
            other.kill()
    times = [at for at, _, _ in world.moves]
    assert 4 <= len(times) <= 7
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[-1] > 4 * gaps[0]


@in_virtual_time
async def test_a_claim_that_cannot_be_settled_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the peer would count at the other stage for ever, and never move."""
    world = make_world(monkeypatch)
    peer = world.peers[0]
    async with asyncio.TaskGroup() as tasks:
        for other, stage in zip(world.peers[:6], (0, 0, 0, 1, 2, 2), strict=True):
            other.stage = stage
            other.tasks = [tasks.create_task(other.keep_announced())]
        peer.tasks.append(tasks.create_task(peer.claim.keep()))
        moving = tasks.create_task(peer.rebalancer.next_move((Block(0),), dict))
        async with asyncio.timeout(3600):
            while not peer.claim.span:
                await world.clock.sleep(0.1)
            world.store.is_gone = True
            while peer.claim.span:
                await world.clock.sleep(0.1)
            await world.clock.sleep(30.0)
            world.store.is_gone = False
            assert await moving == (Block(1),)
        for other in world.peers:
            other.kill()


@in_virtual_time
async def test_a_newcomer_takes_no_stage_that_does_not_fit() -> None:
    world = World()
    assert await Peer(world, 11, spans=[range(2, 3)]).rebalancer.choose_span() == (Block(2),)
    with pytest.raises(Fatal, match="nobody holds any stage of this run that fits into this machine's memory any more"):
        await Peer(world, 12, spans=[]).rebalancer.choose_span()
