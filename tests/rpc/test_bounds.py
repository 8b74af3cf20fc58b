"""Numbers and lists that nobody means."""

from typing import Any

import pytest

from swarm.errors import MalformedMessage
from swarm.rpc.bounds import LARGEST, LONGEST, LONGEST_OF_MESSAGES, require_bounds
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1 import lease_pb2, stage_pb2
from swarm.rpc.v1.tensor_pb2 import TensorChunk


@pytest.mark.parametrize(
    "message",
    [
        lease_pb2.AcquireRequest(holding=[LARGEST + 1]),
        lease_pb2.AcquireRequest(holding=[0] * (LONGEST + 1)),
        pb.ReportRequest(standing=pb.Standing(round=1 << 63)),
        pb.ReportRequest(highest_microbatch=-LARGEST - 1),
        pb.BeginRequest(ballot=pb.Ballot(attempt=(1 << 64) - 1)),
        pb.AverageRequest(shares=[pb.Share(), pb.Share(num_samples=LARGEST + 1)]),
        pb.AverageRequest(shares=[pb.Share()] * (LONGEST_OF_MESSAGES + 1)),
        stage_pb2.TrainRequest(chunks=[TensorChunk()] * (LONGEST_OF_MESSAGES + 1)),
        pb.AverageRequest(shares=[pb.Share(weight=float("nan"))]),
        pb.CommitRequest(total_squared_norm=float("inf")),
        pb.BarrierReply(ready=True, leader=pb.Contact(), squared_norm=float("-inf")),
        pb.Prepared(member_ids=[""] * (LONGEST + 1)),
        stage_pb2.TrainRequest(open=stage_pb2.Open(microbatch=LARGEST + 1)),
    ],
)
def test_too_much_is_refused(message: Any) -> None:
    with pytest.raises(MalformedMessage):
        require_bounds(message, finite=True)


def test_all_else_passes() -> None:
    require_bounds(pb.AverageRequest(shares=[pb.Share()] * LONGEST_OF_MESSAGES), finite=True)
    require_bounds(lease_pb2.AcquireRequest(holding=[LARGEST], wait_seconds=-1e300), finite=True)
    require_bounds(pb.ReportRequest(highest_microbatch=-1, committed_gaps=range(1, 100)), finite=True)
    require_bounds(pb.BeginReply(norm=float("nan")), finite=False)
    require_bounds(stage_pb2.DescribeReply(averaging=stage_pb2.AveragingCounters(aborted={"x": 1 << 60})), finite=True)


def test_looking_changes_nothing() -> None:
    message = pb.ReportRequest()
    require_bounds(message, finite=True)
    assert not message.HasField("standing")
