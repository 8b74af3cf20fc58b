"""Watches the peers of a run from outside while they train: microbatches, rounds, and how long a short call takes.

Used by the bench `link`. It asks every peer to describe itself, over lines like those of the peers and with the
deadline of a report to a leader: what delays it would delay a heartbeat. Changes nothing at the peers.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc

from scripts.benches.common import START_SECONDS, ServingPeer
from scripts.benches.throttle import Machine
from swarm.averaging.timing import Timing
from swarm.errors import DeadlineExceeded
from swarm.rpc import tls
from swarm.rpc.channels import CLIENT_OPTIONS
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub

POLL_SECONDS = 0.2
ANSWER_SECONDS = Timing().report_seconds


@dataclass
class Watched:
    """What one peer told over a while.

    Attributes:
        committed: by time, microbatches committed so far.
        delays: seconds that each answer took; a deadline that was missed counts as that long.
        first, last: the first and the last answer.
        rounds: those committed meanwhile, by number.
        up, down: bytes per second over its lines.
    """

    stage: int
    committed: list[tuple[float, int]] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    num_missed: int = 0
    first: pb.DescribeReply = field(default_factory=pb.DescribeReply)
    last: pb.DescribeReply = field(default_factory=pb.DescribeReply)
    rounds: dict[int, pb.RoundReport] = field(default_factory=dict)
    up: float = 0.0
    down: float = 0.0

    @property
    def microbatches_per_second(self) -> float:
        """Committed from the first answer to the last."""
        (began_at, before), (ended_at, after) = self.committed[0], self.committed[-1]
        return (after - before) / (ended_at - began_at)

    def heard(self, reply: pb.DescribeReply, now: float) -> None:
        """Take an answer."""
        if not self.committed:
            self.first = reply
        self.last = reply
        self.committed.append((now, reply.counters.committed))
        self.rounds |= {report.round: report for report in reply.rounds if report.round >= self.first.round}


def longest_gap(watched: Sequence[Watched]) -> float:
    """Seconds in which none of the peers committed a microbatch; as exact as the polls are frequent."""
    times = [one.committed[0][0] for one in watched]
    for one in watched:
        times += [now for (_, before), (now, after) in pairwise(one.committed) if after > before]
    times.append(max(one.committed[-1][0] for one in watched))
    return max(after - before for before, after in pairwise(sorted(times)))


async def watch(
    run_id: str, peers: Sequence[tuple[ServingPeer, Machine]], own: Machine, *, warm_up_seconds: float, seconds: float
) -> list[Watched]:
    """Wait until microbatches are committed, then for the warm-up, and then watch; gives what was seen of each peer.

    Raises:
        DeadlineExceeded: nothing was committed.
    """
    channels = [_channel(peer, own) for peer, _ in peers]
    try:
        await _until_trained(run_id, channels)
        await asyncio.sleep(warm_up_seconds)
        async with asyncio.TaskGroup() as tasks:
            polls = [
                tasks.create_task(_poll(run_id, channel, peer.record.stage, machine, seconds))
                for channel, (peer, machine) in zip(channels, peers, strict=True)
            ]
        return [poll.result() for poll in polls]
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _poll(run_id: str, channel: grpc.aio.Channel, stage: int, machine: Machine, seconds: float) -> Watched:
    watched, began_at = Watched(stage=stage), time.monotonic()
    up, down = machine.up.num_bytes, machine.down.num_bytes
    while (asked_at := time.monotonic()) < began_at + seconds:
        try:
            watched.heard(await _describe(run_id, channel), time.monotonic())
        except grpc.aio.AioRpcError:
            watched.num_missed += 1
        watched.delays.append(time.monotonic() - asked_at)
        await asyncio.sleep(POLL_SECONDS)
    seconds = time.monotonic() - began_at
    watched.up, watched.down = (machine.up.num_bytes - up) / seconds, (machine.down.num_bytes - down) / seconds
    return watched


async def _until_trained(run_id: str, channels: Sequence[grpc.aio.Channel]) -> None:
    """Until one more microbatch was committed."""

    async def committed() -> int:
        replies = [await _describe(run_id, channel, START_SECONDS) for channel in channels]
        return sum(reply.counters.committed for reply in replies)

    deadline, before = time.monotonic() + START_SECONDS, None
    while True:
        with suppress(grpc.aio.AioRpcError):  # A line that is full, or a machine that is busy, may miss a ping.
            now = await committed()
            before = now if before is None else before
            if now > before:
                return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"no microbatch in {START_SECONDS:.0f} s: is the machine busy with other work?")
        await asyncio.sleep(POLL_SECONDS)


async def _describe(
    run_id: str, channel: grpc.aio.Channel, timeout_seconds: float = ANSWER_SECONDS
) -> pb.DescribeReply:
    call: Any = StageServiceStub(channel).Describe
    reply: pb.DescribeReply = await call(pb.DescribeRequest(run_id=run_id), timeout=timeout_seconds)
    return reply


def _channel(peer: ServingPeer, own: Machine) -> grpc.aio.Channel:
    options = (*CLIENT_OPTIONS, *tls.PINNED_OPTIONS, ("grpc.http_proxy", f"http://{own.proxy}"))
    credentials = tls.pinned_credentials(peer.record.certificate_pem)
    return grpc.aio.secure_channel(peer.record.endpoint, credentials, options=options)
