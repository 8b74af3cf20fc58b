"""Who is too slow, or says that it is too fast: the pace of a run and of its leaders, of a peer that follows its group,
and of its line.

A peer judges by its own measurements. In the synchronous setting every exchange waits for all members, so one slow line
would slow the whole run; what others announce about their computing never keeps out a peer with a fast line.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.averaging.agreement.messages import Ballot, Standing
from swarm.averaging.agreement.timing import Timing
from swarm.compression.codec import contribution_codec
from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.machine.words import counted
from swarm.training.round_member import RoundMember
from swarm.types import Block, PeerId, PeerRecord, PeerState

logger = logging.getLogger(__name__)

LEAST_SECONDS = 5.0
"""Nothing is concluded from a shorter time, because rounds come in bursts."""
PACE_FACTOR = 4.0
"""The highest pace that the run may have had while this peer was away, as a multiple of the pace of the fastest
round."""
PACE_ROUNDS = 4
"""The run may be ahead by this many rounds, of the largest size seen, in addition to what the pace allows."""
REMEMBERED_ROUNDS = 32
"""The pace is that of the fastest of so many last rounds, so that one burst is not remembered for ever."""
TOLERATED_SECONDS = 5.0
"""A peer stays out if its exchange would take more than this much longer than a whole round of the others."""
LEAST_INTERVALS = 3
"""How many times the group must be seen to begin a new round before the time of its rounds counts as measured. A single
interval may hold a pause, or only the end of a round."""
MOST_INTERVALS = 15
"""How many of these intervals count: the newest ones."""
LEAST_REST_SECONDS = 20.0
"""Least time from one download to the next one that measures the line again."""
REST_FACTOR = 3.0
"""The least pause after a download, as a multiple of the download's time. So a waiting peer uses the others' lines for
at most a quarter of the time."""
FLOAT_BYTES = 4
MOST_ATTEMPTS = 16
"""A leader that has begun so many attempts at a whole round and committed none of them is passed over."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A peer's progress over some time.

    Attributes:
        seconds: the length of that time.
        num_applied: rounds that the peer applied in that time.
        num_committed: rounds that its group committed in that time, as far as the peer knows.
        num_behind: rounds that the peer lacks now.
    """

    seconds: float
    num_applied: int
    num_committed: int
    num_behind: int

    @property
    def is_losing(self) -> bool:
        return self.seconds >= LEAST_SECONDS and self.num_committed > self.num_applied > 0

    @property
    def stands_still(self) -> bool:
        return self.seconds >= LEAST_SECONDS and self.num_committed >= self.num_applied > 0

    @property
    def seconds_left(self) -> float | None:
        """The time until the peer arrives at its present pace; None if that is not known."""
        closer = self.num_applied - self.num_committed
        if self.seconds < LEAST_SECONDS or closer <= 0:
            return None
        return self.num_behind * self.seconds / closer


class RunPace:
    """The fastest pace that this peer has seen lately, and the time since it moved."""

    def __init__(self, own: Standing, clock: Clock) -> None:
        self._clock = clock
        self._own = own
        self._since = self._now()
        self._rounds = deque[tuple[int, float]](maxlen=REMEMBERED_ROUNDS)
        """The samples and seconds of each round."""

    def committed(self, after: Standing) -> None:
        num_samples, seconds = after.run_samples - self._own.run_samples, max(1e-3, self._elapsed())
        self._rounds.append((num_samples, seconds))
        self.moved(after)

    def moved(self, own: Standing) -> None:
        self._own, self._since = own, self._now()

    def allows(self, theirs: Standing) -> bool:
        """Whether a peer can have reached `theirs` since this peer last moved; True as long as no pace was measured."""
        if not self._is_measured:
            return True
        fastest = max(samples / seconds for samples, seconds in self._rounds)
        largest = max(samples for samples, _ in self._rounds)
        num_samples = fastest * PACE_FACTOR * self._elapsed() + PACE_ROUNDS * largest
        return theirs.run_samples - self._own.run_samples <= num_samples and self.allows_round(theirs.round)

    def allows_round(self, number: int) -> bool:
        if not self._is_measured:
            return True
        fastest = max(1.0 / seconds for _, seconds in self._rounds)
        return number - self._own.round <= fastest * PACE_FACTOR * self._elapsed() + PACE_ROUNDS

    @property
    def _is_measured(self) -> bool:
        return any(samples for samples, _ in self._rounds)

    def _elapsed(self) -> float:
        # Some clocks stand still while a machine sleeps, and others may be set back, but the run goes on.
        return max(now - since for now, since in zip(self._now(), self._since, strict=True))

    def _now(self) -> tuple[float, float]:
        return self._clock.monotonic(), self._clock.time()


class Tenure:
    """How long a whole round has been standing under one leader, as one member sees it.

    Whatever the leader says, a round that is whole is to be begun soon, and to be committed some time: in the time of a
    few slow attempts, or after many fast ones.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._of: tuple[Standing, PeerId] | None = None
        self._whole_since: float | None = None
        self._attempts: set[Ballot] = set()

    def restart(self) -> None:
        """Note that the round is not whole, or that it has to wait for another stage."""
        self._whole_since = None

    def idleness(
        self, standing: Standing, leader_id: PeerId, promised: Ballot | None, *, num_bytes: int, now: float
    ) -> str:
        """Note that the round is whole. Returns why its leader is to be passed over; empty if there is no reason.
        `promised` is the last attempt that this member promised. `num_bytes` is the size of this member's
        contribution."""
        if self._of != (standing, leader_id):
            self._of, self._whole_since, self._attempts = (standing, leader_id), None, set()
        if self._whole_since is None:
            self._whole_since = now
        if promised is not None and promised.leader_id == leader_id:
            self._attempts.add(promised)
        seconds, timing = now - self._whole_since, self._timing
        if not self._attempts:
            return f"it has begun no attempt for {seconds:.0f} s" if seconds >= timing.idle_seconds else ""
        if len(self._attempts) >= MOST_ATTEMPTS and seconds >= timing.idle_seconds:
            return f"it has begun {len(self._attempts)} attempts and committed none"
        return f"it has committed nothing for {seconds:.0f} s" if seconds >= timing.busy_seconds(num_bytes) else ""


