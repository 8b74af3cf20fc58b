"""What a trainer learns of the stages by asking their peers."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from swarm.hop.answers import Obstacle
from swarm.pipeline.round_watcher import RoundWatcher, StepReport
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps
from swarm.training.round_member import RoundCost
from swarm.types import Block, PeerRecord, PeerState
from tests.support.chain import DILOCO, Chain, running_chain
from tests.support.describing import describing

TWO = Block(0), Block(1)


@asynccontextmanager
async def _watching(
    peers: Callable[[Block], list[PeerRecord]],
    *,
    synchronous: bool,
    blocks: Callable[[], Sequence[Block]] = lambda: TWO,
) -> AsyncIterator[RoundWatcher]:
    channels = ChannelPool(insecure=True)
    try:
        yield RoundWatcher(run_id="", blocks=blocks, synchronous=synchronous, peers=peers, channels=channels)
    finally:
        await channels.close()


def _watcher(chain: Chain, *, synchronous: bool = False) -> RoundWatcher:
    return RoundWatcher(
        run_id=chain.config.run_id, blocks=lambda: chain.config.blocks, synchronous=synchronous,
        peers=lambda block: [chain.peers[block.stage].record], channels=chain.peers[0].channels,
    )  # fmt: skip


def _tell(chain: Chain, stage: int, **figures: float) -> None:
    """Let a stage's peer report that it has committed a round, with these figures."""
    rounds = [pb.RoundReport(round=0, **{"contribution_norm": 1.0, "gradient_norm": 1.0} | figures)]  # type: ignore[arg-type]
    chain.peers[stage].servicer._describe = partial(
        pb.DescribeReply, run_id=chain.config.run_id, stage=stage, round=1, rounds=rounds
    )


async def test_norms_too_large_to_be_squared_are_figures_like_others() -> None:
    async with running_chain(DILOCO) as chain:
        for stage in range(3):
            _tell(chain, stage, gradient_norm=1e200, contribution_norm=1e300)
        watcher = _watcher(chain)
        await watcher.poll()
        report = watcher.report(0)
        assert report is not None
        assert report.gradient_norm == pytest.approx(math.sqrt(3) * 1e200)
        assert report.cost.contribution_norm == pytest.approx(math.sqrt(3) * 1e300)


@pytest.mark.parametrize("synchronous", [True, False])
async def test_a_step_has_the_figures_of_all_stages(synchronous: bool) -> None:
    """Each figure is the stages' sum, mean, largest or least, or what they have in common."""
    by_stage: dict[str, tuple[float, float, float]] = {
        "run_samples": (48, 32, 64), "num_members": (3, 2, 4), "num_alive": (5, 6, 7),
        "gradient_norm": (3.0, 2.0, 6.0), "learning_rate": (0.2, 0.1, 0.3), "aggregate_seconds": (1.5, 3.5, 2.5),
        "bytes_sent": (100, 200, 100), "bytes_received": (10, 20, 30), "compression_ratio": (2.0, 4.0, 9.0),
        "attempts": (1, 4, 2), "averaged_fraction": (1.0, 0.25, 0.25), "contribution_norm": (1.0, 4.0, 8.0),
        "exchange_seconds": (0.5, 0.25, 0.75), "wait_seconds": (2.0, 8.0, 4.0), "residual_bytes": (7, 8, 9),
    }  # fmt: skip
    async with running_chain(DILOCO) as chain:
        watcher = _watcher(chain, synchronous=synchronous)
        for stage in range(3):
            assert watcher.report(1) is None
            reply = pb.DescribeReply(
                run_id=chain.config.run_id, peer_id=chain.peers[stage].peer_id, stage=stage, round=2,
                device_bytes=(10, 30, 20)[stage],
                time_shares=pb.TimeShares(
                    computing=0.5, waiting_for_input=0.25, waiting_for_room=0.125, averaging=0.0625, utilisation=stage
                ),
                averaging=pb.AveragingCounters(aborted={"slow": stage, "gone": 10 * stage}),
                rounds=[
                    pb.RoundReport(round=0, num_members=100),
                    pb.RoundReport(
                        round=1, inner_steps=pb.InnerSteps(count=stage, configured_samples=16),
                        **{name: figures[stage] for name, figures in by_stage.items()},  # type: ignore[arg-type]  # counts are ints
                    ),
                ],
            )  # fmt: skip
            chain.peers[stage].servicer._describe = lambda reply=reply: reply  # type: ignore[misc]
            await watcher.poll()
    assert watcher.report(1) == StepReport(
        run_samples=32, gradient_norm=3.0 if synchronous else 7.0, learning_rate=0.2, num_members=9, num_alive=18,
        averaged_fraction=0.5, wait_seconds=8.0, num_attempts=4, num_aborted=33, device_bytes=30,
        cost=RoundCost(
            bytes_sent=400, bytes_received=60, compression_ratio=4.75, seconds=3.5, exchange_seconds=0.75,
            contribution_norm=9.0, residual_bytes=24,
        ),
        inner_steps={}
        if synchronous
        else {Block(stage): InnerSteps(count=stage, configured_samples=16) for stage in range(3)},
        time_shares={
            Block(stage): {
                chain.peers[stage].peer_id: {
                    "computing_share": 0.5, "input_wait_share": 0.25, "room_wait_share": 0.125,
                    "averaging_share": 0.0625, "flops_utilisation": stage,
                }
            }
            for stage in range(3)
        },
    )  # fmt: skip
    assert watcher.report(2) is None


