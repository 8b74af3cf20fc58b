"""The interface of a setting: the decisions about microbatches that differ between the two settings.

A setting decides for one peer, by what that peer knows. Runs on the event loop; never computes.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from swarm.stage.computation import Computation
from swarm.stage.ledger import Entry
from swarm.training.round_member import RoundResult
from swarm.training.samples import Microbatch


@dataclass(frozen=True, kw_only=True)
class Start:
    """Instructions to begin a computation for a call.

    Attributes:
        accumulate: whether its gradient joins this stage's sum.
        adopts, earlier: computations of the same microbatch that were begun before, as in computation.Order.
        instead_of: an earlier computation of the same microbatch, which is to be undone.
    """

    microbatch: Microbatch
    accumulate: bool
    adopts: Computation | None = None
    earlier: Computation | None = None
    instead_of: Computation | None = None


class Setting(ABC):
    """What a setting does not override holds nothing up: there are no limits but slots and memory, and no turns."""

    # -- which microbatches are admitted -----------------------------------------------------------------------------

    @abstractmethod
    def check(self, microbatch: Microbatch) -> None:
        """Raise the error that answers a call if its microbatch is not wanted here now, even with slots free.

        Raises:
            MalformedMessage, Overloaded, NotReady, StaleMicrobatch.
        """

    def queue_of(self, round_number: int) -> int:
        """The number of the set of slots that a round's microbatches take. Sets take no slots from each other."""
        return 0

    def room(self) -> int | None:
        """The most microbatches that may be in flight, whether the peer is busy or not; None for any number."""
        return None

    def has_its_part(self, num_in_flight: int) -> bool:
        """Whether a peer with this many microbatches of a round in flight leaves the rest of the round to others."""
        return False

    def is_awaited(self, microbatch: Microbatch) -> bool:
        """Whether all that have slots may be waiting for this microbatch's acknowledgement, so that a call for it must
        not have to wait for a slot."""
        return False

    # -- when microbatches are computed ------------------------------------------------------------------------------

    def due_round(self, microbatch: Microbatch) -> int:
        """The round that must have begun here before a microbatch is computed."""
        return 0

    @abstractmethod
    def require_of_its_round(self, microbatch: Microbatch) -> None:
        """Raise MalformedMessage if a microbatch cannot be of the round that it names."""

    def turn(self, age: int) -> AbstractAsyncContextManager[None]:
        """The turn that a microbatch that is accumulated holds from its forward until its gradient is in the sum."""
        return contextlib.nullcontext()

    @property
    def num_waiting(self) -> int:
        """Microbatches that wait for their turn."""
        return 0

    @abstractmethod
    def look(self) -> None:
        """Give turns to waiting microbatches, because gradients were acknowledged, used in a step or taken out."""

    # -- what a call gets --------------------------------------------------------------------------------------------

    def known(self, microbatch: Microbatch) -> Computation | None:
        """A computation of the same microbatch at this peer with the same numbers, if there is one. With DiLoCo there
        is none, because a call that asks again may bring other activations."""
        return None

    @abstractmethod
    def counts(self, microbatch: Microbatch) -> bool:
        """Whether a microbatch is to count at this stage, in this round."""

    @property
    def takes_gradients(self) -> bool:
        """Whether a gradient may join the sum now."""
        return True

    @abstractmethod
    def repeated(self, microbatch: Microbatch, entry: Entry[Computation]) -> Computation | Start:
        """Decide about a repeated microbatch, which counts here and is in the ledger: join a computation, or start.
        Raises StaleMicrobatch if nothing is left to do for the microbatch."""

    # -- how microbatches end ----------------------------------------------------------------------------------------

    @abstractmethod
    def acknowledged(self, microbatch: Microbatch) -> None:
        """Commit a microbatch in the ledger. The setting decides for which round, and whether its computation is
        kept."""

    @abstractmethod
    def may_be_joined(self, computation: Computation) -> bool:
        """Whether a retry that comes later can use a computation that no call waits for now."""

    # -- rounds ------------------------------------------------------------------------------------------------------

    def committed(self) -> frozenset[int]:
        """The microbatches that this peer names to others as committed in this round. With DiLoCo no peer asks."""
        return frozenset()

    def refuse_gradients(self, drop: Collection[int]) -> list[Entry[Computation]] | None:
        """Let no further gradient join the round, which is about to end. Another member counts the microbatches `drop`.

        Returns the entries that must be undone before that, or None if training goes on meanwhile.
        """
        return None

    @abstractmethod
    def round_began(self) -> None:
        """Forget the microbatches that cannot be repeated any more."""

    @abstractmethod
    def squared_norm(self, result: RoundResult) -> float:
        """The squared norm that is reported for a round's average."""
