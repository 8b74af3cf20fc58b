"""How the rounds of one stage end while its members die, from ten to ten thousand, and what groups would change.

`one_group` is how rounds are averaged by default, and `groups` with `averaging.group_size`: members average in groups,
then one of each group among groups, and the result is handed down, so that all get the same one. The other ways are not
built: with `mended` a death does not void an exchange; with `moshpit` each group has a result of its own, and groups
are drawn anew for every round (arXiv 2103.03239). A round is a handful of draws here, without messages; only the
division of a vector among the members' lines is the real one.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from scripts.benches.shared.common import OutputOptions
from swarm.averaging.agreement.shares import part_sizes
from swarm.averaging.agreement.timing import Timing

CONTRIBUTION_BYTES = 32_000_000
LINE_BYTES_PER_SECOND, LINE_SPREAD = 12.5e6, 0.5
"""A typical member's line, and the standard deviation of its logarithm: the spread of speeds in the study `routing`."""
ROUND_SECONDS = 60.0  # How long a round is trained; deaths are given for this time
BOUND_SECONDS = 60.0  # A round whose end takes no longer than this counts as committed
GIVE_UP_SECONDS = 600.0  # A round that has not ended after this time is not looked at any longer
NOTICE_SECONDS = Timing.fresh_seconds  # From a silent death until it is noticed
RETRY_SECONDS = Timing.retry_seconds
STREAM_SECONDS = 0.002  # What a stream to one other member takes of a member's time, besides its bytes
TILE = 4096

Grouped = TypeVar("Grouped")


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """How a stage's rounds end while members die: in one group, and in groups."""

    num_members: tuple[int, ...] = (10, 100, 1000, 10000)
    """The sizes of the stage."""
    failure_percent: tuple[float, ...] = (0.2, 0.4, 1.0)
    """Per cent of the members that die in a minute."""
    group_size: int = 32
    """The members of a group, where there are groups."""
    num_rounds: int = 200
    """Rounds that are simulated in each setting; of a thousand members and more so many fewer, but at least ten."""
    seed: int = 0
    """The seed of all that is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.num_members) < 2 or self.group_size < 2 or self.num_rounds < 1:
            raise ValueError("there must be at least 2 members, 2 in a group, and one round")


@dataclass(frozen=True, kw_only=True)
class Member:
    line: float  # Bytes per second
    dies_at: float  # In seconds since the round's end began; infinite if it does not die


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a round ended for some members."""

    seconds: float
    num_attempts: int
    members: tuple[Member, ...]  # Those whose contributions are in the result


def run(options: Options) -> dict[str, Any]:
    return {
        "settings": [
            {
                "num_members": size,
                "failure_percent": percent,
                **{way: _figures(options, way, size, percent) for way in WAYS},
            }
            for size in options.num_members
            for percent in options.failure_percent
        ],
        "moshpit_replicas_differ": _difference(options, random.Random(options.seed)),
    }


