"""Which rounds have a checkpoint, and which checkpoints stay. It imports no torch, because options have it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Keeping:
    every: int = 10
    """Rounds from one checkpoint to the next."""
    keep: int = 3
    """How many checkpoints stay."""

    @property
    def most(self) -> int:
        """One more than stay: for a while the next checkpoint is whole, and the oldest is not deleted yet."""
        return self.keep + 1

    def is_due(self, round_number: int) -> bool:
        return round_number % self.every == 0

    def superfluous(self, rounds: Sequence[int], former: Collection[int]) -> set[int]:
        """Which checkpoints of one block may go, by their rounds, which are in ascending order: all but the newest few.
        Of those between multiples of `every`, which leaving peers wrote, only the newest stays.

        Of those in between that were there when this peer started, the `former`, `keep` may stay, because `every` may
        have been another number then.
        """
        regular = [number for number in rounds if self.is_due(number)]
        between = [number for number in rounds if not self.is_due(number)]
        earlier = [number for number in between if number in former]
        own = [number for number in between if number not in former]
        first_kept = regular[-self.keep] if len(regular) >= self.keep else 0
        passed = [number for number in earlier if number < first_kept]
        return {*regular[: -self.keep], *own[:-1], *earlier[: -self.keep], *passed}
