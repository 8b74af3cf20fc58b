"""Whether a peer's line is fast enough for it to become a member of a synchronous stage.

Used by catching_up/catch_up. In the synchronous setting every exchange waits for all members, so one slow line slows
the whole run. The peer judges by what it measured itself: how fast the snapshot came, and how often the group commits.
What others announce about their computing counts as well, but never keeps out a peer with a fast line.
"""

import math
from dataclasses import dataclass

from swarm.averaging.context import Context
from swarm.compression.codec import contribution_codec
from swarm.training.round_member import RoundMember
from swarm.types import PeerState

TOLERATED_SECONDS = 5.0
"""How much longer a peer's exchange may take than a whole round without the peer; beyond that it stays out."""
LEAST_REST_SECONDS = 20.0
"""Least time from one download to the next one that measures the line again."""
REST_FACTOR = 3.0
"""The least rest after a download, as a multiple of the time that it took: so a peer that waits uses the others' lines
for at most a quarter of the time."""
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Why a peer stays out: how long its exchange would take, and how long the group's rounds take without it."""

    exchange_seconds: float
    round_seconds: float
    bytes_per_second: float


class Entry:
    """What a peer that catches up knows about its line and about the group's rounds."""

    def __init__(self, context: Context, member: RoundMember) -> None:
        self._config = context.config
        self._peers = context.peers
        self._member = member
        self._codec = contribution_codec(context.config.averaging)
        self._bytes_per_second = math.inf
        self._look_at = math.inf
        self._group_round = -1
        """The newest round in which the group was seen."""
        self._since = math.nan
        """When the group was seen to enter that round; not a number for the first one, which had begun before."""
        self._shortest_seconds = math.inf
        """The shortest of the group's rounds that were seen from beginning to end."""

    def begin(self) -> None:
        """Forget what was measured, because the peer has fallen behind or is new."""
        self._bytes_per_second = self._look_at = self._shortest_seconds = math.inf
        self._group_round, self._since = -1, math.nan

    def downloaded(self, bytes_per_second: float, *, seconds: float, now: float) -> None:
        """Note the rate at which a snapshot came, and for how many seconds it was being sent."""
        self._bytes_per_second = bytes_per_second
        self._look_at = now + max(LEAST_REST_SECONDS, REST_FACTOR * seconds)

    def saw(self, group_round: int, *, now: float) -> None:
        """Note the round that the group is in. Of its rounds the shortest one counts, for a run may pause."""
        if group_round <= self._group_round:
            return
        if not math.isnan(self._since):
            seconds = (now - self._since) / (group_round - self._group_round)
            self._shortest_seconds = min(self._shortest_seconds, seconds)
        if self._group_round >= 0:
            self._since = now
        self._group_round = group_round

    def should_measure(self, now: float) -> bool:
        """Whether the last download is so long ago that the line may be better."""
        return now >= self._look_at

    @property
    def slowness(self) -> Slowness | None:
        """Why the peer should stay out; None if it may become a member."""
        if not self._config.rounds.synchronous:
            return None
        num_elements = self._member.activity().num_bytes // FLOAT_BYTES
        exchange_seconds = self._codec.num_bytes(num_elements) / self._bytes_per_second
        round_seconds = self._computing_seconds()
        if self._shortest_seconds < math.inf:
            round_seconds = max(round_seconds, self._shortest_seconds)
        if exchange_seconds <= round_seconds + TOLERATED_SECONDS:
            return None
        return Slowness(
            exchange_seconds=exchange_seconds, round_seconds=round_seconds, bytes_per_second=self._bytes_per_second
        )

    def _computing_seconds(self) -> float:
        """What the weakest stage takes to compute a round, as its peers announce; infinite where none has measured."""
        rates = [
            sum(record.samples_per_second for record in self._peers(stage) if record.state is PeerState.SERVING)
            for stage in range(self._config.stages.num_stages)
        ]
        return self._config.rounds.round_samples / min(rates) if min(rates) > 0 else math.inf
