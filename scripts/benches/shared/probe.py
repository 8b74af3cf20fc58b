"""Watches the peers of a run from outside while they train: microbatches, rounds, and the delays of a short call.

Used by the benches that measure a swarm in steady training, and by `validate`. It calls Describe at every peer, with
the same deadline as a report to a leader. If the peers have lines, the calls go over a line of the same kind. So
whatever delays these calls would also delay a heartbeat. Changes nothing at the peers.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import grpc

from scripts.benches.shared.common import START_SECONDS, ServingPeer, SwarmProcesses, fail_on_exit
from scripts.benches.shared.lines import Lines
from scripts.benches.shared.throttle import Link
from swarm.averaging.agreement.rules import Timing
from swarm.errors import DeadlineExceeded, SwarmError
from swarm.rpc import tls
from swarm.rpc.describe import describe
from swarm.rpc.options import CLIENT_OPTIONS, through
from swarm.rpc.v1 import stage_pb2 as pb

POLL_SECONDS = 0.2
LEAST_SECONDS = 2.0
"""The least length of a measurement, which is enough for several polls."""
ANSWER_SECONDS = Timing().report_seconds


@dataclass
class Watched:
    """The reports of one peer during a measurement.

    Attributes:
        committed: the time of each report, and the microbatches that were committed until then.
        delays: the seconds that each answer took. A missing answer counts as its deadline.
        first, last: the first and the last answer.
        rounds: the rounds that were committed meanwhile, by number.
        up, down: bytes per second over its lines, if it has any.
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
    def num_committed(self) -> int:
        """The microbatches committed from the first answer to the last."""
        return self.committed[-1][1] - self.committed[0][1]

    @property
    def microbatches_per_second(self) -> float:
        """The rate from the first answer to the last. It needs at least two answers."""
        return self.num_committed / (self.committed[-1][0] - self.committed[0][0])

    def heard(self, reply: pb.DescribeReply, now: float) -> None:
        """Add an answer."""
        if not self.committed:
            self.first = reply
        self.last = reply
        self.committed.append((now, reply.counters.committed))
        self.rounds |= {report.round: report for report in reply.rounds if report.round >= self.first.round}


def rate_between_commits(watched: Sequence[Watched]) -> float:
    """Microbatches per second of these peers together, from the first commit that was seen to the last.

    Use it for a steady flow of few microbatches, where one more or less between two polls would matter. Pauses before
    the first commit and after the last one do not count.

    Raises:
        DeadlineExceeded: they committed too few.
    """
    commits = sorted(
        (now, after - before)
        for one in watched
        for (_, before), (now, after) in pairwise(one.committed)
        if after > before
    )
    if not commits or commits[-1][0] == commits[0][0]:
        raise DeadlineExceeded("hardly a microbatch was committed: measure for longer; is the machine busy?")
    seconds = commits[-1][0] - commits[0][0]
    return sum(number for _, number in commits[1:]) / seconds


def longest_gap(watched: Sequence[Watched]) -> float:
    """The longest time in which none of the peers committed a microbatch, to within the time between two polls."""
    times = [one.committed[0][0] for one in watched]
    for one in watched:
        times += [now for (_, before), (now, after) in pairwise(one.committed) if after > before]
    times.append(max(one.committed[-1][0] for one in watched))
    return max(after - before for before, after in pairwise(sorted(times)))


async def watch(
    swarm: SwarmProcesses,
    peers: Sequence[ServingPeer] = (),
    *,
    warm_up_seconds: float,
    seconds: float,
    check: Callable[[], object] | None = None,
) -> list[Watched]:
    """Wait until microbatches are committed, wait for the warm-up, and then watch. Return the reports of each peer.

    Args:
        peers: the peers to watch; if empty, all peers of the swarm.
        check: raises an error if the swarm is not as it should be. By default it raises one if a process has ended.

    Raises:
        PeerUnavailable: a process has ended.
        DeadlineExceeded: nothing was committed, or a peer hardly ever answered.
    """
    peers = peers or swarm.peers
    check = check or (lambda: fail_on_exit(swarm.children))
    lines = swarm.children if isinstance(swarm.children, Lines) else None
    run_id = swarm.config.run_id
    channels = [_channel(peer, lines.own if lines else None) for peer in peers]
    try:
        await _until_trained(run_id, channels, check)
        now = asyncio.get_running_loop().time
        warm_at = now() + warm_up_seconds
        while (left := warm_at - now()) > 0:
            await asyncio.sleep(min(left, POLL_SECONDS))
            check()
        watched = await asyncio.gather(
            *(
                _poll(run_id, channel, peer.record.stage, lines.links[peer.child.name] if lines else None, seconds)
                for channel, peer in zip(channels, peers, strict=True)
            )
        )
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    check()
    for peer, one in zip(peers, watched, strict=True):
        if len(one.committed) < 2:
            raise DeadlineExceeded(f"{peer.child.name} hardly answered in {seconds:.0f} s: is the machine busy?")
    return watched


async def _poll(run_id: str, channel: grpc.aio.Channel, stage: int, link: Link | None, seconds: float) -> Watched:
    now = asyncio.get_running_loop().time
    watched, began_at = Watched(stage=stage), now()
    request = pb.DescribeRequest(run_id=run_id)
    up, down = _num_bytes(link)
    while (asked_at := now()) < began_at + seconds:
        try:
            watched.heard(await describe(channel, request, seconds=ANSWER_SECONDS), now())
        except SwarmError:
            watched.num_missed += 1
        watched.delays.append(now() - asked_at)
        await asyncio.sleep(POLL_SECONDS)
    seconds = now() - began_at
    up_now, down_now = _num_bytes(link)
    watched.up, watched.down = (up_now - up) / seconds, (down_now - down) / seconds
    return watched


def _num_bytes(link: Link | None) -> tuple[int, int]:
    return (link.up.num_bytes, link.down.num_bytes) if link else (0, 0)


async def _until_trained(run_id: str, channels: Sequence[grpc.aio.Channel], check: Callable[[], object]) -> None:
    """Wait until one more microbatch was committed."""

    request = pb.DescribeRequest(run_id=run_id)

    async def committed() -> int:
        replies = [await describe(channel, request, seconds=START_SECONDS) for channel in channels]
        return sum(reply.counters.committed for reply in replies)

    loop = asyncio.get_running_loop()
    deadline, before = loop.time() + START_SECONDS, None
    while True:
        check()
        with suppress(SwarmError):  # On a full line or a busy machine, a ping may be lost.
            now = await committed()
            before = now if before is None else before
            if now > before:
                return
        if loop.time() > deadline:
            raise DeadlineExceeded(f"no microbatch in {START_SECONDS:.0f} s: is the machine busy with other work?")
        await asyncio.sleep(POLL_SECONDS)


def _channel(peer: ServingPeer, own: Link | None) -> grpc.aio.Channel:
    proxy = through(own.proxy) if own else ()
    credentials = tls.pinned_credentials(peer.record.certificate_pem)
    return grpc.aio.secure_channel(
        peer.record.endpoint, credentials, options=(*proxy, *CLIENT_OPTIONS, *tls.PINNED_OPTIONS)
    )
