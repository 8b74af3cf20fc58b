"""Asks every announced peer of a swarm what it is doing, and makes a view of the answers.

Used by swarm-status, which has the announcements from the DHT, and by swarm-local, which knows its own children.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

from peers.status.answer import Answer, LastPeer
from peers.status.peer_row import PeerRow
from peers.status.view import StageRow, SwarmView, TrainerRow
from swarm.errors import MalformedMessage, PeerUnavailable, SwarmError
from swarm.rpc.ask import describe
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import ClaimRecord, ClaimState, PeerRecord, PeerState, TrainerRecord

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Longest wait for an answer. The first call to a peer also connects: four round trips, and TLS on a busy machine."""


async def observe(
    run_id: str, stages: Mapping[int, Sequence[PeerRecord]], trainers: Sequence[TrainerRecord], channels: ChannelPool,
    events: Sequence[str] = (), claims: Sequence[ClaimRecord] = (),
) -> SwarmView:  # fmt: skip
    """Ask all peers at once. A peer that does not answer in time is shown as unreachable, unless it leaves or moves.

    Args:
        run_id: the peers' run; empty if it is not known, so that answers of peers of any run are taken.
    """
    numbers = sorted(stages)
    replies = await asyncio.gather(*(_replies(run_id, stages[number], channels) for number in numbers))
    rows = [_stage_row(number, stages[number], row) for number, row in zip(numbers, replies, strict=True)]
    told = [Answer.of(reply).last_peers for row in replies for reply in row if reply is not None]
    return SwarmView(
        run=run_id,
        stages=with_last_peers(with_moves(rows, stages, claims), stages, told),
        trainers=tuple(map(TrainerRow.of, trainers)),
        events=tuple(events),
    )


def with_moves(
    rows: Sequence[StageRow], stages: Mapping[int, Sequence[PeerRecord]], claims: Sequence[ClaimRecord]
) -> tuple[StageRow, ...]:
    """Mark each peer that moves. It is listed at its old stage until it has left, and then at its new stage.

    A peer that has announced that it leaves, and no longer answers, has left; it is not shown as unreachable.
    """
    records = [record for row in stages.values() for record in row]
    leaving = {(record.peer_id, record.stage) for record in records if record.state is PeerState.LEAVING}
    serves_at = {record.peer_id: record.stage for record in records if record.state is PeerState.SERVING}
    confirmed = [claim for claim in claims if claim.state is ClaimState.CONFIRMED]
    under_way = {claim.peer_id: claim for claim in confirmed if serves_at.get(claim.peer_id) != claim.stage}
    shown: dict[int, list[PeerRow]] = {row.stage: [] for row in rows}
    for row in rows:
        for peer in row.peers:
            has_left = peer.state == "unreachable" and (peer.peer_id, row.stage) in leaving
            if has_left and (peer.peer_id in under_way or peer.peer_id in serves_at):
                continue
            if has_left:
                peer = dataclasses.replace(peer, state="leaving")
            claim = under_way.get(peer.peer_id)
            if claim is not None and claim.from_stage == row.stage:
                under_way.pop(peer.peer_id)
                waiting_for = peer.waiting_for or claim.waiting_for
                peer = dataclasses.replace(peer, state="moving", moving_to=claim.stage, waiting_for=waiting_for)
            shown[row.stage].append(peer)
    for claim in under_way.values():
        state = "joining" if claim.from_stage is None else "moving"
        shown.setdefault(claim.stage, []).append(
            PeerRow(
                name=claim.name, peer_id=claim.peer_id, state=state, moving_from=claim.from_stage,
                waiting_for=claim.waiting_for,
            )
        )  # fmt: skip
    return tuple(StageRow(stage=stage, peers=tuple(peers)) for stage, peers in sorted(shown.items()))


def with_last_peers(
    rows: Sequence[StageRow], stages: Mapping[int, Sequence[PeerRecord]], told: Sequence[Mapping[int, LastPeer]]
) -> tuple[StageRow, ...]:
    """For each stage that no peer serves, add the peer that served it last.

    Args:
        told: from each peer that answered, the last peers that it knows of, by stage. They are used for stages at which
            no peer is announced any more.
    """

    def last_of(stage: int) -> LastPeer | None:
        announced = _last_announced(stages.get(stage, ()))
        return announced or _as_told([each[stage] for each in told if stage in each])

    return tuple(row if row.is_served else dataclasses.replace(row, last_peer=last_of(row.stage)) for row in rows)


def _last_announced(records: Sequence[PeerRecord]) -> LastPeer | None:
    last = max(records, key=lambda record: record.announced_at, default=None)
    if last is None:
        return None
    name, has_left = last.name or last.peer_id[:8], last.state is PeerState.LEAVING
    return LastPeer(name=name, last_at=last.announced_at, has_left=has_left)


def _as_told(told: Sequence[LastPeer]) -> LastPeer | None:
    """The median, by time, of what peers say. So one peer that makes something up does not hide what the others
    know."""
    return sorted(told, key=lambda last: last.last_at)[(len(told) - 1) // 2] if told else None


async def _replies(run_id: str, records: Sequence[PeerRecord], channels: ChannelPool) -> list[pb.DescribeReply | None]:
    return await asyncio.gather(*(_answer(run_id, record, channels) for record in records))


def _stage_row(stage: int, records: Sequence[PeerRecord], replies: Sequence[pb.DescribeReply | None]) -> StageRow:
    rows = [PeerRow.of(record, reply) for record, reply in zip(records, replies, strict=True)]
    return StageRow(stage=stage, peers=tuple(sorted(rows, key=lambda row: (row.name, row.peer_id))))


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """Log a warning, but only once: each view would log it again."""
    logger.warning("%s", text)


async def _answer(run_id: str, record: PeerRecord, channels: ChannelPool) -> pb.DescribeReply | None:
    try:
        channel = channels.channel(record)
    except PeerUnavailable as error:
        # The peer cannot even be asked: one side has TLS and the other has not, or its certificate is broken.
        warn_once(str(error))
        return None
    try:
        reply = await describe(channel, pb.DescribeRequest(run_id=run_id), seconds=ANSWER_SECONDS)
        if reply.state not in list(PeerState):
            raise MalformedMessage(f"state is {reply.state!r}")
    except SwarmError as error:
        logger.debug("%s does not tell what it does: %s", record.peer_id, error)
        return None
    return reply
