"""A peer's reply to Describe, split into the parts from which figures are read.

All of it is the peer's claim: texts are cut and made printable here, and lists are bounded.
"""

import time
from dataclasses import dataclass
from typing import Any, Self

from swarm.machine.words import printable
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps
from swarm.types import LATEST_TIME, LONGEST_NAME, LONGEST_WAIT, Block

LITTLE = 1 / 3
"""A peer that computes for a smaller share of the time says why."""
MOST_REFUSALS = 8
"""The most lines that are shown about holders that a peer does not follow."""
MOST_REASONS = 16
"""The most reasons for failed attempts that are shown: the most frequent ones."""
LONGEST_REFUSAL = 400
"""The most characters of such a line, or reason, that are shown."""
MOST_ROUNDS = 16
"""The most rounds of a peer's reply that are read."""
MOST_LINKS = 16
"""The most links of a peer that are shown."""
LONGEST_ID = 64
"""The most characters that are shown of a link's peer id."""
MOST_STAGES = 256
"""The most stages for which a reply may name the last peer."""


@dataclass(frozen=True, kw_only=True)
class LastPeer:
    """The last peer that served a stage that no peer serves now.

    Attributes:
        last_at: when the peer last announced itself, in seconds since the epoch.
        has_left: whether the peer said that it leaves; otherwise it fell silent.
    """

    name: str
    last_at: float
    has_left: bool

    @property
    def in_words(self) -> str:
        did = "left" if self.has_left else "was last heard of"
        return f"{self.name} {did} at {time_of_day(self.last_at)}"


@dataclass(frozen=True)
class Answer:
    """A peer's reply to Describe, with the report of its last committed round, and the inner steps of that round."""

    reply: pb.DescribeReply
    last: pb.RoundReport
    inner: InnerSteps

    @classmethod
    def of(cls, reply: pb.DescribeReply) -> Self:
        last = reply.rounds[-1] if reply.rounds else pb.RoundReport()
        return cls(reply, last, InnerSteps.read(last.inner_steps))

    @property
    def contributed_rounds(self) -> tuple[int, ...]:
        """The rounds to which the peer says that it has contributed, among the newest in the reply."""
        return tuple(report.round for report in self.reply.rounds[-MOST_ROUNDS:] if report.contributed)

    @property
    def refusals(self) -> tuple[str, ...]:
        return tuple(printable(line[:LONGEST_REFUSAL]) for line in self.reply.averaging.refusals[:MOST_REFUSALS])

    @property
    def aborted(self) -> dict[str, int]:
        most_first = sorted(self.reply.averaging.aborted.items(), key=lambda item: -item[1])
        return {printable(reason[:LONGEST_REFUSAL]): number for reason, number in most_first[:MOST_REASONS]}

    @property
    def reached(self) -> str:
        lines = self.reply.lines
        if not lines.is_hidden:
            return "direct"
        return "punched" if lines.punched else "relayed" if lines.relayed else "tunnel"

    @property
    def waiting_for(self) -> str:
        return printable(self.reply.waiting_for[:LONGEST_WAIT])

    @property
    def idle_because(self) -> str:
        """Why the peer is busy for a small part of the time, and what to change; empty if it is busy, or unused."""
        return idle_because(self.reply.time_shares)

    @property
    def links(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {
                "peer_id": printable(link.peer_id[:LONGEST_ID]),
                "round_trip_seconds": link.round_trip_seconds,
                "bytes_per_second": link.bytes_per_second,
            }
            for link in self.reply.links[:MOST_LINKS]
        )

    @property
    def last_peers(self) -> dict[Block, LastPeer]:
        """For each block that no peer serves, as far as the answering peer knows, the peer that served it last."""
        return {
            Block(last.stage, last.variant): LastPeer(
                name=printable(last.name[:LONGEST_NAME]), last_at=last.last_at, has_left=last.has_left
            )
            for last in self.reply.last_peers[:MOST_STAGES]
        }


def idle_because(shares: pb.TimeShares) -> str:
    if not 0.0 < shares.computing < LITTLE:
        return ""
    remedies = {
        "waits for input": (
            shares.waiting_for_input,
            "more microbatches under way (--max-in-flight here, another trainer), larger ones "
            "(data.microbatch_size), or its place at a stage that is busier",
        ),
        "waits for room at the next stage": (
            shares.waiting_for_room,
            "another peer there, a smaller wire.dtype, or a faster line",
        ),
        "averages": (
            shares.averaging,
            "longer rounds (rounds.round_samples), a smaller averaging.codec, or averaging.overlap_steps",
        ),
    }
    reason, (share, remedy) = max(remedies.items(), key=lambda item: item[1][0])
    return f"busy for {shares.computing:.0%} of the time, and {reason} for {share:.0%}; what helps: {remedy}"


def time_of_day(at: float) -> str:
    """The local time of day of a time that a peer tells, in seconds since the epoch; of LATEST_TIME for a later one."""
    return time.strftime("%H:%M:%S", time.localtime(min(max(0.0, at), LATEST_TIME)))
