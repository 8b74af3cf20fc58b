"""What a peer answered when it was asked to describe itself, in the parts that figures are read from.

Used by peer_row.py. All of it is the peer's word: texts are cut and made printable here, and lists are bounded.
"""

from dataclasses import dataclass
from typing import Any, Self

from peers.shared.process import printable
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps
from swarm.types import LONGEST_WAIT

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


@dataclass(frozen=True)
class Answer:
    """A peer's answer.

    Attributes:
        last: of its last committed round.
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
