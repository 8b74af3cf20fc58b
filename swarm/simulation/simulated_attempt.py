"""A leader's attempt at a round, in virtual time: Begin to all, Average to all, Commit to all, or Abort.

Used by simulated_member. The real functions decide when a round is complete, what an earlier attempt left, and which
member owns which part. The order of the calls is as in averaging/leading/leader, and a leader waits for the same
members as in averaging/leading/broadcast. There are no deadlines, because no member is slow, and no other stages.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarm.averaging import messages
from swarm.averaging.exchanging.shares import Offer, divide
from swarm.averaging.leading.group import Ballot
from swarm.averaging.leading.rules import unfinished
from swarm.averaging.messages import Standing
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.simulation.simulated_exchange import SimulatedExchange, exchange_seconds
from swarm.simulation.simulated_participant import TIMING, Network, SimulatedParticipant
from swarm.types import PeerId


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Nothing was decided."""

    silent: Collection[PeerId]
    """Members that gave no sign of life."""
    refusals: Mapping[PeerId, pb.Refusal]
    """Of members that did not begin."""


IsComplete = Callable[[int, Collection[int], int], bool]
"""averaging/leading/rules.is_complete, with a run's configuration."""


class SimulatedAttempt:
    """A leader's way from Begin to Commit or Abort, as in averaging/leading/leader."""

    def __init__(
        self,
        network: Network[Any],
        leader: SimulatedParticipant,
        ballot: Ballot,
        members: Collection[PeerId],
        *,
        is_complete: IsComplete,
        payload_bytes: int,
        ended: Callable[[], object],
        failed: Callable[[Failure], object],
    ) -> None:
        self._network = network
        self._leader = leader
        self._standing = standing = leader.standing
        self._ballot = ballot
        self._members = members
        self._is_complete = is_complete
        self._payload_bytes = payload_bytes
        self._ended = ended
        self._failed = failed
        _Broadcast(
            network, leader, members, lambda member, answer: answer(member.begin(standing, ballot)), self._when_begun
        )

    def _when_begun(self, replies: dict[PeerId, pb.BeginReply], silent: Collection[PeerId]) -> None:
        refusals = {peer_id: reply.refusal for peer_id, reply in replies.items() if reply.HasField("refusal")}
        if refusals or not self._leader.has_quorum(replies.keys()):
            self._fail(silent, refusals)
            return
        earlier = unfinished(replies)
        if earlier is not None:
            self._commit(earlier, [p for p, reply in replies.items() if reply.prepared.digest == earlier.digest])
            return
        num_samples = sum(reply.num_samples for reply in replies.values())
        if not self._is_complete(self._standing.round, (), num_samples):
            self._fail(silent, void=True)
            return
        shares = divide(
            [
                Offer(
                    peer_id=peer_id,
                    num_samples=reply.num_samples,
                    round_samples=reply.num_samples,
                    norm=1.0,
                    bytes_per_second=reply.bytes_per_second,
                )
                for peer_id, reply in sorted(replies.items())
            ],
            num_elements=self._payload_bytes,
            tile=1,
            clip_to_median=0.0,
        )
        seconds = exchange_seconds(shares, {p: reply.bytes_per_second for p, reply in replies.items()})
        exchange = SimulatedExchange(self._network.timeline, self._standing, self._ballot, shares, seconds)
        _Broadcast(
            self._network,
            self._leader,
            replies.keys(),
            lambda member, answer: member.join(self._ballot, exchange, answer),
            self._when_averaged,
            needs_all=True,
        )

    def _when_averaged(self, replies: dict[PeerId, pb.Prepared | None], silent: Collection[PeerId]) -> None:
        prepared = next(iter(replies.values()), None)
        if silent or prepared is None or None in replies.values():
            self._fail(silent)
        else:
            self._commit(prepared, replies.keys())

    def _commit(self, prepared: pb.Prepared, holders: Collection[PeerId]) -> None:
        outcome = pb.Outcome(round=self._standing.round, prepared=prepared)
        after = Standing(
            run_samples=self._standing.run_samples + prepared.num_samples,
            round=self._standing.round + 1,
            lineage=messages.lineage_after(self._standing.lineage, outcome),
        )

        def commit(member: SimulatedParticipant, answer: Callable[[bool], object]) -> None:
            member.commit(self._standing.round, prepared, after)
            answer(True)

        _Broadcast(self._network, self._leader, holders, commit, lambda *_: self._ended())

    def _fail(
        self, silent: Collection[PeerId], refusals: Mapping[PeerId, pb.Refusal] | None = None, *, void: bool = False
    ) -> None:
        def abort(member: SimulatedParticipant, answer: Callable[[bool], object]) -> None:
            member.abort(self._standing.round, self._ballot, void=void)
            answer(True)

        def then(_: dict[PeerId, bool], more: Collection[PeerId]) -> None:
            self._failed(Failure(silent={*silent, *more}, refusals=refusals or {}))

        _Broadcast(self._network, self._leader, sorted(set(self._members) - set(silent)), abort, then)


class _Broadcast:
    """One call to many, as in averaging/leading/broadcast: members that are silent are not waited for."""

    def __init__(
        self,
        network: Network[Any],
        leader: SimulatedParticipant,
        peers: Collection[PeerId],
        call: Callable[[SimulatedParticipant, Callable[[Any], object]], object],
        then: Callable[[dict[PeerId, Any], Collection[PeerId]], object],
        *,
        needs_all: bool = False,
    ) -> None:
        """
        Args:
            needs_all: once a member is silent, or an answer is None, the others get only a moment more.
        """
        self._network = network
        self._leader = leader
        self._then = then
        self._needs_all = needs_all
        self._pending = {peer_id: network.members.get(peer_id) for peer_id in peers}
        self._replies: dict[PeerId, Any] = {}
        self._silent: set[PeerId] = set()
        self._since = network.timeline.monotonic()
        self._is_over = self._is_ending = False
        for peer_id in peers:
            network.send(leader, peer_id, lambda member: call(member, partial(self._answer, member)))
        network.timeline.after(TIMING.heartbeat_seconds, self._watch)

    def _answer(self, member: SimulatedParticipant, reply: Any) -> None:
        self._network.send(member, self._leader.peer_id, lambda _: self._answered(member.peer_id, reply))

    def _answered(self, peer_id: PeerId, reply: Any) -> None:
        if peer_id in self._pending:
            del self._pending[peer_id]
            self._replies[peer_id] = reply
            self._check(fails=reply is None)

    def _watch(self) -> None:
        if self._is_over or self._leader.is_gone:
            return
        self._network.timeline.after(TIMING.heartbeat_seconds, self._watch)
        # Of one that is back already the connection broke.
        members = self._network.members
        silent = {p for p, called in self._pending.items() if members.get(p, called) is not called}
        if self._network.timeline.monotonic() - self._since >= TIMING.fresh_seconds:
            silent |= self._pending.keys() - self._leader.roster.alive()
        if silent:
            self._pending = {p: called for p, called in self._pending.items() if p not in silent}
            self._silent |= silent
            self._check(fails=True)

    def _check(self, *, fails: bool) -> None:
        if not self._pending:
            self._end()
        elif fails and self._needs_all and not self._is_ending:
            self._is_ending = True
            self._network.timeline.after(TIMING.grace_seconds, self._end)

    def _end(self) -> None:
        if not self._is_over and not self._leader.is_gone:
            self._is_over = True
            self._then(self._replies, self._silent)
