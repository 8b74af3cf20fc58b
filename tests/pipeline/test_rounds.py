"""What a trainer learns of the stages by asking."""

import math
from functools import partial

import pytest

from swarm.pipeline.rounds import RoundWatcher
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord, PeerState
from tests.support.chain import DILOCO, Chain, running_chain


def _watcher(chain: Chain) -> RoundWatcher:
    return RoundWatcher(
        run_id=chain.config.run_id, num_stages=len(chain.peers), synchronous=False,
        peers=lambda stage: [chain.peers[stage].record], channels=chain.peers[0].channels,
    )  # fmt: skip


def _tell(chain: Chain, stage: int, **figures: float) -> None:
    """Have a stage's peer say that it has committed a round, and this of it."""
    rounds = [pb.RoundReport(round=0, **{"contribution_norm": 1.0, "gradient_norm": 1.0} | figures)]  # type: ignore[arg-type]
    chain.peers[stage].servicer._describe = partial(
        pb.DescribeReply, run_id=chain.config.run_id, stage=stage, round=1, rounds=rounds
    )  # fmt: skip


async def test_norms_too_large_to_be_squared_are_figures_like_others() -> None:
    async with running_chain(DILOCO) as chain:
        for stage in range(3):
            _tell(chain, stage, gradient_norm=1e200, contribution_norm=1.5e308)
        watcher = _watcher(chain)
        await watcher.poll()
        report = watcher.report(0)
        assert report is not None
        assert report.gradient_norm == pytest.approx(math.sqrt(3) * 1e200)
        assert report.contribution_norm == math.inf


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
        assert next(iter(figure)) in (watcher.why_silent(1) or "")
        _tell(chain, 1)
        await watcher.poll()
        assert (watcher.round, watcher.why_silent(1)) == (1, None)
        assert watcher.report(0) is not None


async def test_who_is_announced_and_cannot_be_reached_is_named() -> None:
    records = [
        PeerRecord(
            peer_id="0" * 40, name="gpu-box", announced_at=0.0, stage=1, endpoint="127.0.0.1:1", state=PeerState.SERVING
        )
    ]
    channels = ChannelPool(insecure=True)
    watcher = RoundWatcher(
        run_id="run", num_stages=2, synchronous=True, peers=lambda stage: records if stage == 1 else [],
        channels=channels,
    )  # fmt: skip
    await watcher.poll()
    assert watcher.known_round is None
    assert watcher.why_silent(0) is None
    assert (watcher.why_silent(1) or "").startswith("gpu-box at 127.0.0.1:1 (UNAVAILABLE: failed to connect")
    records.clear()
    await watcher.poll()
    assert watcher.why_silent(1) is None
    await channels.close()
