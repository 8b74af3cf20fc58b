"""The interface of a stage that averaging uses, and the records that they exchange.

stage/member implements it. All tensors are float32 on the CPU, unless they belong to a snapshot.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swarm.training.sketches import Sketched
from swarm.training.tally import EMPTY, Given, Tally

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A member's progress in its round.

    Attributes:
        round: the round that is being trained.
        lineage: hash chain over the rounds before it.
        run_samples: samples that the run had committed when this round began.
        num_samples: samples of this member that count towards the round.
        committed: microbatches that this member has committed in this round. Empty with DiLoCo, which needs no names.
        highest_microbatch: highest index that it has ever seen; -1 for none.
        tally: what peers have given to the rounds before it.
    """

    round: int
    lineage: str
    run_samples: int
    num_samples: int
    committed: frozenset[int]
    highest_microbatch: int
    tally: Tally = EMPTY


@dataclass(frozen=True, kw_only=True)
class Activity:
    """A member's activity, which shows whether it makes progress.

    Attributes:
        quiet_seconds: time since it last finished a piece of work.
        longest_seconds: the longest time that a piece of work has taken so far.
        num_bytes: size of the member's parameters; to close a round, all of them have to be read.
    """

    quiet_seconds: float
    longest_seconds: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """A member's contribution to a round's average.

    Attributes:
        tensors: synchronous: the mean gradient over this member's targets; DiLoCo: anchor minus weights. If
            `num_samples` is 0 they may be any finite numbers.
        num_samples: the number of samples in it.
        num_targets: the number of targets in these samples. It is the contribution's weight.
        round_samples: how many of these samples count towards the round.
        committed: the microbatches in it, without the dropped ones. Empty with DiLoCo.
        fragment: the fragment of the member's parameters that is averaged.
        closing: which of the round's contributions it is. A round that was reopened may have several.
        sketched: what ties it to the answers of this member; None if it is not sketched.
    """

    tensors: Tensors
    num_samples: int
    num_targets: int
    round_samples: int
    committed: frozenset[int] = frozenset()
    fragment: int = 0
    closing: int = 0
    sketched: Sketched | None = None


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """The cost of a committed round to one member, or to one member of each stage together. Used only in reports.

    Attributes:
        compression_ratio: see averaging/vectors/allreduce.
        seconds: time from the member's closing to the commit.
        exchange_seconds: the part of that time which the exchange itself took.
        contribution_norm: norm of the member's own contribution.
        residual_bytes: size of the residual that error feedback keeps.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    compression_ratio: float = 1.0
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    contribution_norm: float = 0.0
    residual_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """A committed round's average.

    Attributes:
        round: the round that it ends.
        tensors: the weighted mean of the contributions, the same bits at every member. They are kept for peers that are
            behind, and must not change.
        num_samples: samples in it.
        squared_norm: the squared norm of `tensors`, the same bits at every member.
        total_squared_norm: synchronous: the squared norm over the whole model; DiLoCo: `squared_norm`.
        members: peer ids of the contributors, in the order of summation.
        lineage: the lineage with which the next round begins.
        attempts: number of the attempt that succeeded.
        digest: BLAKE3 over the members and the averaged bytes, in hexadecimal.
        cost: what the round cost this member; all zero if it took no part.
        closing: see Contribution; None: the newest one is in the average.
        partners: if stages have tied parameters, digests of the results that the block's average was made of.
        amended: the digest of the newest amendment under which it was made, and is applied; empty if there is none.
        given: what each member has given to it; empty if that is not known.
        tally: the block's tally after the round.
    """

    round: int
    tensors: Tensors
    num_samples: int
    squared_norm: float
    total_squared_norm: float
    members: tuple[str, ...]
    lineage: str
    attempts: int
    digest: str
    cost: RoundCost = RoundCost()
    contributed: bool = True
    closing: int | None = None
    partners: tuple[str, ...] = ()
    amended: str = ""
    given: Mapping[str, Given] = field(default_factory=dict)
    tally: Tally = EMPTY


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The whole state at the beginning of a round. Its tensors must not change.

    Attributes:
        tensors: anchor and outer optimizer state, of types that swarm.rpc.wire knows.
        digest: the digest of this state, which `apply` returned.
        tally: the block's tally by then.
    """

    round: int
    run_samples: int
    lineage: str
    tensors: Tensors
    digest: str
    tally: Tally = EMPTY


def known(digest: str) -> "asyncio.Future[str]":
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.set_result(digest)
    return future


class RoundMember(Protocol):
    """The interface of a stage for its averaging group.

    `progress`, `activity`, `set_behind` and `snapshot` may be called at any time. Calls of the others never overlap.
    """

    def progress(self) -> Progress: ...

    def activity(self) -> Activity: ...

    def disproved(self) -> Mapping[str, str]:
        """The members whose answers this one has computed again and found wrong, by id, and what was wrong."""

    def set_behind(self, is_behind: bool) -> None:
        """Note whether the group is at a later round, whose state this member is downloading."""

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        """Freeze this round's contribution and return it.

        Another call for the same round returns the same contribution, unless `drop` differs.

        Args:
            drop: microbatches that another member counts, which are taken out.
        """

    async def reopen(self, round_number: int) -> None: ...

    async def train_on(self) -> None:
        """With DiLoCo, take one inner step more than averaging.overlap_steps while the round is closed, once one is
        due."""

    async def apply(self, result: RoundResult) -> "asyncio.Future[str]":
        """Take the outer step and begin the next round.

        The future gets the BLAKE3 digest of anchor and outer state. For a large state that takes a while, while
        training goes on. Several callers may wait for the future, so each has to shield it from its own cancellation.
        """

    async def snapshot(self) -> Snapshot:
        """The state at the beginning of the current round."""

    async def install(self, snapshot: Snapshot, *, carry: bool = False) -> None:
        """Take over a snapshot's state, and drop all later work. Raises IntegrityError if the snapshot does not fit.
        `carry` says whether this member took no part in the rounds in between. With DiLoCo it then keeps what it has
        learnt, on top of the new state, for the next round."""
