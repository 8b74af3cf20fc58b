"""What averaging needs of a stage, and the records that pass between the two.

Implemented by swarm.stage. All tensors here are float32 on the CPU, unless they belong to a snapshot.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a member is in its round.

    Attributes:
        round: the round that is being trained.
        lineage: hash chain over the rounds before it.
        run_samples: samples the run had committed when this round began.
        num_samples: samples that count towards the round here.
        committed: microbatches committed here in this round; with DiLoCo none is named, for nobody asks which.
        highest_microbatch: highest index ever seen; -1 for none.
    """

    round: int
    lineage: str
    run_samples: int
    num_samples: int
    committed: frozenset[int]
    highest_microbatch: int


@dataclass(frozen=True, kw_only=True)
class Activity:
    """How a member gets on with its work.

    Attributes:
        quiet_seconds: since it last finished a piece of it.
        longest_seconds: that a piece has taken so far.
        num_bytes: of its parameters: what closing has to pass through.
    """

    quiet_seconds: float
    longest_seconds: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a member brings to a round's average.

    Attributes:
        tensors: a mean over this member's samples: the gradient in the synchronous setting, anchor minus
            weights in DiLoCo. Anything finite where `num_samples` is 0.
        num_samples: behind it: its weight.
        round_samples: of these, the ones that count towards the round.
        committed: the microbatches in it, without the dropped ones; with DiLoCo none is named.
        fragment: which part of the member's parameters it is about.
    """

    tensors: Tensors
    num_samples: int
    round_samples: int
    committed: frozenset[int]
    fragment: int = 0


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """A committed round's average.

    Attributes:
        round: the round that it ends.
        tensors: the weighted mean of the contributions; the same bits at every member. Kept for peers that are
            behind: nobody writes to them.
        num_samples: samples in it.
        squared_norm: of `tensors`, the same bits at every member.
        total_squared_norm: over the whole model in the synchronous setting, else `squared_norm`.
        members: peer ids of those who contributed, in the order of summation.
        lineage: of the round that follows.
        attempts: number of the attempt that succeeded.
        bytes_sent: payload this member sent in it.
        bytes_received: payload it received.
        compression_ratio: see averaging/allreduce.
        seconds: from this member's closing to the commit.
        exchange_seconds: of these, what the exchange itself took here.
        contribution_norm: of this member's own contribution.
        residual_bytes: what error feedback keeps here.
        digest: BLAKE3 over the members and the averaged bytes, in hexadecimal.
        contributed: whether this member is one of `members`.
        partners: where stages share a block, digests of the results that its average was made of.
    """

    round: int
    tensors: Tensors
    num_samples: int
    squared_norm: float
    total_squared_norm: float
    members: tuple[str, ...]
    lineage: str
    attempts: int
    bytes_sent: int
    bytes_received: int
    compression_ratio: float
    seconds: float
    digest: str
    exchange_seconds: float = 0.0
    contribution_norm: float = 0.0
    residual_bytes: int = 0
    contributed: bool = True
    partners: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The whole state at the beginning of a round; nobody writes to its tensors.

    Attributes:
        tensors: anchor and outer optimizer state, of the types that swarm.rpc.wire knows.
        digest: what `apply` gave for this state.
    """

    round: int
    run_samples: int
    lineage: str
    tensors: Tensors
    digest: str


def known(digest: str) -> "asyncio.Future[str]":
    """A digest that need not be waited for."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    future.set_result(digest)
    return future


class RoundMember(Protocol):
    """A stage as its group sees it.

    Calls never overlap, but for `progress`, `activity` and `snapshot`: these come at any time.
    """

    def progress(self) -> Progress:
        """Where the member is now."""
        ...

    def activity(self) -> Activity:
        """How it gets on."""
        ...

    async def close(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        """Freeze this round's contribution and give it.

        Again for the same round: the same contribution, unless `drop` differs.

        Args:
            drop: microbatches that another member counts: they are taken out.
        """
        ...

    async def reopen(self, round_number: int) -> None:
        """The attempt came to nothing: go on training in this round."""
        ...

    async def apply(self, result: RoundResult) -> "asyncio.Future[str]":
        """Take the outer step and begin the next round.

        Gives what will be BLAKE3 over anchor and outer state: of a large state it takes a while, beside training.
        Several may wait for it, so each has to shield it from its own cancellation.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """The state at the beginning of the current round."""
        ...

    async def install(self, snapshot: Snapshot, *, carry: bool = False) -> None:
        """Become that state, dropping everything since. Raises IntegrityError if it does not fit.

        Args:
            carry: no round between took anything from this member. With DiLoCo it keeps what it has learnt, on top of
                that state, for the next round.
        """
        ...
