"""What a peer answered when it was asked to describe itself, in the parts that figures are read from.

Used by peer_row.py. All of it is the peer's word: texts are cut and made printable here, and lists are bounded.
"""

import time
from dataclasses import dataclass
from typing import Any, Self

from peers.shared.process import printable
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps
from swarm.types import LONGEST_NAME, LONGEST_WAIT

MOST_REFUSALS = 8
"""Lines of a peer about others, of which no more are shown."""
LONGEST_REFUSAL = 400
"""Characters of each of them."""
MOST_ROUNDS = 16
"""Rounds of a peer's answer that are looked at."""
MOST_LINKS = 16
"""How many of its lines to others are shown."""
LONGEST_ID = 64
"""Characters of the id that it gives for each."""
LATEST = 4e9
"""Seconds since the epoch, beyond which no time is shown."""
MOST_STAGES = 256
"""Of whose last peers it tells."""


@dataclass(frozen=True, kw_only=True)
class LastPeer:
    """The peer that a stage had last, of one that no peer serves now.

    Attributes:
        name: what it is called.
        last_at: when it last announced itself, in seconds since the epoch.
        has_left: whether it said that it leaves; else it fell silent.
    """

    name: str
    last_at: float
    has_left: bool

    @property
    def in_words(self) -> str:
        """What became of it, and when."""
        did = "left" if self.has_left else "was last heard of"
        return f"{self.name} {did} at {time_of_day(self.last_at)}"


@dataclass(frozen=True)
class Answer:
    """A peer's answer.

    Attributes:
        last: the report of its last committed round.
        inner: the inner steps of that round.
    """

    reply: pb.DescribeReply
    last: pb.RoundReport
    inner: InnerSteps

    @classmethod
    def of(cls, reply: pb.DescribeReply) -> Self:
        """The answer in its parts."""
        last = reply.rounds[-1] if reply.rounds else pb.RoundReport()
        return cls(reply, last, InnerSteps.read(last.inner_steps))

    @property
    def contributed_rounds(self) -> tuple[int, ...]:
        """The rounds to which the peer says it has contributed, of those that it tells of."""
        return tuple(report.round for report in self.reply.rounds[-MOST_ROUNDS:] if report.contributed)

    @property
    def refusals(self) -> tuple[str, ...]:
        """What the peer says of others."""
        return tuple(printable(line[:LONGEST_REFUSAL]) for line in self.reply.averaging.refusals[:MOST_REFUSALS])

    @property
    def waiting_for(self) -> str:
        """What the peer waits for."""
        return printable(self.reply.waiting_for[:LONGEST_WAIT])

    @property
    def links(self) -> tuple[dict[str, Any], ...]:
        """What the peer measures of its lines."""
        return tuple(
            {
                "peer_id": printable(link.peer_id[:LONGEST_ID]),
                "round_trip_seconds": link.round_trip_seconds,
                "bytes_per_second": link.bytes_per_second,
            }
            for link in self.reply.links[:MOST_LINKS]
        )

    @property
    def last_peers(self) -> dict[int, LastPeer]:
        """By stage that no peer serves, as far as the peer knows, the one that did last."""
        return {
            last.stage: LastPeer(name=printable(last.name[:LONGEST_NAME]), last_at=last.last_at, has_left=last.has_left)
            for last in self.reply.last_peers[:MOST_STAGES]
        }


def time_of_day(at: float) -> str:
    """Of a time that a peer names, in seconds since the epoch."""
    return time.strftime("%H:%M:%S", time.localtime(min(max(0.0, at), LATEST)))