def _figures(options: Options, way: str, size: int, percent: float) -> Mapping[str, float]:
    rng = random.Random(f"{options.seed} {size} {percent}")
    seconds, attempts, shares = list[float](), list[int](), list[float]()
    for _ in range(max(min(10, options.num_rounds), options.num_rounds * 100 // max(100, size))):
        ended = WAYS[way](_draw(rng, size, percent / 100 / ROUND_SECONDS), options.group_size)
        seconds += [one.seconds for one in ended]
        attempts += [one.num_attempts for one in ended]
        shares.append(sum(len(one.members) for one in ended) / size)
    ordered = sorted(seconds)
    return {
        "committed_percent": 100.0 * sum(each <= BOUND_SECONDS for each in seconds) / len(seconds),
        "attempts": statistics.fmean(attempts),
        "p50_seconds": ordered[len(ordered) // 2],
        "p90_seconds": ordered[len(ordered) * 9 // 10],
        "took_part_percent": 100.0 * statistics.fmean(shares),
    }


def _draw(rng: random.Random, size: int, per_second: float) -> list[Member]:
    return [
        Member(
            line=LINE_BYTES_PER_SECOND * rng.lognormvariate(0.0, LINE_SPREAD),
            dies_at=rng.expovariate(per_second) if per_second else math.inf,
        )
        for _ in range(size)
    ]


def exchange_seconds(lines: Sequence[float], num_bytes: int, *, sender: int | None = None) -> float:
    """How long these members need to sum a vector of so many bytes, and to give each of them the sum. With a `sender`
    that one alone has a vector, and hands it down to the others."""
    if len(lines) < 2:
        return 0.0
    parts = part_sizes(num_bytes, lines, tile=TILE)
    sending = max(
        (num_bytes * (sender in (None, index)) + (len(lines) - 2) * part) / line
        for index, (part, line) in enumerate(zip(parts, lines, strict=True))
    )
    return sending + STREAM_SECONDS * len(lines)


# -- the ways ----------------------------------------------------------------------------------------------------------


def one_group(members: Sequence[Member], group_size: int = 0) -> list[Ended]:
    """Attempts, each without the members that have died, until nobody dies in one."""
    alive, now, number = list(members), 0.0, 0
    while now <= GIVE_UP_SECONDS:
        number += 1
        seconds = exchange_seconds([member.line for member in alive], CONTRIBUTION_BYTES)
        death = min(member.dies_at for member in alive)
        if death > now + seconds or len(alive) == 1:
            return [Ended(seconds=now + seconds, num_attempts=number, members=tuple(alive))]
        now = death + NOTICE_SECONDS + RETRY_SECONDS
        alive = [member for member in alive if member.dies_at > now - RETRY_SECONDS] or alive[:1]
    return [Ended(seconds=now, num_attempts=number, members=())]


def mended(members: Sequence[Member], group_size: int = 0) -> list[Ended]:
    """One group, in which a death does not void the exchange. The owner of each part sums what came in time, and in
    place of an owner that died another member sums that part, whose contributions all others still have."""
    ends = exchange_seconds([member.line for member in members], CONTRIBUTION_BYTES)
    again = exchange_seconds([LINE_BYTES_PER_SECOND] * len(members), CONTRIBUTION_BYTES) / len(members)
    deaths = [member.dies_at for member in members if member.dies_at <= ends]
    last = max([ends, *(death + NOTICE_SECONDS + RETRY_SECONDS + again for death in deaths)])
    return [Ended(seconds=last, num_attempts=1, members=tuple(member for member in members if member.dies_at > last))]


def moshpit(members: Sequence[Member], group_size: int) -> list[Ended]:
    """Each group for itself."""
    return [ended for group in _groups(members, group_size) for ended in one_group(group)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """A member, or a group that has averaged, for which one member takes part in the next exchange."""

    member: Member
    units: Sequence["Unit"] = ()

    @property
    def members(self) -> list[Member]:
        return [member for unit in self.units for member in unit.members] or [self.member]


def groups(members: Sequence[Member], group_size: int) -> list[Ended]:
    """Groups average, then groups of groups, until one exchange is left; its result is handed down the same ways. A
    group in which a member dies is left out, unless too few are left: then there is another attempt. Whoever the result
    does not reach downloads it."""
    if len(members) <= group_size:
        return one_group(members)
    alive, now, number = list(members), 0.0, 0
    while now <= GIVE_UP_SECONDS:
        number += 1
        units = [Unit(member=member) for member in alive]
        while len(units) > 1:
            averaged = [_averaged(group, now) for group in _groups(units, group_size)]
            now = max(seconds for _, seconds in averaged)
            units = [unit for unit, _ in averaged if unit is not None]
        took_part = units[0].members if units else []
        if 2 * len(took_part) > len(alive):
            end = max(_handed_down(unit, now) for unit in units[0].units)
            return [Ended(seconds=end, num_attempts=number, members=tuple(took_part))]
        now += RETRY_SECONDS
        alive = [member for member in alive if member.dies_at > now - NOTICE_SECONDS] or alive[:1]
    return [Ended(seconds=now, num_attempts=number, members=())]


def _averaged(units: Sequence[Unit], begins: float) -> tuple[Unit | None, float]:
    """A group's average, and when it is there; None, and when that is noticed, if a member died."""
    members = [unit.member for unit in units]
    ends = begins + exchange_seconds([member.line for member in members], CONTRIBUTION_BYTES)
    death = min(member.dies_at for member in members)
    if death <= ends:
        return None, max(begins, death) + NOTICE_SECONDS
    return Unit(member=max(members, key=lambda member: member.line), units=units), ends


def _handed_down(unit: Unit, begins: float) -> float:
    """When the last member of a unit has the result that its own member has."""
    if not unit.units:
        return begins
    members = [each.member for each in unit.units]
    lines = [member.line for member in members]
    ends = begins + exchange_seconds(lines, CONTRIBUTION_BYTES, sender=members.index(unit.member))
    death = min(member.dies_at for member in members)
    if death <= ends:
        ends = max(begins, death) + NOTICE_SECONDS + CONTRIBUTION_BYTES / min(lines)
    return max(_handed_down(each, ends) for each in unit.units)


WAYS: dict[str, Callable[[Sequence[Member], int], list[Ended]]] = {
    "one_group": one_group, "groups": groups, "mended": mended, "moshpit": moshpit,
}  # fmt: skip


def _groups(members: Sequence[Grouped], group_size: int) -> list[Sequence[Grouped]]:
    """Groups of equal sizes, or nearly, of at most `group_size`; members are drawn in no order."""
    number = math.ceil(len(members) / group_size)
    return [members[first::number] for first in range(number)]


def _difference(options: Options, rng: random.Random) -> Mapping[str, float]:
    """By how much replicas differ after a round of groups, over what one of them moved in that round (its standard
    deviation among them). With the other ways they are equal."""
    found = {}
    for size in options.num_members:
        values = [0.0] * size
        for _ in range(20):
            values = [value + rng.gauss(0.0, 1.0) for value in values]
            rng.shuffle(values)
            means = [(len(group), statistics.fmean(group)) for group in _groups(values, options.group_size)]
            values = [mean for length, mean in means for _ in range(length)]
        found[str(size)] = statistics.pstdev(values)
    return found
