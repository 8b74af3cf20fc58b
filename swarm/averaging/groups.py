"""Rounds in groups: where there are more members than `averaging.group_size`, each group averages by itself, and then
the groups.

One member of each group contributes the group's average to the next exchange, until one exchange is left: its result is
the round's, and those that made it decide it. It goes back by the same ways, so that all members hold the same result.
A group in which a member dies is left out, and its members contribute to the next round. That groups change follows
Moshpit SGD (arXiv 2103.03239), in which each group's average is a result of its own. Never touches tensors.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.blame import AttemptFailed, Blame
from swarm.averaging.agreement.messages import Ballot, Standing
from swarm.averaging.agreement.place import Begun
from swarm.averaging.agreement.rules import agreed
from swarm.averaging.agreement.shares import Counts, Shares, divide
from swarm.averaging.roster import Roster
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.tally import Given
from swarm.types import PeerId

logger = logging.getLogger(__name__)

Results = dict[PeerId, pb.Prepared]
"""The result of an exchange, as each one has it: with the same digest, and with its own word for the norm."""


class Exchange(Protocol):
    """One exchange; see Round."""

    async def __call__(
        self, begun: Begun, given: Mapping[str, Given] | None = None, *, is_part: bool = False
    ) -> Results: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
    """A member, or a group that has averaged, in the next exchange.

    Attributes:
        peer_id: the member that takes part for the group.
        counts: what it contributes there.
        units: those that the group consists of; none for a single member.
        given: of a group: what each of its members has given so far.
    """

    peer_id: PeerId
    counts: pb.BeginReply
    units: Sequence["_Unit"] = ()
    given: Mapping[str, Given] = field(default_factory=dict)

    @property
    def member_ids(self) -> list[PeerId]:
        return [peer for unit in self.units for peer in unit.member_ids] or [self.peer_id]


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The exchanges of one attempt of more members than a group has.

    Attributes:
        begun: the answers of the members that began the attempt.
        size: the most members of a group.
        standing: where the members stand.
        tile: see divide.
        exchange: has members exchange.
        hand_down: has the one member with a contribution give the others of an exchange the result. Returns it as they
            have it.
    """

    begun: Begun
    size: int
    standing: Standing
    tile: int
    exchange: Exchange
    hand_down: Callable[[Shares, pb.Prepared], Awaitable[Results]]
    roster: Roster
    blame: Blame

    async def average(self, ballot: Ballot) -> tuple[pb.Prepared, Results]:
        """Returns the result of an attempt, which is decided, and the same as each member that holds it has signed it.
        Raises AttemptFailed if nothing is decided."""
        units = [_Unit(peer_id=peer, counts=reply) for peer, reply in self.begun.items()]
        while self.size < len(units):
            units = await self._in_groups(units, seed=f"{self.standing.lineage} {ballot.attempt}")
        results = await self._exchange(units)
        prepared = messages.unsigned(agreed(results, PeerId(ballot.leader_id)))
        self.blame.exchanged([peer for unit in units for peer in unit.member_ids])
        held = await self._hand_down(units, prepared, results)
        if 2 * len(held) <= len(prepared.member_ids):
            # If few committed it, and the leader died then, most would go on from where they are.
            raise self.blame.failure("the result did not reach most of its members", {})
        return prepared, held

    async def _exchange(self, units: Sequence[_Unit], *, is_part: bool = False) -> Results:
        given = {peer: gave for unit in units for peer, gave in unit.given.items()}
        return await self.exchange({unit.peer_id: unit.counts for unit in units}, given, is_part=is_part)

    async def _in_groups(self, units: Sequence[_Unit], seed: str) -> list[_Unit]:
        """Let groups average. Returns those in which nobody died. Raises AttemptFailed if one failed for another
        reason, so that the next attempt goes on without the members at fault; or if the groups that are left have not
        most members and samples, because those that are left out go on from where they are."""
        by_id = {unit.peer_id: unit for unit in units}
        drawn = _drawn({peer: unit.counts.num_samples > 0 for peer, unit in by_id.items()}, self.size, seed)
        async with asyncio.TaskGroup() as tasks:
            averaging = [tasks.create_task(self._group([by_id[peer] for peer in group])) for group in drawn]
        ended = [task.result() for task in averaging]
        left = [unit for unit in ended if isinstance(unit, _Unit)]
        for failed in ended:
            if isinstance(failed, AttemptFailed):
                if not (self._are_most(left) and self._is_of_a_death(failed)):
                    raise failed
                logger.info("round %d goes on without a group: %s", self.standing.round, failed)
        return left

    async def _group(self, units: Sequence[_Unit]) -> _Unit | AttemptFailed:
        try:
            results = await self._exchange(units, is_part=True)
        except AttemptFailed as failed:
            return failed
        fastest = max(units, key=lambda unit: unit.counts.bytes_per_second)
        norm = results[fastest.peer_id].squared_norm ** 0.5
        total = Counts.total([Counts.of(unit.counts, 0.0) for unit in units], norm)
        counts = pb.BeginReply(
            num_samples=total.num_samples, num_targets=total.num_targets, round_samples=total.round_samples,
            norm=total.norm, num_elements=fastest.counts.num_elements, bytes_per_second=fastest.counts.bytes_per_second,
        )  # fmt: skip
        given = messages.unpack_given(results[fastest.peer_id])
        return _Unit(peer_id=fastest.peer_id, counts=counts, units=units, given=given)

    def _are_most(self, units: Sequence[_Unit]) -> bool:
        """Whether groups have most of the members that began the attempt, and of their samples."""
        members = [peer for unit in units for peer in unit.member_ids]
        samples = sum(self.begun[peer].round_samples for peer in members)
        return 2 * len(members) > len(self.begun) and 2 * samples > sum(
            reply.round_samples for reply in self.begun.values()
        )

    def _is_of_a_death(self, failed: AttemptFailed) -> bool:
        """Whether an exchange failed because a member died, or vanished. Another member at fault would be so again."""
        return bool(failed.unreachable or failed.excluded & self.roster.overdue())

    async def _hand_down(self, units: Sequence[_Unit], prepared: pb.Prepared, held: Results) -> Results:
        """Let the members that hold the result give it to their groups. Returns it as each that holds it then has
        signed it. The others find themselves behind, and download it."""
        async with asyncio.TaskGroup() as tasks:
            handing = [tasks.create_task(self._hand_to(unit, prepared, held)) for unit in units]
        return {peer: signed for task in handing for peer, signed in task.result().items()}

    async def _hand_to(self, unit: _Unit, prepared: pb.Prepared, held: Results) -> Results:
        if not unit.units:
            return {unit.peer_id: held[unit.peer_id]}
        counts: dict[str, pb.BeginReply] = {}
        for each in unit.units:
            counts[each.peer_id] = pb.BeginReply(bytes_per_second=each.counts.bytes_per_second)
        # It is an exchange in which one member alone has a contribution, of whatever weight.
        counts[unit.peer_id].num_samples = counts[unit.peer_id].num_targets = 1
        shares = divide(counts, num_elements=unit.counts.num_elements, tile=self.tile, clip_to_median=0.0)
        held = await self.hand_down(shares, prepared) | {unit.peer_id: held[unit.peer_id]}
        return await self._hand_down([each for each in unit.units if each.peer_id in held], prepared, held)


def _drawn(has_samples: Mapping[PeerId, bool], size: int, seed: str) -> list[list[PeerId]]:
    """Divide members into groups of `size` at most, which differ from seed to seed. Each group has a member with
    samples; so with very few of these the groups are larger."""
    order = sorted(has_samples, key=lambda peer: (not has_samples[peer], sha256(f"{seed} {peer}".encode()).digest()))
    number = min(math.ceil(len(order) / size), max(1, sum(has_samples.values())))
    return [order[first::number] for first in range(number)]
