"""Asks the other peers of a run for their rounds. A peer that starts needs them to choose its first state.

It collects what peers say, and decides nothing.
"""

import asyncio
import dataclasses
import logging
import math
import random
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from peers.shared.network import LOOK_SECONDS, KnownPeers, Membership
from swarm.config import RunConfig
from swarm.errors import Fatal, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.model.stages import tied_stages
from swarm.routing.poll import Poll
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.run_rounds import RunRounds
from swarm.types import Block, PeerRecord

logger = logging.getLogger(__name__)

ASKED_PER_STAGE = 8
"""How many peers of each other stage are asked for its round."""
SETTLE_SECONDS = 30.0
"""How long a peer with a checkpoint waits for others to start serving, or to commit the same round."""
RETURN_SECONDS = 60.0
"""How long a peer waits for peers that held its stage and are no longer announced. They may only be frozen."""
SILENT_SECONDS = 120.0
"""How long a peer waits for peers that are announced and never answer. A frozen one is announced for some 20 s. One
that is announced for longer is cut off from here, or does not exist."""
_SILENT = "announced but silent: waiting for an answer, or until it is no longer announced"
_LEAVING = "which still holds it: waiting until it is gone, or stays"


@dataclass(frozen=True, kw_only=True)
class Others:
    """The rounds at which the peers that answer are.

    Attributes:
        held_at: the round of the peers that hold our block; None if no such peer answers.
        rounds: the round of each other block.
        latest: the newest round of the run; 0 where no peer answers.
        samples: the samples that our block has when the run is at that round.
        repeating: the blocks of which some peer at the block's round also took part in committing the round before.
            Such a peer still has the weights of the round before.
        has_begun: whether a peer that answered has been given microbatches.
        silent: names of peers that held our block a moment ago, and when they were last heard of; empty if there are
            none.
    """

    held_at: int | None = None
    rounds: Mapping[Block, int] = field(default_factory=dict)
    latest: int = 0
    samples: int = 0
    repeating: frozenset[Block] = frozenset()
    has_begun: bool = False
    silent: str = ""


@dataclass(frozen=True, kw_only=True)
class _Awaited:
    """Peers whose answer has to be waited for: the log line that names them begins with `what` and ends with `why`.
    `fault` is why a peer that gives up waiting for them cannot begin."""

    peers: Sequence[PeerRecord]
    what: str
    why: str
    fault: str


async def find_others(
    membership: Membership, block: Block, *, patient: bool, gives_up: bool = False, needs_holder: bool = False,
    own: Mapping[Block, pb.DescribeReply] | None = None,
) -> Others:  # fmt: skip
    """Ask the announced peers at which rounds they are.

    This waits while holders of the stage are announced and do not answer: they may be frozen, or cut off from here, and
    a stage must not begin anew beside them. It also waits while a holder is leaving, because the holder may still write
    its last checkpoint, or may stay if no other peer has the state. And it waits while peers of other stages are
    announced in a run that has gone on, and none of them answers: without an answer the run's round is not known. A
    peer that died is no longer announced after some seconds. Those that are still announced after SILENT_SECONDS do not
    count any more, because anybody can announce a peer that does not exist.

    A `patient` peer waits, up to SETTLE_SECONDS, until a peer serves and the stages that commit together are at one
    round. One that `gives_up` waits as long at most for peers that are silent or leaving, and then raises
    PeerUnavailable. One that `needs_holder`, since it can get its state only from one, waits up to RETURN_SECONDS for
    the return of a holder that is no longer announced. `own` is what this very process says of other stages that it
    serves. Raises Fatal if the run has gone on, and no peer of it has answered.
    """
    config, known, clock = membership.config, membership.known, membership.clock
    began_at = clock.monotonic()
    deadline = began_at + (SETTLE_SECONDS if patient else 0.0)
    warned = set[str]()
    holders, rng, poll = _Holders(known, block), random.Random(membership.peer_id), membership.poll()
    while True:
        holders.look()
        is_patient = clock.monotonic() < began_at + SILENT_SECONDS
        found = await _ask_all(config, block, known, poll, rng, own or {}, is_patient=is_patient)
        if isinstance(found, Others):
            together = {found.rounds[other] for other in partners(config, block) if other in found.rounds}
            is_settled = found.held_at is not None or (bool(found.rounds) and len(together) <= 1)
            if needs_holder and found.held_at is None and found.latest > 0 and holders.gone:
                found = dataclasses.replace(found, silent=named(holders.gone))
                is_settled = holders.missed_seconds(clock) >= RETURN_SECONDS
                deadline = math.inf
            if is_settled or clock.monotonic() >= deadline:
                return found
        else:
            if found.what not in warned:
                names = ", ".join(record.display_name for record in found.peers[:3])
                logger.warning("%s %s, %s", found.what, names, found.why)
                warned.add(found.what)
            if gives_up and clock.monotonic() >= began_at + SETTLE_SECONDS:
                raise PeerUnavailable(found.fault)
        await clock.sleep(LOOK_SECONDS)
        with suppress(PeerUnavailable):
            await known.look(membership.directory, membership.blocks)


