"""Rounds whose weights are held for sessions, while training goes on to later ones.

Used by stage/generation on the event loop. Anchors are never written to, so to hold one is to keep it: it takes memory
once the stage itself has let go of it. A round is held for a while after its last session, since a text whose path
broke elsewhere comes back.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from swarm.errors import Overloaded, RoundMismatch
from swarm.stage.anchors import moved
from swarm.stage.buckets import Tensors

MAX_ROUNDS = 3
"""Rounds held at once. Each is another copy of the stage's weights, unless it is the present one or the one before."""
LINGER_SECONDS = 60.0
"""For how long a round is held after its last session."""


class HeldRound:
    """A round's weights.

    Attributes:
        anchor: the weights as the stage had them.
        casts: with autocast, what products of matrices take instead of some weights.
        num_users: sessions that compute with it, or may have to.
    """

    def __init__(self, number: int, parameters: Mapping[str, torch.Tensor]) -> None:
        self.number = number
        self.casts: Tensors = {}
        self.num_users = 0
        self.unused_since = 0.0
        self.anchor = parameters
        self._parameters = dict(parameters)

    def on(self, device: torch.device) -> Tensors:
        """The weights on a device, where they stay. On the compute thread."""
        if any(value.device != device for value in self._parameters.values()):
            self._parameters = moved(self._parameters, device)
        return self._parameters


class HeldRounds:
    """One peer's."""

    def __init__(self, anchor: Callable[[int], Mapping[str, torch.Tensor] | None], present: Callable[[], int]) -> None:
        """
        Args:
            anchor: the weights that began a round, if the stage has them.
            present: the round that it is at.
        """
        self._anchor = anchor
        self._present = present
        self._held: dict[int, HeldRound] = {}

    def __len__(self) -> int:
        return len(self._held)

    def choose(self, newest: int) -> int:
        """The round of a new session: that or an earlier one, if a session has that already and it is recent.

        Recent is one that every peer of a stage has, whether or not it is held there.
        """
        used = [number for number, held in self._held.items() if held.num_users and number <= newest]
        if used and (max(used) >= newest - 1 or sum(held.num_users > 0 for held in self._held.values()) >= MAX_ROUNDS):
            return max(used)
        return newest

    @contextmanager
    def held(self, number: int) -> Iterator[HeldRound]:
        """A round's weights, held inside the block and for a while after it.

        Raises:
            RoundMismatch: they are not here.
            Overloaded: too many other rounds are held.
        """
        anchor = self._anchor(number) if number <= self._present() else None
        found = self._held.get(number)
        if found is None or (anchor is not None and anchor is not found.anchor):
            # The stage may have become another state, with another round of this number.
            found = self._hold(number, anchor)
        found.num_users += 1
        try:
            yield found
        finally:
            found.num_users -= 1
            loop = asyncio.get_running_loop()
            found.unused_since = loop.time()
            loop.call_later(LINGER_SECONDS, self._forget, found)

    def _hold(self, number: int, anchor: Mapping[str, torch.Tensor] | None) -> HeldRound:
        if anchor is None:
            present = self._present()
            raise RoundMismatch(f"round {number} is not kept, this peer is at {present}", peer_round=present)
        if number not in self._held and len(self._held) >= MAX_ROUNDS:
            unused = [held for held in self._held.values() if not held.num_users]
            if not unused:
                raise Overloaded(f"the weights of {MAX_ROUNDS} rounds are held for sessions", retry_after_seconds=1.0)
            del self._held[min(unused, key=lambda held: held.unused_since).number]
        held = self._held[number] = HeldRound(number, anchor)
        return held

    def _forget(self, held: HeldRound) -> None:
        unused_seconds = asyncio.get_running_loop().time() - held.unused_since
        if held.num_users == 0 and unused_seconds >= LINGER_SECONDS and self._held.get(held.number) is held:
            del self._held[held.number]
