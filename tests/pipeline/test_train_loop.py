"""The trainer's loop, with a hop and leases that the test controls: what it acknowledges, and what it gives up."""

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest

from swarm.config import RunConfig
from swarm.data.prepared import Prepared
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.types import LEASE_SECONDS, TRAINER_ACK_SECONDS, Block
from tests.pipeline.loop_world import pass_time, running
from tests.support.chain import DILOCO, SYNCHRONOUS, eventually


async def test_what_a_trainer_leases_ahead_is_half_of_what_it_has_under_way() -> None:
    """All other microbatches are left to other trainers."""
    async with running(max_in_flight=4) as world:
        world.num_there = 100
        await eventually(lambda: world.wanted[-1] == 0, meanwhile=lambda: world.clock.advance(0.02))
        assert world.num_runs == 4
        assert world.num_granted == 4 + 2


async def test_nobody_waits_for_an_ack_that_is_under_way() -> None:
    """Over a long line, to wait for acks would cost a round trip for every microbatch."""
    async with running(max_in_flight=2) as world:
        world.num_there = 100
        await eventually(lambda: world.num_runs == 2, meanwhile=lambda: world.clock.advance(0.02))
        world.reply.ack_arrives.clear()
        world.answer.set()
        await eventually(lambda: world.num_runs >= 10, meanwhile=lambda: world.clock.advance(0.02))
        assert not world.reply.acked
        assert not world.released


async def test_a_stage_0_that_came_back_from_a_checkpoint_gets_its_round_though_the_window_is_full() -> None:
    """The microbatches under way, and those that wait, belong to the next round, which waits for this one."""
    async with running(SYNCHRONOUS, max_in_flight=4, first=1) as world:
        world.stage_0_round = 1
        world.num_granted, world.num_there = 1, 100
        await eventually(lambda: world.wanted[-1] == 0, meanwhile=lambda: world.clock.advance(0.02))
        runs, world.stage_0_round = world.num_runs, 0
        await eventually(lambda: world.num_runs > runs, meanwhile=lambda: world.clock.advance(0.02))
        assert world.trained[runs].round == 0


async def test_what_waits_of_a_round_that_is_over_is_not_begun() -> None:
    """Another trainer was given these microbatches while this one was frozen, and the round has committed."""
    async with running(SYNCHRONOUS, max_in_flight=1, first=1) as world:
        world.num_there = 2
        await eventually(lambda: world.num_granted == 2, meanwhile=lambda: world.clock.advance(0.02))
        world.stage_0_round, world.num_there = 1, 3
        await eventually(lambda: world.num_granted == 3, meanwhile=lambda: world.clock.advance(0.02))
        world.answer.set()
        await eventually(lambda: world.num_runs == 2)
        assert [m.index for m in world.trained] == [0, 2]


async def test_a_trainer_that_evaluates_holds_nothing_that_others_would_wait_for() -> None:
    async with running(SYNCHRONOUS, max_in_flight=4) as world:
        world.num_there = 100
        await eventually(lambda: world.wanted[-1] == 0, meanwhile=lambda: world.clock.advance(0.02))
        with world.work.paused():
            await eventually(lambda: world.released == [4, 5], meanwhile=lambda: pass_time(world))
            asked = len(world.wanted), len(world.wanted_later)
            world.answer.set()
            await eventually(lambda: world.work.num_in_flight == 0)
            await eventually(
                lambda: len(world.wanted) > asked[0] + 1 and len(world.wanted_later) > asked[1] + 2,
                meanwhile=lambda: pass_time(world),
            )
            assert not any([*world.wanted[asked[0] :], *world.wanted_later[asked[1] + 2 :]])
        await eventually(lambda: world.num_runs > 4, meanwhile=lambda: pass_time(world))


async def test_what_is_granted_while_a_trainer_evaluates_is_given_back() -> None:
    """The microbatches had been asked for before the pause."""
    async with running(SYNCHRONOUS, max_in_flight=4) as world:
        world.num_there = 4
        await eventually(lambda: world.num_granted == 4, meanwhile=lambda: world.clock.advance(0.02))
        acquire, pause = world.acquire, ExitStack()

        async def acquire_late(block: Block, paths: Sequence[int], **options: Any) -> pb.AcquireReply | None:
            if block == Block(0):
                world.acquire = acquire  # type: ignore[method-assign]
                world.num_there = 6
                pause.enter_context(world.work.paused())
            return await acquire(block, paths, **options)

        world.acquire = acquire_late  # type: ignore[method-assign]
        await eventually(lambda: world.acquire is acquire, meanwhile=lambda: pass_time(world))
        with pause:
            # No time passes here, so the end of their leases is not what releases them.
            await eventually(lambda: world.released == [4, 5])
        assert world.num_runs == 4