class _Holders:
    def __init__(self, known: KnownPeers, block: Block) -> None:
        self._known = known
        self._block = block
        self._seen: dict[str, PeerRecord] = {}
        self._missed_since: float | None = None

    def look(self) -> None:
        """Note the holders that are announced, and forget those that say that they leave."""
        announced = self._known.others(self._block)
        self._seen |= {record.peer_id: record for record in announced}
        for record in self._known.leaving(self._block):
            self._seen.pop(record.peer_id, None)
        if announced:
            self._missed_since = None

    @property
    def gone(self) -> list[PeerRecord]:
        announced = {record.peer_id for record in self._known.others(self._block)}
        return [record for peer_id, record in self._seen.items() if peer_id not in announced]

    def missed_seconds(self, clock: Clock) -> float:
        if self._missed_since is None:
            self._missed_since = clock.monotonic()
            logger.warning(
                "stage %s was held by %s: waiting for %.0f s in case they are back, since what it has learnt is with "
                "them", self._block, named(self.gone), RETURN_SECONDS,
            )  # fmt: skip
        return clock.monotonic() - self._missed_since


def named(peers: Collection[PeerRecord]) -> str:
    """Text that names peers that no longer answer, and since when, in local time."""
    names = ", ".join(record.display_name for record in list(peers)[:3])
    more = f" and {len(peers) - 3} more" if len(peers) > 3 else ""
    since = time.strftime("%H:%M:%S", time.localtime(max(record.announced_at for record in peers)))
    return f"{names}{more}, silent since {since}"


def partners(config: RunConfig, block: Block) -> Collection[Block]:
    """The other blocks that have to be at the same round as this one."""
    if config.rounds.synchronous:
        return set(config.blocks) - {block}
    sharing = set(map(Block, tied_stages(config)))
    return sharing - {block} if block in sharing else set()


async def _ask_all(
    config: RunConfig, block: Block, known: KnownPeers, poll: Poll, rng: random.Random,
    own: Mapping[Block, pb.DescribeReply], *, is_patient: bool,
) -> Others | _Awaited:  # fmt: skip
    announced, leaving = known.others(block), known.leaving(block)
    holders = await poll.replies(announced)
    if len({reply.round > 0 for reply in holders}) == 1:
        return Others(held_at=_rounds({block: holders}).blocks[block], has_begun=_has_begun(holders))
    if is_patient and announced and not holders:
        fault = "those who hold it do not answer"
        return _Awaited(peers=announced, what=f"stage {block} is held by", why=_SILENT, fault=fault)
    if is_patient and not holders and await poll.replies(leaving):
        fault = "those who hold it are leaving it"
        return _Awaited(peers=leaving, what=f"stage {block} is being left by", why=_LEAVING, fault=fault)
    asked = {
        other: rng.sample(records, min(ASKED_PER_STAGE, len(records)))
        for other in config.blocks
        if other != block and (records := known.others(other))
    }
    rows = await asyncio.gather(*map(poll.replies, asked.values()))
    replies = {other: row for other, row in zip(asked, rows, strict=True) if row}
    for other, reply in own.items():
        replies[other] = [reply, *replies.get(other, ())]
    if holders:
        # They do not agree whether the run has gone on. The other stages' peers decide that.
        rounds = _rounds(replies | {block: holders})
        return Others(held_at=rounds.blocks[block], has_begun=_has_begun(holders))
    gone_on = [record for row in [announced, *asked.values()] for record in row if record.round > 0]
    if gone_on and not replies:
        if not is_patient:
            raise Fatal(f"the run has gone on with {named(gone_on)}, and none of its peers answers this one")
        fault = "those who serve the other stages do not answer"
        return _Awaited(peers=gone_on, what="the run has gone on with", why=_SILENT, fault=fault)
    return _from_other_blocks(config, block, replies)


def _from_other_blocks(config: RunConfig, block: Block, replies: Mapping[Block, Sequence[pb.DescribeReply]]) -> Others:
    rounds = _rounds(replies)
    # Each block counts the samples that passed through it.
    newest = [
        int(reply.run_samples * config.share_of(block) / config.share_of(other))
        for other, row in replies.items()
        for reply in row
        if reply.round == rounds.latest
    ]
    return Others(
        rounds=rounds.blocks,
        latest=rounds.latest,
        samples=statistics.median_low(newest or [0]),
        repeating=frozenset(
            block
            for block, row in replies.items()
            if any(_can_repeat(reply) for reply in row if reply.round == rounds.blocks[block])
        ),
        has_begun=any(map(_has_begun, replies.values())),
    )


def _rounds(replies: Mapping[Block, Sequence[pb.DescribeReply]]) -> RunRounds:
    return RunRounds.of({block: [reply.round for reply in row] for block, row in replies.items()})


def _has_begun(row: Sequence[pb.DescribeReply]) -> bool:
    return any(reply.counters.forwards > 0 for reply in row)


def _can_repeat(reply: pb.DescribeReply) -> bool:
    """Whether the peer has the weights of the round before its own: it has them only if it took part in committing that
    round."""
    return any(report.round == reply.round - 1 for report in reply.rounds)
