"""The findings of an audit: figures, and one line for each violation."""

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.types import TRAINER_STAGE, Block

MAX_LINES = 1000
"""Violations that are kept word for word: if a file is missing, there is one for every round."""
_NAMED = 8

TRAINER_BLOCK = Block(TRAINER_STAGE)
"""Takes the place of a block for what trainers log."""


@dataclass
class Findings:
    duplicates: int = 0
    """Microbatches that count once more than they should, added up over blocks and fragments."""
    missing: int = 0
    """Synchronous: microbatches that a committed round lacks, added up over the blocks."""
    rolled_back: int = 0
    digests_compared: int = 0
    digests_differing: int = 0
    events: int = 0
    num_violations: int = 0
    violations: list[str] = field(default_factory=list)
    liars: dict[str, dict[str, str]] = field(default_factory=dict)
    """By member that is named as a liar: the files that name it, each with its reason. That refutes nothing."""

    def violation(
        self,
        what: str,
        *,
        block: Block,
        round: int | None = None,
        microbatches: Collection[int] = (),
        files: Collection[str] = (),
    ) -> None:
        """Note something that refutes the run, or leaves it unproven."""
        self.num_violations += 1
        if len(self.violations) >= MAX_LINES:
            return
        place = ["trainer" if block == TRAINER_BLOCK else f"stage {block}"]
        if round is not None:
            place.append(f"round {round}")
        if microbatches:
            named = sorted(microbatches)
            some = ", ".join(map(str, named[:_NAMED])) + (f" and {len(named) - _NAMED} more" if named[_NAMED:] else "")
            place.append(f"microbatch {some}")
        behind = f" ({', '.join(sorted(files))})" if files else ""
        self.violations.append(f"{', '.join(place)}: {what}{behind}")
