"""With which state a stage peer begins: a checkpoint's, the initial one, or that of the peers who hold the stage.

Called once by server.py, before anything is served. What living peers hold is downloaded afterwards, by the
averager. Nothing here takes another peer's round back: where that is needed, it says so and ends the program.
"""

import asyncio
import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from peers.shared.network import LOOK_SECONDS, KnownPeers
from swarm.checkpoint.folder import CheckpointFolder, Restored
from swarm.config import RunConfig
from swarm.dht.directory import Directory
from swarm.errors import Fatal, MalformedMessage, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.model.stages import shared_parameters
from swarm.rpc.bounds import require_bounds
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 3.0
"""Longest wait for a sign of life from a peer that is announced."""
ASKED_PER_STAGE = 8
"""Peers of another stage that are asked where it is."""
SETTLE_SECONDS = 30.0
"""How long a peer with a checkpoint waits for others to start serving, or to commit the same round."""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """What the command line says.

    Attributes:
        folder: of checkpoints.
        round_number: resume at no other round.
        had_checkpoints: the folder that will be written to holds some already.
        joins: the run is there, as far as the command line knows.
        moves: the peer comes from another stage. It does not bring initial weights to a run that has gone on.
        starts_over: the user wants initial weights where nobody holds the stage of a run that has gone on, and there is
            no checkpoint.
    """

    folder: Path | None = None
    round_number: int | None = None
    had_checkpoints: bool = False
    joins: bool = False
    moves: bool = False
    starts_over: bool = False