@dataclass(frozen=True, kw_only=True)
class Slowness:
    """Why a peer stays out: how long its exchange would take, and how long the group's rounds take without it.
    `num_intervals` says how many times the group was seen to begin a new round."""

    exchange_seconds: float
    round_seconds: float
    bytes_per_second: float
    num_intervals: int

    @property
    def is_certain(self) -> bool:
        """Whether the time of the group's rounds is known. Until it is, the peer stays out."""
        return self.num_intervals >= LEAST_INTERVALS

    @property
    def awaited(self) -> str:
        what = f"an exchange would take {self.exchange_seconds:.1f} s over this line"
        if not self.is_certain:
            return f"{LEAST_INTERVALS} rounds to be seen, {self.num_intervals} so far, since {what}"
        return f"a faster line: {what}, and a round takes {self.round_seconds:.1f} s"

    @property
    def in_words(self) -> str:
        line = f"{self.bytes_per_second / 1e6:.3g} MB/s, so an exchange would take {self.exchange_seconds:.1f} s"
        if not self.is_certain:
            return (
                f"this peer fetched the state with {line}, and the others compute a round in {self.round_seconds:.1f} "
                f"s. Before it takes part it waits until it has seen how long rounds really take: the group has gone "
                f"on {counted(self.num_intervals, 'time')} of {LEAST_INTERVALS}"
            )
        return (
            f"this peer cannot take part in a synchronous run over this line: it carries {line}, and a round takes "
            f"{self.round_seconds:.1f} s without this peer. It stays out, follows the group, and measures its line "
            "again now and then; that needs a faster line, here or where it fetches the state, or longer rounds "
            "(rounds.round_samples)"
        )