async def test_a_microbatch_that_is_run_again_has_one_loss() -> None:
    """It is run again because the only peer that counted it has died."""
    async with running() as world:
        world.answer.set()
        await eventually(lambda: world.reply.acked)
        world.num_granted = 0
        await eventually(lambda: world.num_runs == 2, meanwhile=lambda: world.clock.advance(0.02))
        world.round = 1
        await eventually(lambda: len(world.steps) == 1, meanwhile=lambda: pass_time(world))
        assert (world.steps[0].totals.losses, world.steps[0].totals.num_microbatches) == ([(1.0, 1)], 1)


@pytest.mark.parametrize(("config", "losses"), [(DILOCO, [(1.0, 1)]), (SYNCHRONOUS, [])])
async def test_a_microbatch_may_be_longer_under_way_than_a_round_lasts(
    config: RunConfig, losses: list[tuple[float, int]]
) -> None:
    """With DiLoCo its loss counts for the step that is under way when it ends.

    In the synchronous setting its loss counts for no later step: its round is over, and it ran again only for a stage
    that came back.
    """
    async with running(config, first=2) as world:
        world.answer.set()
        await eventually(lambda: world.reply.acked)
        world.round = 3
        await eventually(lambda: len(world.steps) == 1, meanwhile=lambda: pass_time(world))
        assert (world.steps[0].number, world.steps[0].totals.losses) == (3, losses)


async def test_what_a_later_stage_has_lost_is_replayed_while_stage_0_still_has_something_to_grant() -> None:
    async with running(SYNCHRONOUS, max_in_flight=4) as world:
        world.lost = [5]
        await eventually(lambda: world.num_runs == 2, meanwhile=lambda: pass_time(world))
        runs = [(m.index, m.accumulate_only_at) for m in world.trained]
        assert runs == [(0, None), (5, 1)]


async def test_what_two_stages_have_lost_is_replayed_for_one_and_then_at_once_for_the_other() -> None:
    async with running(SYNCHRONOUS, max_in_flight=4) as world:
        world.lost = [5]
        await eventually(lambda: world.num_runs == 2, meanwhile=lambda: pass_time(world))
        world.lost, world.losing_stage = [5, 6], 2
        await eventually(lambda: world.num_runs == 3, meanwhile=lambda: pass_time(world))
        assert [(m.index, m.accumulate_only_at) for m in world.trained[1:]] == [(5, 1), (6, 2)]
        world.answer.set()
        await eventually(lambda: world.num_runs == 4, meanwhile=lambda: pass_time(world))
        assert (world.trained[3].index, world.trained[3].accumulate_only_at) == (5, 2)
        assert world.hints[3] == {Block(0): "a", Block(1): "b"}


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_is_told_for_a_while_what_stage_0_has(stage: int) -> None:
    async with running(SYNCHRONOUS) as world:
        world.answer.set()
        await eventually(lambda: world.told.get(stage) == [0], meanwhile=lambda: pass_time(world))
        world.lost = [5]
        await eventually(lambda: world.num_runs == 2, meanwhile=lambda: pass_time(world))
        await eventually(lambda: not world.told[stage], meanwhile=lambda: pass_time(world))
        assert world.clock.monotonic() > LEASE_SECONDS, "no replay counts at stage 0"


@pytest.mark.parametrize("reason", ["it counts there", "the round is over"])
async def test_a_replay_that_nobody_needs_any_more_makes_room(reason: str) -> None:
    async with running(SYNCHRONOUS) as world:
        world.lost = [5, 6]
        await eventually(lambda: world.num_runs == 3, meanwhile=lambda: pass_time(world))
        assert world.work.num_in_flight == 3
        if reason == "it counts there":
            world.counted = {0, 5, 6}
        else:
            world.later_round = 1
        await eventually(lambda: world.work.num_in_flight == 1, meanwhile=lambda: pass_time(world))
        await eventually(lambda: world.released_later == [5, 6], meanwhile=lambda: pass_time(world))
        assert world.released == [], "what is new goes on"


