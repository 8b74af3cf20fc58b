"""Rounds whose weights are held for texts and evaluations, while training goes on to later rounds.

Anchors are never written to, so a held one needs no copy. It takes memory only once the stage itself has dropped it. A
text's round is held for a while after its last session, because the text may come back if another peer on its path
failed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from swarm.errors import Overloaded, RoundMismatch
from swarm.model.stage_module import StageModule, with_weights
from swarm.rpc.callers import Caller
from swarm.stage.buckets import Tensors, moved

MAX_ROUNDS, MAX_ROUNDS_EACH, MAX_ROUNDS_OF_USER = 4, 3, 2
"""Rounds used at once: in all, by one caller, and at stage 0, where callers are users, by one of these. Each is another
copy of the stage's weights, unless it is the present one or the one before. New texts are given no more than the second
number, since the peer that carries them all is one caller at the next stage."""
LINGER_SECONDS = 60.0
"""How long a round is held after its last session."""
ROUND_SECONDS = 5.0
"""Longest wait for a round that the stage before has begun and this one has not."""


class HeldRound:
    """A round's weights.

    Attributes:
        anchor: the weights, on the device where the stage keeps anchors.
        users: the callers whose sessions and evaluations compute with it, or may have to, and how many of these each
            has.
        wanted_until: the time until which it is held although nothing uses it, by the loop's clock.
    """

    def __init__(self, number: int, parameters: Mapping[str, torch.Tensor]) -> None:
        self.number = number
        self.users: Counter[Caller] = Counter()
        self.unused_since = 0.0
        self.wanted_until = 0.0
        self.anchor = parameters
        self._parameters = dict(parameters)
        self._module: StageModule | None = None

    def on(self, device: torch.device) -> Tensors:
        """The weights on a device, where they stay from now on. To be called on the compute thread."""
        if any(value.device != device for value in self._parameters.values()):
            # A text moves them in inference mode, and for tensors of that mode evaluations would be compiled anew.
            with torch.inference_mode(False):
                self._parameters = moved(self._parameters, device)
        return self._parameters

    def module(self, own: StageModule, device: torch.device) -> StageModule:
        """The stage's module with these weights on a device, where they stay from now on. To be called on the compute
        thread."""
        if self._module is None:
            self._module = with_weights(own, self.on(device))
        return self._module


@dataclass(eq=False)
class HeldRounds:
    anchor: Callable[[int], Mapping[str, torch.Tensor] | None]
    """Gives the weights that began a round, if the stage has them."""
    present: Callable[[], int]
    """Gives the round that the stage is at."""
    max_each: int = MAX_ROUNDS_EACH
    """The most rounds that one caller may use at once."""
    _held: dict[int, HeldRound] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._held)

    def choose(self, newest: int, caller: Caller) -> int:
        """Choose the round of a caller's new session: `newest`, or an earlier round that some session uses already.

        The earlier round is chosen if it is the last one before `newest`, which every peer of a stage still has, held
        or not. It is also chosen if no more rounds may be used, and is one of the caller's own if the caller uses as
        many as it may.
        """
        used = {number for number, held in self._held.items() if held.users}
        own = {number for number in used if caller in self._held[number].users}
        has_share = len(own) >= self.max_each
        earlier = [number for number in (own if has_share else used) if number <= newest]
        is_full = has_share or len(used) >= MAX_ROUNDS_EACH
        return max(earlier) if earlier and (is_full or max(earlier) >= newest - 1) else newest

    def nearest(self, number: int) -> int:
        """The round nearest to `number`, among those whose weights are here.

        With DiLoCo stages may be rounds apart, and a stage that is ahead has dropped the weights of another stage's
        round.
        """
        present = self.present()
        kept = {recent for recent in (present - 1, present) if self.anchor(recent) is not None}
        return min(kept | self._held.keys(), key=lambda here: (abs(here - number), here), default=present)

    def find(self, number: int) -> HeldRound:
        """A round's weights, held or not. Raises RoundMismatch if they are not here. From any thread."""
        anchor, held = self.anchor(number), self._held.get(number)
        if held is not None and (anchor is None or anchor is held.anchor):
            return held
        if anchor is None:
            present = self.present()
            raise RoundMismatch(f"round {number} is not kept, this peer is at {present}")
        # A held round of this number belongs to an earlier state of the stage.
        return HeldRound(number, anchor)

    @contextmanager
    def held(self, number: int, caller: Caller, *, linger_seconds: float = LINGER_SECONDS) -> Iterator[HeldRound]:
        """Hold a round's weights for a caller while the block runs, and for a while after it. Raises RoundMismatch if
        the weights are not here, and Overloaded if too many other rounds are held, in all or for this caller."""
        found = self.find(number)
        if sum(caller in other.users for other in self._held.values() if other is not found) >= self.max_each:
            raise Overloaded(f"this caller uses {self.max_each} other rounds already", retry_after_seconds=1.0)
        if self._held.get(number) is not found:
            self._make_room(number)
            self._held[number] = found
        found.users[caller] += 1
        try:
            yield found
        finally:
            found.users -= Counter([caller])
            loop = asyncio.get_running_loop()
            found.unused_since = loop.time()
            found.wanted_until = max(found.wanted_until, loop.time() + linger_seconds)
            loop.call_at(found.wanted_until, self._forget, found)

    def _make_room(self, number: int) -> None:
        if number in self._held or len(self._held) < MAX_ROUNDS:
            return
        unused = [held for held in self._held.values() if not held.users]
        if not unused:
            raise Overloaded(f"the weights of {MAX_ROUNDS} rounds are held already", retry_after_seconds=1.0)
        del self._held[min(unused, key=lambda held: held.unused_since).number]

    def _forget(self, held: HeldRound) -> None:
        is_wanted = held.users or asyncio.get_running_loop().time() < held.wanted_until
        if not is_wanted and self._held.get(held.number) is held:
            del self._held[held.number]