@dataclass(frozen=True, kw_only=True)
class Others:
    """Where the peers are that answer.

    Attributes:
        held_at: newest round of a peer that holds our stage.
        rounds: by other stage, its newest round.
        samples: of the run, at the newest of these.
        repeating: stages of which a peer at that round has committed the one before itself, so that it has its weights.
        has_begun: one of those that were asked has been given microbatches.
    """

    held_at: int | None = None
    rounds: Mapping[int, int] = field(default_factory=dict)
    samples: int = 0
    repeating: frozenset[int] = frozenset()
    has_begun: bool = False

    @property
    def latest(self) -> int:
        """The newest round of the run; 0 where nobody answers."""
        return max(self.rounds.values(), default=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    """A state that no living peer holds, and where it enters the run; without `restored`, the initial one."""

    restored: Restored | None
    round: int
    run_samples: int
    lineage: str
    highest_microbatch: int
    parent: str | None = None
    """The lineage that the state had, if it has a new one."""


def genesis(config: RunConfig, stage: int) -> str:
    """Lineage of a stage that has committed nothing."""
    return hashlib.sha256(f"{config.run_id} stage {stage}".encode()).hexdigest()


def choose(
    config: RunConfig, stage: int, shapes: Mapping[str, torch.Size], others: Others, folder: CheckpointFolder | None,
    options: ResumeOptions,
) -> Beginning | None:  # fmt: skip
    """What a peer brings into the run; None if it begins like everybody and downloads what others hold.

    Blocks while checkpoints are read.

    Args:
        shapes: of the stage's parameters.
        folder: to resume from.

    Raises:
        Fatal: the checkpoints do not fit where the run is, or there are none, and the stage is not to start over; the
            message says what to do.
        PeerUnavailable: a moving peer would bring initial weights.
        ValueError: the run would begin anew beside its own checkpoints.
    """
    if others.held_at is not None:
        if folder is not None and not folder.is_empty:
            logger.info("peers hold stage %d at round %d: theirs is taken, no checkpoint", stage, others.held_at)
        return None
    if folder is None or folder.is_empty:
        if folder is not None and options.round_number is not None:
            raise Fatal(f"{folder.path} has no checkpoint of round {options.round_number}")
        if options.moves and others.latest > 0:
            raise PeerUnavailable(f"nobody holds stage {stage} any more, and there is no checkpoint")
        if options.had_checkpoints:
            raise ValueError("--checkpoint names a folder with checkpoints: go on with --resume, or take another one")
        if folder is not None and others.latest == 0:
            logger.info("%s has no checkpoint: the run begins at round 0", folder.path)
        return _start_over(config, stage, others, options)
    partners = {number for number in _partners(config, stage) if number in others.rounds}
    if partners:
        rounds = {others.rounds[partner] for partner in partners}
        ahead = {partner for partner in partners if others.rounds[partner] == max(rounds)}
        can_repeat = config.rounds.synchronous and ahead <= others.repeating
        return _begin_with(_at_their_round(stage, shapes, rounds, folder, options, can_repeat=can_repeat))
    if others.rounds and others.latest == 0:
        raise Fatal("the run begins anew at round 0: start its first peer with --resume as well, or leave --resume out")
    wanted = options.round_number
    restored = None
    if wanted is None and others.rounds:
        restored = folder.restore(stage, shapes, round_number=others.latest)
    restored = restored or folder.restore(stage, shapes, round_number=wanted)
    if restored is None:
        of_round = "" if wanted is None else f" of round {wanted}"
        raise Fatal(f"{folder.path} has no sound checkpoint{of_round} with all of stage {stage}")
    if others.rounds and restored.round != others.latest:
        return _enter_late(config, stage, restored, others)
    return _begin_with(restored)


async def find_others(
    config: RunConfig, stage: int, *, known: KnownPeers, directory: Directory, channels: ChannelPool, clock: Clock,
    patient: bool, gives_up: bool = False,
) -> Others:  # fmt: skip
    """Ask the announced peers where they are.

    While the stage has holders that are announced and do not answer, this waits, however long it takes: they may be
    frozen, or cut off from here, and a stage must not begin anew beside them. Likewise while one of them leaves: it may
    stay after all, where nobody else has the state, or write its last checkpoint. And while peers of other stages are
    announced in a run that has gone on, and none of them answers: silence does not mean round 0. What died is announced
    no longer after some seconds.

    Args:
        patient: wait, for a while, until somebody serves and the stages that commit together have done so.
        gives_up: do not wait for silent peers, or those that leave, for longer than that.

    Raises:
        PeerUnavailable: they stayed silent, or did not leave, and this gave up.
    """
    began_at = clock.monotonic()
    deadline = began_at + (SETTLE_SECONDS if patient else 0.0)
    stages, warned = range(config.stages.num_stages), set[str]()
    while True:
        if holders := await describe(config, known.others(stage), channels):
            return Others(held_at=max(reply.round for reply in holders), has_begun=_has_begun(holders))
        what, fault, awaited = f"stage {stage} is held by", "those who hold it do not answer", known.others(stage)
        why = "announced but silent: waiting for an answer, or until it is announced no longer"
        if not awaited and await describe(config, leaving := known.leaving(stage), channels):
            what, fault, awaited = f"stage {stage} is being left by", "those who hold it are leaving it", leaving
            why = "which still holds it: waiting until it is gone, or stays"
        elif not awaited:
            foremost = {
                number: sorted(known.others(number), key=lambda record: -record.round)[:ASKED_PER_STAGE]
                for number in stages
                if number != stage
            }
            rows = await asyncio.gather(*(describe(config, records, channels) for records in foremost.values()))
            replies = {number: row for number, row in zip(foremost, rows, strict=True) if row}
            rounds = {number: max(reply.round for reply in row) for number, row in replies.items()}
            if not rounds:
                what, fault = "the run has gone on with", "those who serve the other stages do not answer"
                awaited = [record for records in foremost.values() for record in records if record.round > 0]
            together = {rounds[number] for number in _partners(config, stage) if number in rounds}
            if not awaited and ((rounds and len(together) <= 1) or clock.monotonic() >= deadline):
                _, samples = max(((reply.round, reply.run_samples) for row in rows for reply in row), default=(0, 0))
                repeating = frozenset(number for number, row in replies.items() if any(map(_can_repeat, _newest(row))))
                has_begun = any(map(_has_begun, rows))
                return Others(rounds=rounds, samples=samples, repeating=repeating, has_begun=has_begun)
        if awaited:
            if what not in warned:
                names = ", ".join(record.name or record.peer_id[:8] for record in awaited[:3])
                logger.warning("%s %s, %s", what, names, why)
                warned.add(what)
            if gives_up and clock.monotonic() >= began_at + SETTLE_SECONDS:
                raise PeerUnavailable(fault)
        await _look_again(known, directory, stages, clock)


def _has_begun(row: Sequence[pb.DescribeReply]) -> bool:
    return any(reply.counters.forwards > 0 for reply in row)


def _newest(row: Sequence[pb.DescribeReply]) -> list[pb.DescribeReply]:
    return [reply for reply in row if reply.round == max(reply.round for reply in row)]


def _can_repeat(reply: pb.DescribeReply) -> bool:
    """Whether the peer has the weights of the round before: only if it was there when that was committed."""
    return any(report.round == reply.round - 1 for report in reply.rounds)


async def _look_again(known: KnownPeers, directory: Directory, stages: Sequence[int], clock: Clock) -> None:
    await clock.sleep(LOOK_SECONDS)
    with suppress(PeerUnavailable):
        await known.look(directory, stages)


async def describe(
    config: RunConfig, records: Sequence[PeerRecord], channels: ChannelPool, *, caller: pb.Incarnation | None = None
) -> list[pb.DescribeReply]:  # fmt: skip
    """What peers say of themselves, of those that answer and serve the stage that they are announced at.

    Args:
        caller: who asks; they tell then whether another process serves under its identity.

    Raises:
        PeerUnavailable: none of them could even be asked, for one has TLS and the other has not, say.
    """
    faults: list[PeerUnavailable] = []

    async def ask(record: PeerRecord) -> pb.DescribeReply | None:
        try:
            call: Any = StageServiceStub(channels.channel(record)).Describe
            async with asyncio.timeout(ANSWER_SECONDS):
                reply: pb.DescribeReply = await call(pb.DescribeRequest(run_id=config.run_id, caller=caller))
            require_bounds(reply, finite=True)
        except PeerUnavailable as error:
            faults.append(error)
            return None
        except MalformedMessage as error:
            logger.debug("%s: a malformed reply: %s", record.peer_id, error)
            return None
        except (grpc.aio.AioRpcError, TimeoutError):
            return None
        # One that was started again elsewhere may have the old port, in another run as well.
        return reply if (reply.run_id, reply.stage) == (config.run_id, record.stage) else None

    replies = [reply for reply in await asyncio.gather(*map(ask, records)) if reply is not None]
    if faults and len(faults) == len(records):
        raise faults[0]
    return replies


def _partners(config: RunConfig, stage: int) -> Collection[int]:
    """The stages that have to be at the same round as this one."""
    if config.rounds.synchronous:
        return set(range(config.stages.num_stages)) - {stage}
    sharing = [set(shared.stages) for shared in shared_parameters(config) if stage in shared.stages]
    return set[int]().union(*sharing) - {stage}


def _at_their_round(
    stage: int, shapes: Mapping[str, torch.Size], rounds: set[int], folder: CheckpointFolder, options: ResumeOptions,
    *, can_repeat: bool,
) -> Restored:  # fmt: skip
    """Of the round at which the stages stand that commit together with this one.

    In the synchronous setting the one before will do as well, where they have committed it themselves: they keep its
    weights, and the stage catches up by having its microbatches run again.
    """
    # Some may have committed a round that others, and this stage, have yet to commit.
    wanted = [max(rounds)] if len(rounds) == 1 else []
    if can_repeat:
        wanted.append(max(rounds) - 1)
    for number in wanted:
        fits = min(rounds) >= number and options.round_number in (None, number)
        if fits and (restored := folder.restore(stage, shapes, round_number=number)):
            if number < max(rounds):
                logger.info("the other stages repeat round %d for this one", number)
            return restored
    newest = folder.restore(stage, shapes, round_number=options.round_number)
    stand = f"the other stages stand at round {' and '.join(map(str, sorted(rounds)))}"
    if newest is None:
        raise Fatal(f"{stand}, and {folder.path} has no sound checkpoint with all of stage {stage}")
    raise Fatal(
        f"{stand}, and stage {stage} in {folder.path} at round {newest.round}: to go on from one cut, stop every peer "
        f"and start all with --resume and --resume-round {newest.round}"
    )


def _begin_with(restored: Restored) -> Beginning:
    return Beginning(
        restored=restored, round=restored.round, run_samples=restored.run_samples, lineage=restored.lineage,
        highest_microbatch=restored.highest_microbatch,
    )  # fmt: skip


def _start_over(config: RunConfig, stage: int, others: Others, options: ResumeOptions) -> Beginning | None:
    if others.latest == 0:
        return None
    if not options.starts_over:
        # A mate may be about to bring its checkpoint, and would find this peer as the stage's holder.
        raise Fatal(
            f"nobody holds stage {stage} any more: begin with its checkpoint (--resume DIR), or with --start-over from "
            "initial weights: what it had learnt is gone"
        )
    logger.warning(
        "nobody holds stage %d any more, and there is no checkpoint: it starts again from its initial weights at "
        "round %d", stage, others.latest,
    )  # fmt: skip
    return _late(config, None, genesis(config, stage), others)


def _enter_late(config: RunConfig, stage: int, restored: Restored, others: Others) -> Beginning:
    logger.warning(
        "nobody holds stage %d any more: it enters at round %d as it was at round %d; what it learnt since is lost",
        stage, others.latest, restored.round,
    )  # fmt: skip
    return _late(config, restored, restored.lineage, others)


def _late(config: RunConfig, restored: Restored | None, lineage: str, others: Others) -> Beginning:
    """Enter at the others' round with an older state. All who do so from the same state are on one branch."""
    num_rounds = others.latest - (restored.round if restored else 0)
    highest = restored.highest_microbatch if restored else -1
    # When the checkpoint was written, rounds may have had another length.
    longest = max(c.microbatches_per_round for c in (config, restored.config if restored else config))
    return Beginning(
        restored=restored, round=others.latest, run_samples=others.samples,
        lineage=hashlib.sha256(f"{lineage} again at {others.latest}".encode()).hexdigest(), parent=lineage,
        # Nobody knows how many were trained on since: rather leave some out than repeat one.
        highest_microbatch=highest + 2 * max(0, num_rounds) * longest,
    )  # fmt: skip