async def test_what_is_answered_after_a_freeze_is_given_up_whatever_comes_first() -> None:
    """Another trainer may have the lease by then, and the microbatch may be counted already."""
    async with running() as world:
        world.answer.set()
        world.clock.advance(LEASE_SECONDS)
        await eventually(lambda: 0 in world.released, meanwhile=lambda: pass_time(world))
        assert not world.reply.acked


async def test_what_is_under_way_after_a_freeze_is_given_up_although_leases_are_to_be_had_again() -> None:
    async with running() as world:
        world.clock.advance(LEASE_SECONDS)
        await eventually(lambda: 0 in world.released, meanwhile=lambda: pass_time(world))
        world.answer.set()
        await asyncio.sleep(0.02)
        assert not world.reply.acked
        assert world.num_runs == 1


async def test_what_was_about_to_begin_after_a_freeze_is_given_up_too() -> None:
    async with running(max_in_flight=1) as world:
        world.num_there = 2
        await eventually(lambda: world.num_granted == 2, meanwhile=lambda: world.clock.advance(0.02))
        with world.work.paused():
            world.answer.set()
            await eventually(lambda: world.work.num_in_flight == 0)
        await asyncio.sleep(0)
        # One more microbatch is begun, and before its task has had its first turn, the leases are overdue.
        assert world.work.num_in_flight == 1
        world.work.let_go(Block(0))
        await eventually(lambda: 1 in world.released, meanwhile=lambda: pass_time(world))
        assert world.num_runs == 1
        await eventually(lambda: world.work.num_in_flight == 0)


async def test_without_renewal_all_is_given_up_before_the_lease_ends() -> None:
    async with running() as world:
        world.reachable = False
        for _ in range(int(TRAINER_ACK_SECONDS / 0.1) + 5):
            pass_time(world)
            await asyncio.sleep(0.001)
        world.reachable = True
        await eventually(lambda: 0 in world.released, meanwhile=lambda: pass_time(world))
        assert not world.reply.acked


@pytest.mark.parametrize("config", [DILOCO, SYNCHRONOUS])
async def test_a_trainer_whose_text_is_not_prepared_gives_back_what_it_was_granted(config: RunConfig) -> None:
    """Others would wait for it, and it would be paused for holding it."""
    async with running(config, max_in_flight=4) as world:
        world.waits_for_part, world.num_there = True, 3
        await eventually(lambda: 1 in world.released, meanwhile=lambda: pass_time(world))
        with world.work.paused():  # As for an evaluation, after which the wait goes on.
            pass_time(world)
        asked = len(world.wanted)
        world.answer.set()
        await eventually(lambda: len(world.wanted) > asked + 3, meanwhile=lambda: pass_time(world))
        assert not any(world.wanted[asked + 1 :])
        assert (world.num_runs, world.reply.acked) == (1, True), "what had begun has ended"
        world.part.set_result(cast(Prepared, None))
        world.waits_for_part, world.num_there = False, 100
        await eventually(lambda: world.num_runs > 1, meanwhile=lambda: pass_time(world))


@pytest.mark.parametrize(("config", "streams", "number"), [
    (DILOCO, False, 10**9), (DILOCO, True, 7), (SYNCHRONOUS, False, 7), (SYNCHRONOUS, True, 7),
])  # fmt: skip
async def test_in_data_that_streams_a_round_says_where_its_microbatches_are(
    config: RunConfig, streams: bool, number: int
) -> None:
    """With DiLoCo, a new leader leaves out up to a billion indices, and nobody can skip as many rows."""
    num = config.microbatches_per_round
    number = number if number == 10**9 else 3 * num + 10**9 % num
    if streams:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, dataset="hf:x", part_rows=100))
    async with running(config, first=3) as world:
        world.stage_0_round = 3
        world.num_granted = number if config.rounds.synchronous else 10**9
        world.num_there = world.num_granted + 1
        await eventually(lambda: world.num_runs == 2, meanwhile=lambda: pass_time(world))
        assert world.numbers[1:] == [number]
