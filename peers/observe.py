"""Looking at a swarm: ask every announced peer what it is doing.

Used by swarm-status, which has the announcements from the DHT, and by swarm-local, which knows its own children.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from peers.view import PeerRow, StageRow, SwarmView, TrainerRow
from swarm.errors import PeerUnavailable
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.types import PeerRecord, TrainerRecord

ANSWER_SECONDS = 2.0


async def observe(
    run_id: str, stages: Mapping[int, Sequence[PeerRecord]], trainers: Sequence[TrainerRecord], channels: ChannelPool,
    events: Sequence[str] = (),
) -> SwarmView:  # fmt: skip
    """Ask all peers at once; one that does not answer in time is shown as unreachable."""
    rows = await asyncio.gather(
        *(_stage_row(run_id, stage, records, channels) for stage, records in sorted(stages.items()))
    )
    return SwarmView(
        run=run_id, stages=tuple(rows), events=tuple(events),
        trainers=tuple(
            TrainerRow(name=t.name, step=t.step, loss=t.loss, tokens_per_second=t.tokens_per_second) for t in trainers
        ),
    )  # fmt: skip


async def _stage_row(run_id: str, stage: int, records: Sequence[PeerRecord], channels: ChannelPool) -> StageRow:
    rows = await asyncio.gather(*(_peer_row(run_id, record, channels) for record in records))
    return StageRow(stage=stage, peers=tuple(sorted(rows, key=lambda row: (row.name, row.peer_id))))


async def _peer_row(run_id: str, record: PeerRecord, channels: ChannelPool) -> PeerRow:
    try:
        call: Any = StageServiceStub(channels.channel(record)).Describe
        async with asyncio.timeout(ANSWER_SECONDS):
            reply: pb.DescribeReply = await call(pb.DescribeRequest(run_id=run_id))
    except (grpc.aio.AioRpcError, TimeoutError, PeerUnavailable):
        return PeerRow(name=record.name, peer_id=record.peer_id, state="unreachable", round=record.round)
    counters = reply.counters
    last = reply.rounds[-1] if reply.rounds else pb.RoundReport()
    return PeerRow(
        name=reply.name, peer_id=reply.peer_id, state=reply.state, samples_per_second=reply.samples_per_second,
        queue_length=reply.queue_length, round=reply.round, samples=reply.round_samples, forwards=counters.forwards,
        backwards=counters.backwards, rerouted_backwards=counters.rerouted_backwards,
        attempts=reply.averaging.attempts, aborted=dict(reply.averaging.aborted), downloads=reply.averaging.downloads,
        alive_peers=last.num_alive, members=last.num_members, averaged_fraction=last.averaged_fraction,
        averaged_bytes=last.bytes_sent + last.bytes_received, compression_ratio=last.compression_ratio,
        exchange_seconds=last.exchange_seconds, wait_seconds=last.wait_seconds,
        contribution_norm=last.contribution_norm,
    )  # fmt: skip
