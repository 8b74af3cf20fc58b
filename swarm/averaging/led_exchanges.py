"""The exchanges of an attempt, as its leader asks for them: one among all members, or one in each group and then among
these.

Among more members than `averaging.group_size`, groups are drawn, and each averages by itself. Then one member of each
contributes the group's average to the next exchange, until one exchange is left: its result is the round's, and those
that made it decide it. It goes back by the same ways, so that all members hold the same result. A group in which a
member dies is left out, and its members contribute to the next round. That groups change follows Moshpit SGD (arXiv
2103.03239), in which each group's average is a result of its own. Never touches tensors.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.blame import AttemptFailed, Blame
from swarm.averaging.agreement.group import Ballot
from swarm.averaging.agreement.messages import Standing
from swarm.averaging.agreement.rules import Begun, agreed, drawn_groups
from swarm.averaging.agreement.shares import Counts, Shares, clip_of, divide, prepared_of
from swarm.averaging.agreement.timing import OWNER_PATIENCE, deadline_seconds
from swarm.averaging.roster import Roster
from swarm.averaging.vectors.exchange import given_after
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import AVERAGE, Broadcast, Members, contact_of
from swarm.compression.codec import Codec, contribution_codec
from swarm.config import RunConfig
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.tally import Given
from swarm.types import PeerId

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    members: Members
    begun: Begun
    standing: Standing
    ballot: Ballot
    amended: str
    config: RunConfig

    @property
    def codec(self) -> Codec:
        return contribution_codec(self.config.averaging)


@dataclass(eq=False)
class LedExchanges:
    context: Context
    roster: Roster
    broadcast: Broadcast
    blame: Blame
    vector_bytes: int = field(default=0, init=False)
    """The size of a contribution in float32, once one was exchanged."""
    _seconds: float = field(default=0.0, init=False)
    """How long the last exchange took."""

    async def run(
        self, members: Members, begun: Begun, standing: Standing, ballot: Ballot, amended: str
    ) -> tuple[pb.Prepared, list[PeerId]]:
        """Have the members that began an attempt average, under the amendments up to `amended`. Returns the result,
        which is decided, and the members that hold it. Raises AttemptFailed if nothing is decided."""
        size = self.context.config.averaging.group_size
        config = self.context.timeline.under(amended)
        attempt = _Attempt(
            members=members, begun=begun, standing=standing, ballot=ballot, amended=amended, config=config
        )
        units = [_Unit(peer_id=peer, counts=reply) for peer, reply in sorted(begun.items())]
        while 0 < size < len(units):
            units = await self._in_groups(attempt, units, size)
        results = await self._exchange(attempt, units)
        prepared = messages.unsigned(agreed(results, self.context.own_id))
        self.blame.exchanged([peer for unit in units for peer in unit.member_ids])
        held = await self._hand_down(attempt, units, prepared, results)
        if 2 * len(held) <= len(prepared.member_ids):
            # If few committed it, and the leader died then, most would go on from where they are.
            raise self.blame.failure("the result did not reach most of its members", {})
        return messages.signed_by_all(prepared, held.values()), list(held)

    # -- one exchange --------------------------------------------------------------------------------------------------

    async def _exchange(
        self, attempt: _Attempt, units: Sequence[_Unit], *, is_part: bool = False
    ) -> dict[PeerId, pb.Prepared]:
        """Returns the result as each one has it: with the same digest, and with its own word for the norm."""
        started_at, names = self.context.clock.monotonic(), [unit.peer_id for unit in units]
        are_groups = any(unit.units for unit in units)
        is_whole = not is_part and not are_groups
        through_one = is_whole and self.blame.goes_through_one(attempt.standing.round, names)
        counts = {unit.peer_id: unit.counts for unit in units}
        shares = divide(
            {peer: counts[PeerId(peer)] for peer in self.blame.suspects.in_order(counts, attempt.standing.round)},
            num_elements=units[0].counts.num_elements,
            tile=attempt.codec.tile,
            clip_to_median=clip_of(attempt.config),
            only_owner=self.context.own_id if through_one else None,
        )
        shares = replace(shares, amended=attempt.amended)
        self.vector_bytes = 4 * shares.num_elements
        request = self._request(attempt, shares, num_times=2 * (len(units) - 1) if through_one else 4)
        request.is_part = is_part
        given = {peer: gave for unit in units for peer, gave in unit.given.items()}
        if are_groups:
            request.member_ids.extend(sorted(given))
            request.given.extend(messages.pack_given(given, request.member_ids))
        replies = await self._ask(attempt, request)
        given = given_after(given, shares, attempt.config.averaging)
        results = {
            peer: messages.signed_by_all(prepared_of(request, shares, told.digest, told.squared_norm, given), [told])
            for peer, told in _results(replies).items()
        }
        digests = {peer: prepared.digest for peer, prepared in results.items()}
        if len(results) < len(units):
            took_long = self.context.clock.monotonic() - started_at >= OWNER_PATIENCE * request.timeout_seconds
            number = attempt.standing.round
            raise self.blame.failed_exchange(replies, names, number, attempt.ballot, took_long=took_long)
        if len(set(digests.values())) > 1:
            raise self.blame.different_results(digests)
        self._seconds = self.context.clock.monotonic() - started_at
        return results

    def _request(self, attempt: _Attempt, shares: Shares, *, num_times: int = 4) -> pb.AverageRequest:
        """A call for an exchange in which a line carries the vector so many times at worst. Four times, if every member
        sends the whole vector and gets it back, and all of that goes over one line."""
        floor_seconds = self.context.timing.exchange_seconds(num_times * attempt.codec.num_bytes(shares.num_elements))
        return pb.AverageRequest(
            address=self.context.address,
            peer_id=self.context.own_id,
            round=attempt.standing.round,
            ballot=messages.pack_ballot(attempt.ballot),
            shares=[
                pb.Share(
                    contact=contact_of(attempt.members[PeerId(share.peer_id)]),
                    num_samples=share.counts.num_samples,
                    num_targets=share.counts.num_targets,
                    round_samples=share.counts.round_samples,
                    norm=share.counts.norm,
                    num_elements=share.num_elements,
                )
                for share in shares.members
            ],
            timeout_seconds=deadline_seconds(floor_seconds, self._seconds, self.blame.num_timeouts),
        )

    async def _ask(self, attempt: _Attempt, request: pb.AverageRequest) -> dict[PeerId, Any]:
        asked = [PeerId(share.contact.peer_id) for share in request.shares]
        replies = await self.broadcast(
            {peer: attempt.members[peer] for peer in asked},
            AVERAGE,
            dict.fromkeys(asked, request),
            request.timeout_seconds + self.context.timing.grace_seconds,
            until=_is_prepared,
        )
        return {peer: messages.checked_average(reply) for peer, reply in replies.items()}

    # -- groups --------------------------------------------------------------------------------------------------------

    async def _in_groups(self, attempt: _Attempt, units: Sequence[_Unit], size: int) -> list[_Unit]:
        """Let groups of so many average. Returns those in which nobody died. Raises AttemptFailed if one failed for
        another reason, so that the next attempt goes on without the members at fault; or if the groups that are left
        have not most members and samples, because those that are left out go on from where they are."""
        by_id = {unit.peer_id: unit for unit in units}
        seed = f"{attempt.standing.lineage} {attempt.ballot.attempt}"
        drawn = drawn_groups({peer: unit.counts.num_samples > 0 for peer, unit in by_id.items()}, size, seed)
        async with asyncio.TaskGroup() as tasks:
            averaging = [tasks.create_task(self._group(attempt, [by_id[peer] for peer in group])) for group in drawn]
        ended = [task.result() for task in averaging]
        left = [unit for unit in ended if isinstance(unit, _Unit)]
        for failed in ended:
            if isinstance(failed, AttemptFailed):
                if not (_are_most(attempt.begun, left) and self._is_of_a_death(attempt, failed)):
                    raise failed
                logger.info("round %d goes on without a group: %s", attempt.standing.round, failed)
        return left

    async def _group(self, attempt: _Attempt, units: Sequence[_Unit]) -> _Unit | AttemptFailed:
        try:
            results = await self._exchange(attempt, units, is_part=True)
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

    def _is_of_a_death(self, attempt: _Attempt, failed: AttemptFailed) -> bool:
        """Whether an exchange failed because a member died, or vanished. Another member at fault would be so again."""
        return bool(failed.unreachable or failed.excluded & self.roster.overdue(attempt.standing))

    async def _hand_down(
        self, attempt: _Attempt, units: Sequence[_Unit], prepared: pb.Prepared, held: Mapping[PeerId, pb.Prepared]
    ) -> dict[PeerId, pb.Prepared]:
        """Let the members that hold the result give it to their groups. Returns it as each that holds it then has
        signed it. The others find themselves behind, and download it."""
        async with asyncio.TaskGroup() as tasks:
            handing = [tasks.create_task(self._hand_to(attempt, unit, prepared, held)) for unit in units]
        return {peer: signed for task in handing for peer, signed in task.result().items()}

    async def _hand_to(
        self, attempt: _Attempt, unit: _Unit, prepared: pb.Prepared, held: Mapping[PeerId, pb.Prepared]
    ) -> dict[PeerId, pb.Prepared]:
        if not unit.units:
            return {unit.peer_id: held[unit.peer_id]}
        counts: dict[str, pb.BeginReply] = {}
        for each in unit.units:
            counts[each.peer_id] = pb.BeginReply(bytes_per_second=each.counts.bytes_per_second)
        # It is an exchange in which one member alone has a contribution, of whatever weight.
        counts[unit.peer_id].num_samples = counts[unit.peer_id].num_targets = 1
        num_elements, tile = unit.counts.num_elements, attempt.codec.tile
        shares = divide(counts, num_elements=num_elements, tile=tile, clip_to_median=0.0)
        request = self._request(attempt, shares)
        request.handed_down.CopyFrom(prepared)
        held = _results(await self._ask(attempt, request)) | {unit.peer_id: held[unit.peer_id]}
        return await self._hand_down(attempt, [each for each in unit.units if each.peer_id in held], prepared, held)


def _results(replies: Mapping[PeerId, Any]) -> dict[PeerId, pb.Prepared]:
    return {peer: reply.prepared for peer, reply in replies.items() if _is_prepared(reply)}


def _is_prepared(reply: Any) -> bool:
    return isinstance(reply, pb.AverageReply) and reply.HasField("prepared")


def _are_most(begun: Begun, units: Sequence[_Unit]) -> bool:
    """Whether groups have most of the members that began an attempt, and of their samples."""
    members = [peer for unit in units for peer in unit.member_ids]
    samples = [begun[peer].round_samples for peer in members]
    return 2 * len(members) > len(begun) and 2 * sum(samples) > sum(reply.round_samples for reply in begun.values())
