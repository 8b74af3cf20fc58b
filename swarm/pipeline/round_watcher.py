"""Follows the rounds for a trainer, which asks the stages' peers about them.

Some peers of each stage are asked. They answer once their stage is at a new round, or after a while. A stage has
committed a round when most of those that answer say so. A round that all followed blocks have committed is one step.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from swarm.hop.answers import Obstacle, left_alone
from swarm.routing.poll import Poll
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.inner_steps import InnerSteps
from swarm.training.round_member import RoundCost
from swarm.training.run_rounds import MOST_APART, RunRounds
from swarm.types import Block, PeerRecord, PeerState

_KEPT_REPORTS = 64
_ANSWER_SECONDS = 2.0
_NUM_ASKED = 3
"""How many peers of a stage are asked at a time: with three, one that does not say the truth changes nothing."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    run_samples: int
    """How many samples the run has committed, this round included, by what is known of the watched blocks."""
    gradient_norm: float
    """The norm of the whole model's gradient, or with DiLoCo of the whole model's averaged pseudo-gradient."""
    learning_rate: float
    num_members: int
    """Over all stages."""
    num_alive: int
    """Over all stages, at the time."""
    averaged_fraction: float
    """The share of its parameters that a stage averaged in the round, as a mean over the stages."""
    cost: RoundCost
    """The cost of averaging, summed over the peers that were asked, one for each stage. Times are those of the
    slowest."""
    wait_seconds: float
    """The longest time that a stage waited before and after its exchange, with its contribution closed."""
    num_attempts: int
    num_aborted: int
    """How many attempts have failed since the peers that were asked started."""
    device_bytes: int
    """The most that a peer reported; 0 without an accelerator."""
    inner_steps: Mapping[Block, InnerSteps]
    """DiLoCo: how the inner steps went at the peer that was asked, by block."""
    time_shares: Mapping[Block, Mapping[str, Mapping[str, float]]]
    """By block and peer id: what those that answered did with the last minute, under the names of docs/status.md."""


