"""Looking at a swarm: ask every announced peer what it is doing.

Used by swarm-status, which has the announcements from the DHT, and by swarm-local, which knows its own children.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

from peers.status.view import PeerRow, StageRow, SwarmView, TrainerRow
from swarm.errors import MalformedMessage, PeerUnavailable, SwarmError
from swarm.rpc.channels import ChannelPool
from swarm.rpc.describe import describe
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps
from swarm.types import ClaimRecord, ClaimState, PeerRecord, PeerState, TrainerRecord

logger = logging.getLogger(__name__)

MOST_REFUSALS = 8
"""Lines of a peer about others, of which no more are shown."""
LONGEST_REFUSAL = 400
"""Characters of each of them."""
ANSWER_SECONDS = 5.0
"""The first call to a peer connects as well: four round trips on the line, and TLS on a machine that computes."""


async def observe(
    run_id: str, stages: Mapping[int, Sequence[PeerRecord]], trainers: Sequence[TrainerRecord], channels: ChannelPool,
    events: Sequence[str] = (), claims: Sequence[ClaimRecord] = (),
) -> SwarmView:  # fmt: skip
    """Ask all peers at once; one that does not answer in time is shown as unreachable, if it is not on its way."""
    rows = await asyncio.gather(
        *(_stage_row(run_id, stage, records, channels) for stage, records in sorted(stages.items()))
    )
    return SwarmView(
        run=run_id, stages=with_moves(rows, stages, claims), events=tuple(events),
        trainers=tuple(
            TrainerRow(name=t.name, step=t.step, loss=t.loss, tokens_per_second=t.tokens_per_second) for t in trainers
        ),
    )  # fmt: skip


def with_moves(
    rows: Sequence[StageRow], stages: Mapping[int, Sequence[PeerRecord]], claims: Sequence[ClaimRecord]
) -> tuple[StageRow, ...]:
    """Show who is on the way: where it is until it has left there, then where it goes."""
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
            claim = under_way.get(peer.peer_id)
            if claim is not None and claim.from_stage == row.stage:
                under_way.pop(peer.peer_id)
                peer = dataclasses.replace(peer, state="moving", moving_to=claim.stage)
            shown[row.stage].append(peer)
    for claim in under_way.values():
        state = "joining" if claim.from_stage is None else "moving"
        shown.setdefault(claim.stage, []).append(
            PeerRow(name=claim.name, peer_id=claim.peer_id, state=state, moving_from=claim.from_stage)
        )
    return tuple(StageRow(stage=stage, peers=tuple(peers)) for stage, peers in sorted(shown.items()))


async def _stage_row(run_id: str, stage: int, records: Sequence[PeerRecord], channels: ChannelPool) -> StageRow:
    rows = await asyncio.gather(*(_peer_row(run_id, record, channels) for record in records))
    return StageRow(stage=stage, peers=tuple(sorted(rows, key=lambda row: (row.name, row.peer_id))))


@lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


async def _answer(run_id: str, record: PeerRecord, channels: ChannelPool) -> pb.DescribeReply | None:
    try:
        channel = channels.channel(record)
    except PeerUnavailable as error:
        # It cannot even be asked: one side has TLS and the other has not, or its certificate is broken.
        _warn_once(str(error))
        return None
    try:
        reply = await describe(channel, pb.DescribeRequest(run_id=run_id), seconds=ANSWER_SECONDS)
        if reply.state not in list(PeerState):
            raise MalformedMessage(f"state is {reply.state!r}")
    except SwarmError as error:
        logger.debug("%s does not tell what it does: %s", record.peer_id, error)
        return None
    return reply


async def _peer_row(run_id: str, record: PeerRecord, channels: ChannelPool) -> PeerRow:
    reply = await _answer(run_id, record, channels)
    if reply is None:
        return PeerRow(
            name=record.name, peer_id=record.peer_id, state="unreachable", device=record.device, round=record.round,
            moves=record.moves,
        )  # fmt: skip
    counters = reply.counters
    last = reply.rounds[-1] if reply.rounds else pb.RoundReport()
    inner = InnerSteps.read(last.inner_steps)
    return PeerRow(
        name=record.name, peer_id=record.peer_id, state=reply.state, device=record.device,
        samples_per_second=reply.samples_per_second, queue_length=reply.queue_length, round=reply.round,
        samples=reply.round_samples, forwards=counters.forwards, backwards=counters.backwards,
        rerouted_backwards=counters.rerouted_backwards,
        attempts=reply.averaging.attempts, aborted=dict(reply.averaging.aborted), downloads=reply.averaging.downloads,
        refusals=tuple(map(_printable, reply.averaging.refusals[:MOST_REFUSALS])),
        alive_peers=last.num_alive, members=last.num_members, averaged_fraction=last.averaged_fraction,
        averaged_bytes=last.bytes_sent + last.bytes_received, compression_ratio=last.compression_ratio,
        exchange_seconds=last.exchange_seconds, wait_seconds=last.wait_seconds,
        contribution_norm=last.contribution_norm, moves=record.moves,
        inner_steps=inner.count, samples_per_inner_step=inner.samples_per_step,
        configured_samples_per_inner_step=inner.configured_samples, staleness=inner.mean_staleness,
        largest_staleness=inner.largest_staleness,
        loop_lag_seconds=reply.loop_lag_seconds,
    )  # fmt: skip


def _printable(text: str) -> str:
    """What a peer says, as a line that no terminal takes for more than text."""
    return "".join(character if character.isprintable() else "?" for character in text[:LONGEST_REFUSAL])