class Entry:
    """A peer's measurements of its own line and of the group's rounds, while it catches up."""

    def __init__(self, config: RunConfig, peers: Callable[[Block], Sequence[PeerRecord]], member: RoundMember) -> None:
        """`peers` gives the directory's last known view of a block."""
        self._config = config
        self._peers = peers
        self._member = member
        self._codec = contribution_codec(config.averaging)
        self._bytes_per_second = 0.0
        """The highest rate measured so far; 0 before the first measurement. Lower rates may be due to the donor: its
        line may be slower, or busy with its own training."""
        self._look_at = math.inf
        self._group_round = -1
        """The newest round that the group was seen to have reached."""
        self._since = 0.0
        """When the group was first seen in that round."""
        self._intervals = deque[float](maxlen=MOST_INTERVALS)
        """The seconds that each round took, measured whenever the group was seen in a newer round."""
        self._told: Slowness | None = None
        """Why the peer stayed out, at the last call of `keeps_out`; None if it did not."""

    def begin(self) -> None:
        self._bytes_per_second, self._look_at, self._group_round, self._told = 0.0, math.inf, -1, None
        self._intervals.clear()

    def downloaded(self, bytes_per_second: float, *, seconds: float, now: float) -> None:
        """Note the rate of a snapshot's download, and the seconds for which it was being sent."""
        self._bytes_per_second = max(self._bytes_per_second, bytes_per_second)
        self._look_at = now + max(LEAST_REST_SECONDS, REST_FACTOR * seconds)

    def saw(self, group_round: int, *, now: float) -> None:
        if group_round <= self._group_round:
            return
        if self._group_round >= 0:
            self._intervals.append((now - self._since) / (group_round - self._group_round))
        self._group_round, self._since = group_round, now

    def should_measure(self, now: float) -> bool:
        """Whether the last download is so long ago that the line should be measured again."""
        return now >= self._look_at

    def keeps_out(self) -> bool:
        """Whether the peer must stay out, though it is where its group is. A new reason is logged."""
        former, self._told = self._told, self.slowness
        if (told := self._told) is None:
            return False
        if former is None or (former.is_certain, former.bytes_per_second) != (told.is_certain, told.bytes_per_second):
            logger.log(logging.WARNING if told.is_certain else logging.INFO, "%s", told.in_words)
        return True

    @property
    def awaited(self) -> str:
        """What the peer waits for while it stays out; empty if it does not."""
        return "" if self._told is None else self._told.awaited

    @property
    def slowness(self) -> Slowness | None:
        """Why the peer should stay out; None if it may become a member."""
        if not self._config.rounds.synchronous or not self._bytes_per_second:
            return None
        num_elements = self._member.activity().num_bytes // FLOAT_BYTES
        exchange_seconds = self._codec.num_bytes(num_elements) / self._bytes_per_second
        round_seconds, num_intervals = self._computing_seconds(), len(self._intervals)
        if num_intervals >= LEAST_INTERVALS:
            # The median, because a run may pause, and this peer often learns late that a round is over.
            round_seconds = max(round_seconds, statistics.median(self._intervals))
        if exchange_seconds <= round_seconds + TOLERATED_SECONDS:
            return None
        return Slowness(
            exchange_seconds=exchange_seconds,
            round_seconds=round_seconds,
            bytes_per_second=self._bytes_per_second,
            num_intervals=num_intervals,
        )

    def _computing_seconds(self) -> float:
        """Seconds in which the weakest stage computes a round, by its peers' announcements; infinite if a stage has
        measured nothing."""
        seconds = list[float]()
        for block in self._config.blocks:
            serving = [record for record in self._peers(block) if record.state is PeerState.SERVING]
            rate = sum(record.samples_per_second for record in serving)
            seconds.append(self._config.round_samples_of(block) / rate if rate > 0 else math.inf)
        return max(seconds)