class RoundWatcher:
    def __init__(
        self, *, run_id: str, blocks: Callable[[], Collection[Block]], synchronous: bool,
        peers: Callable[[Block], Sequence[PeerRecord]], channels: ChannelPool,
    ) -> None:  # fmt: skip
        """`blocks` are those that are followed now: all of the run, or with DiLoCo those that do not stand still."""
        self._synchronous = synchronous
        self._peers = peers
        self._poll = Poll(run_id, channels, seconds=_ANSWER_SECONDS)
        self._followed = blocks
        self._reports = defaultdict[Block, dict[int, pb.RoundReport]](dict)
        self._rounds: dict[Block, int] = {}
        """The highest round that each block has reached, once it has answered."""
        self._present: dict[Block, int] = {}
        """The present round of each block. It may be lower than in `_rounds`: a lost block may have come back at an
        earlier round."""
        self._round = self._latest = self._num_polls = 0
        self._obstacles: dict[Block, Obstacle] = {}
        """By block: why none of its peers answered."""
        self._device_bytes = 0
        self._time_shares: dict[Block, dict[str, dict[str, float]]] = {}
        self._aborted: dict[str, int] = {}

    @property
    def round(self) -> int:
        """The round that all followed blocks have reached. It never becomes lower: a block that is followed again may
        still be at an earlier one."""
        return self._round

    @property
    def known_round(self) -> int | None:
        """The round that all followed blocks which have answered have reached; None while none has answered."""
        return min((self._rounds[block] for block in self._followed() if block in self._rounds), default=None)

    @property
    def latest_round(self) -> int:
        return self._latest

    def obstacle(self, block: Block) -> Obstacle | None:
        """None if a peer of the block answered when the block was last asked."""
        return self._obstacles.get(block)

    async def poll(self, wait_seconds: float = 0.0) -> None:
        """Ask every followed block once. If a block does not answer, its earlier answer is kept. A peer whose block is
        still at the same round may wait for `wait_seconds`."""
        followed = list(self._followed())
        answers = await asyncio.gather(*(self._describe(block, wait_seconds) for block in followed))
        rows = dict(zip(followed, answers, strict=True))
        self._num_polls += 1
        found = RunRounds.of({block: [reply.round for reply in row.values()] for block, row in rows.items()})
        self._latest = max(self._latest, found.latest)
        for block, said in found.blocks.items():
            reply = next(reply for reply in rows[block].values() if reply.round == said)
            present = self._present[block] = min(said, found.middle + MOST_APART)
            self._rounds[block] = max(self._rounds.get(block, 0), present)
            self._device_bytes = max(self._device_bytes, reply.device_bytes)
            self._aborted[reply.peer_id] = sum(reply.averaging.aborted.values())
            self._time_shares[block] = {peer_id: _time_shares(reply) for peer_id, reply in rows[block].items()}
            reports = self._reports[block]
            reports.update({report.round: report for report in reply.rounds if report.round < present})
            for round_number in sorted(reports)[:-_KEPT_REPORTS]:
                del reports[round_number]
        if all(block in self._rounds for block in followed):
            self._round = max(self._round, min(self._rounds[block] for block in followed))

    def report(self, step: int) -> StepReport | None:
        """The figures of a round that all followed blocks have committed; None if those of a block are missing."""
        followed = list(self._followed())
        if not all(step in self._reports[block] for block in followed):
            return None
        of_blocks = {block: self._reports[block][step] for block in followed}
        rounds = list(of_blocks.values())
        norms = [entry.gradient_norm for entry in rounds]
        sent = sum(entry.bytes_sent for entry in rounds)
        plain = sum(entry.bytes_sent * entry.compression_ratio for entry in rounds)
        return StepReport(
            run_samples=self._run_samples(step),
            gradient_norm=norms[0] if self._synchronous else math.hypot(*norms),
            learning_rate=rounds[0].learning_rate,
            num_members=sum(entry.num_members for entry in rounds),
            num_alive=sum(entry.num_alive for entry in rounds),
            averaged_fraction=sum(entry.averaged_fraction for entry in rounds) / len(rounds),
            cost=RoundCost(
                bytes_sent=sent,
                bytes_received=sum(entry.bytes_received for entry in rounds),
                compression_ratio=plain / sent if sent else 1.0,
                seconds=max(entry.aggregate_seconds for entry in rounds),
                exchange_seconds=max(entry.exchange_seconds for entry in rounds),
                contribution_norm=math.hypot(*(entry.contribution_norm for entry in rounds)),
                residual_bytes=sum(entry.residual_bytes for entry in rounds),
            ),
            wait_seconds=max(entry.wait_seconds for entry in rounds),
            num_attempts=max(entry.attempts for entry in rounds),
            num_aborted=sum(self._aborted.values()),
            device_bytes=self._device_bytes,
            inner_steps={}
            if self._synchronous
            else {block: InnerSteps.read(entry.inner_steps) for block, entry in of_blocks.items()},
            time_shares={block: self._time_shares[block] for block in followed},
        )

    def _run_samples(self, step: int) -> int:
        """The least over the stages of what their variants have, each in this round or the last one that is known of it
        before."""
        samples = Counter[int]()
        for block, reports in self._reports.items():
            last = max((number for number in reports if number <= step), default=None)
            samples[block.stage] += 0 if last is None else reports[last].run_samples
        return min(samples.values())

    async def _describe(self, block: Block, wait_seconds: float) -> dict[str, pb.DescribeReply]:
        """The answers of some peers, by their ids; no more are awaited once most of these are at a new round."""
        serving = [record for record in self._peers(block) if record.state is PeerState.SERVING]
        serving.sort(key=lambda record: record.peer_id)
        first = self._num_polls % max(1, len(serving))
        asked = (serving[first:] + serving[:first])[:_NUM_ASKED]
        heard = await self._poll.ask(asked, after_round=self._present.get(block), wait_seconds=wait_seconds)
        if replies := {one.record.peer_id: one.reply for one in heard if one.reply is not None}:
            self._obstacles.pop(block, None)
            return replies
        failed = [left_alone(one.record, one.fault, 0.0) for one in heard if one.fault is not None]
        self._obstacles[block] = Obstacle.of(failed, 0.0, num_peers=len(serving))
        return {}


def _time_shares(reply: pb.DescribeReply) -> dict[str, float]:
    said = reply.time_shares
    return {
        "computing_share": said.computing,
        "input_wait_share": said.waiting_for_input,
        "room_wait_share": said.waiting_for_room,
        "averaging_share": said.averaging,
        "flops_utilisation": said.utilisation,
    }
