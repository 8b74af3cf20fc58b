"""Numbers and lists beyond what an honest peer sends."""

from typing import Any

import pytest

from swarm.errors import MalformedMessage
from swarm.rpc.bounds import LONGEST_LIST, LONGEST_MESSAGE_LIST, num_entries, require_bounds
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1 import content_pb2, directory_pb2, lease_pb2, stage_pb2
from swarm.rpc.v1.tensor_pb2 import TensorChunk
from swarm.types import LARGEST_COUNT


@pytest.mark.parametrize(
    "message",
    [
        lease_pb2.AcquireRequest(holding=[LARGEST_COUNT + 1]),
        lease_pb2.AcquireRequest(holding=[0] * (LONGEST_LIST + 1)),
        pb.ReportRequest(standing=pb.Standing(round=1 << 63)),
        pb.ReportRequest(highest_microbatch=-LARGEST_COUNT - 1),
        pb.BeginRequest(ballot=pb.Ballot(attempt=(1 << 64) - 1)),
        pb.AverageRequest(shares=[pb.Share(), pb.Share(num_samples=LARGEST_COUNT + 1)]),
        pb.AverageRequest(shares=[pb.Share()] * (LONGEST_MESSAGE_LIST + 1)),
        stage_pb2.TrainRequest(chunks=[TensorChunk()] * (LONGEST_MESSAGE_LIST + 1)),
        pb.AverageRequest(shares=[pb.Share(norm=float("nan"))]),
        pb.CommitRequest(total_squared_norm=float("inf")),
        pb.BarrierReply(ready=True, leader=pb.Contact(), squared_norm=float("-inf")),
        pb.Prepared(member_ids=[""] * (LONGEST_LIST + 1)),
        pb.SnapshotHeader(segment_digests=[b""] * (LONGEST_LIST + 1)),
        stage_pb2.TrainRequest(open=stage_pb2.Open(microbatch=LARGEST_COUNT + 1)),
        stage_pb2.DescribeReply(averaging=stage_pb2.AveragingCounters(aborted={"x": 1 << 60})),
        stage_pb2.DescribeReply(rounds=[stage_pb2.RoundReport(gradient_norm=1e301)]),
    ],
)
def test_too_much_is_refused(message: Any) -> None:
    with pytest.raises(MalformedMessage):
        require_bounds(message, finite=True)


def test_all_else_passes() -> None:
    require_bounds(pb.AverageRequest(shares=[pb.Share()] * LONGEST_MESSAGE_LIST), finite=True)
    require_bounds(lease_pb2.AcquireRequest(holding=[LARGEST_COUNT], wait_seconds=-1e300), finite=True)
    require_bounds(pb.ReportRequest(highest_microbatch=-1, committed_gaps=range(1, 100)), finite=True)
    require_bounds(pb.BeginReply(norm=float("nan")), finite=False)
    aborted = {"x": LARGEST_COUNT}
    require_bounds(stage_pb2.DescribeReply(averaging=stage_pb2.AveragingCounters(aborted=aborted)), finite=True)


def test_all_entries_of_a_whole_request_are_counted() -> None:
    requests = [
        method.input_type
        for file in (stage_pb2, lease_pb2, pb, directory_pb2, content_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.client_streaming
    ]
    assert len(requests) >= 10
    for request in requests:
        _require_no_list_in_entries(request)
    shares, partners = [pb.Share()] * 3, [pb.Partner()] * 2
    assert num_entries(pb.AverageRequest(shares=shares)) == 3
    assert num_entries(pb.CommitRequest(partners=partners)) == 2
    assert num_entries(pb.AverageRequest(shares=shares, handed_down=pb.Prepared(given=[pb.Given()] * 4))) == 7
    assert num_entries(lease_pb2.AcquireRequest(holding=range(100))) == 0


def _require_no_list_in_entries(descriptor: Any) -> None:
    for field in descriptor.fields:
        if field.message_type is not None:
            assert not (field.is_repeated and _has_list_of_messages(field.message_type)), field.full_name
            _require_no_list_in_entries(field.message_type)


def _has_list_of_messages(descriptor: Any) -> bool:
    inner = [field for field in descriptor.fields if field.message_type is not None]
    return any(field.is_repeated or _has_list_of_messages(field.message_type) for field in inner)