async def test_a_peer_that_calls_itself_by_another_name_at_each_answer_counts_once() -> None:
    async with running_chain(DILOCO) as chain:
        for stage in range(3):
            _tell(chain, stage)
        honest, names = chain.peers[0].servicer._describe, iter("abc")
        aborted = pb.DescribeReply(averaging=pb.AveragingCounters(aborted={"slow": 2}))

        def liar() -> pb.DescribeReply:
            reply = honest()
            reply.MergeFrom(aborted)
            reply.peer_id = next(names)
            return reply

        chain.peers[0].servicer._describe = liar
        watcher = _watcher(chain)
        for _ in range(3):
            await watcher.poll()
        report = watcher.report(0)
        assert report is not None
        assert report.num_aborted == 2


@pytest.mark.parametrize(
    "figure", [{"gradient_norm": math.nan}, {"contribution_norm": math.inf}, {"num_samples": 1 << 60}]
)
async def test_an_answer_that_makes_no_sense_is_none(figure: dict[str, float]) -> None:
    async with running_chain(DILOCO) as chain:
        for stage in range(3):
            _tell(chain, stage, **figure if stage == 1 else {})
        watcher = _watcher(chain)
        await watcher.poll()
        assert (watcher.round, watcher.latest_round, watcher.report(0)) == (0, 1, None)
        obstacle = watcher.obstacle(Block(1))
        assert obstacle is not None
        assert next(iter(figure)) in obstacle.causes
        _tell(chain, 1)
        await watcher.poll()
        assert (watcher.round, watcher.obstacle(Block(1))) == (1, None)
        assert watcher.report(0) is not None


async def test_who_is_announced_and_cannot_be_reached_is_named() -> None:
    records = [
        PeerRecord(
            peer_id="0" * 40, name="gpu-box", announced_at=0.0, stage=1, endpoint="127.0.0.1:1", state=PeerState.SERVING
        )
    ]
    async with _watching(lambda block: records if block.stage == 1 else [], synchronous=True) as watcher:
        await watcher.poll()
        assert watcher.known_round is None
        assert watcher.obstacle(Block(0)) == Obstacle(num_peers=0)
        cause = "gpu-box at 127.0.0.1:1: nothing listens there"
        assert watcher.obstacle(Block(1)) == Obstacle(num_peers=1, num_silent=1, causes=cause)
        records.clear()
        await watcher.poll()
        assert watcher.obstacle(Block(1)) == Obstacle(num_peers=0)


