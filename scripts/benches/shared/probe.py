"""Watches from outside how many microbatches the peers of a run commit while they train."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from scripts.benches.shared.common import START_SECONDS, fail_on_exit
from scripts.benches.shared.swarm import Lines, ServingPeer, SwarmProcesses
from scripts.benches.shared.throttle import Link
from swarm.averaging.agreement.rules import Timing
from swarm.errors import DeadlineExceeded, SwarmError
from swarm.rpc import tls
from swarm.rpc.ask import describe
from swarm.rpc.tls import CLIENT_OPTIONS, through
from swarm.rpc.v1 import stage_pb2 as pb

POLL_SECONDS = 0.2
LEAST_SECONDS = 2.0  # The least length of a measurement, which is enough for several polls
ANSWER_SECONDS = Timing().report_seconds


@dataclass
class Watched:
    """What one peer said: the times of its answers, and the microbatches that were committed until then."""

    stage: int
    committed: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_committed(self) -> int:
        return self.committed[-1][1] - self.committed[0][1]


def rate_between_commits(watched: Sequence[Watched]) -> float:
    """Microbatches per second of these peers together, from the first commit that was seen to the last. Pauses before
    the first commit and after the last one do not count, since one microbatch more or less between two polls would
    matter. Raises DeadlineExceeded."""
    commits = sorted(
        (now, after - before)
        for one in watched
        for (_, before), (now, after) in pairwise(one.committed)
        if after > before
    )
    if not commits or commits[-1][0] == commits[0][0]:
        raise DeadlineExceeded("hardly a microbatch was committed: measure for longer; is the machine busy?")
    return sum(number for _, number in commits[1:]) / (commits[-1][0] - commits[0][0])


async def watch(swarm: SwarmProcesses, *, warm_up_seconds: float, seconds: float) -> list[Watched]:
    """Wait until microbatches are committed, wait for the warm-up, and then watch all peers. Raises PeerUnavailable and
    DeadlineExceeded."""
    own = swarm.children.own if isinstance(swarm.children, Lines) else None
    channels = [_channel(peer, own) for peer in swarm.peers]
    watched = [Watched(stage=peer.record.stage) for peer in swarm.peers]
    request = pb.DescribeRequest(run_id=swarm.config.run_id)
    now = asyncio.get_running_loop().time

    async def poll(channel: grpc.aio.Channel, one: Watched) -> None:
        with suppress(SwarmError):  # On a full line or a busy machine, a call may be lost.
            reply = await describe(channel, request, seconds=ANSWER_SECONDS)
            one.committed.append((now(), reply.counters.committed))

    async def until(there_at: float) -> None:
        while now() < there_at:
            fail_on_exit(swarm.children)
            await asyncio.gather(*map(poll, channels, watched))
            await asyncio.sleep(POLL_SECONDS)

    try:
        deadline = now() + START_SECONDS
        while not any(one.committed and one.num_committed for one in watched):
            if now() > deadline:
                raise DeadlineExceeded(f"no microbatch in {START_SECONDS:.0f} s: is the machine busy with other work?")
            await until(now() + POLL_SECONDS)
        await until(now() + warm_up_seconds)
        for one in watched:
            one.committed.clear()
        await until(now() + seconds)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    for peer, one in zip(swarm.peers, watched, strict=True):
        if len(one.committed) < 2:
            raise DeadlineExceeded(f"{peer.child.name} hardly answered in {seconds:.0f} s: is the machine busy?")
    return watched


def _channel(peer: ServingPeer, own: Link | None) -> grpc.aio.Channel:
    proxy = through(own.proxy) if own else ()
    credentials = tls.pinned_credentials(peer.record.certificate_pem)
    return grpc.aio.secure_channel(
        peer.record.endpoint, credentials, options=(*proxy, *CLIENT_OPTIONS, *tls.PINNED_OPTIONS)
    )