def _serving(stack: AsyncExitStack, stage: int, number: int, say: Callable[[], int]) -> Awaitable[PeerRecord]:
    async def serve() -> PeerRecord:
        answer = lambda _: pb.DescribeReply(stage=stage, round=say())  # noqa: E731
        record = await stack.enter_async_context(describing(stage, answer))
        return record.model_copy(update={"peer_id": f"{number:040x}"})

    return serve()


@pytest.mark.parametrize("lie", [1 << 47, 0])
async def test_what_one_peer_says_of_the_round_changes_nothing(lie: int) -> None:
    """Not even if it is announced last, and one of two peers of its stage."""
    present = 5
    async with AsyncExitStack() as stack:
        rows = {
            0: [await _serving(stack, 0, 1, lambda: present), await _serving(stack, 0, 2, lambda: present)],
            1: [await _serving(stack, 1, 3, lambda: present), await _serving(stack, 1, 4, lambda: lie)],
        }
        rows[1][1] = rows[1][1].model_copy(update={"announced_at": 1e18})
        watcher = await stack.enter_async_context(_watching(lambda block: rows[block.stage], synchronous=True))
        for present in (5, 5, 6, 6):
            await watcher.poll()
            assert (watcher.round, watcher.known_round, watcher.latest_round) == (present, present, present)


async def test_a_stage_that_says_any_round_ends_no_step_before_the_others() -> None:
    async with AsyncExitStack() as stack:
        records = [await _serving(stack, stage, 1 + stage, lambda stage=stage: (5, 1 << 47)[stage]) for stage in (0, 1)]  # type: ignore[misc]
        watcher = await stack.enter_async_context(_watching(lambda block: [records[block.stage]], synchronous=False))
        await watcher.poll()
        assert (watcher.round, watcher.latest_round) == (5, 5)


async def test_a_block_that_is_followed_again_takes_no_step_back_and_holds_up_only_the_next_one() -> None:
    """A path stood still for a while, and its block is rounds behind."""
    rounds, samples = {Block(0): 5, Block(1): 5, Block(1, 1): 5}, {Block(0): 96, Block(1): 40, Block(1, 1): 32}
    followed = list(rounds)
    async with AsyncExitStack() as stack:
        records: dict[Block, PeerRecord] = {}
        for number, block in enumerate(followed):

            def say(_: object, block: Block = block) -> pb.DescribeReply:
                number = rounds[block] - 1
                report = pb.RoundReport(round=number, run_samples=samples[block] + 10 * number, gradient_norm=1.0)
                return pb.DescribeReply(stage=block.stage, variant=block.variant, round=rounds[block], rounds=[report])

            record = await stack.enter_async_context(describing(block.stage, say))
            records[block] = record.model_copy(update={"peer_id": f"{number:040x}", "variant": block.variant})
        watcher = await stack.enter_async_context(
            _watching(lambda block: [records[block]], synchronous=False, blocks=lambda: followed)
        )

        async def look() -> tuple[int, int | None]:
            await watcher.poll()
            report = watcher.report(watcher.round - 1)
            return watcher.round, None if report is None else report.run_samples

        assert await look() == (5, min(96 + 40, 40 + 32 + 80)), "the variants of a stage together have the run's"
        rounds.update({Block(0): 7, Block(1): 7})
        assert await look() == (5, 136), "a step waits for all that are followed"
        followed.remove(Block(1, 1))
        assert await look() == (7, min(96 + 60, 40 + 60 + 32 + 40)), "what stands still counts with what it had"
        followed.append(Block(1, 1))
        assert await look() == (7, None)
        assert watcher.known_round == 5
        rounds.update({Block(0): 8, Block(1): 8, Block(1, 1): 7})
        assert (await look())[0] == 7
        rounds[Block(1, 1)] = 8
        assert await look() == (8, 166)
