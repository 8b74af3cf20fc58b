"""Which stages of a run one process serves, as --stage and --path say, and whose code it runs for them."""

import re
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from peers.shared.option_types import taking
from swarm.types import LARGEST_STAGE, Block

if TYPE_CHECKING:
    from swarm.config import RunConfig


@dataclass(frozen=True)
class StageChoice:
    """What one process serves: adjacent stages (2, 1-3, or all of a run, whose number need not be known yet) with all
    their variants, or with those on one path; or one variant of a stage (2.1)."""

    first: int = 0
    last: int | None = None
    """None for the last one of the run."""
    variant: int | None = None
    path: int | None = None

    def __str__(self) -> str:
        if self.variant is not None:
            return f"{self.first}.{self.variant}"
        if self.last is None:
            return "all"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def label(self) -> str:
        of_path = "" if self.path is None else f"path {self.path}"
        return of_path if of_path and self.last is None else f"stage {self}{of_path and ' of '}{of_path}"

    @classmethod
    def parse(cls, word: str) -> "StageChoice | None":
        if word == "all":
            return cls()
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4})|\.(\d{1,4}))?", word, re.ASCII)
        span = match and cls(int(match[1]), int(match[2] or match[1]), int(match[3]) if match[3] else None)
        return span if span and span.first <= (span.last or 0) <= LARGEST_STAGE else None

    def stages(self, num_stages: int) -> range:
        """These stages of a run. Raises ValueError if the run has not all of them."""
        last = num_stages - 1
        if self.last is not None and self.last > last:
            known = f"the stages 0 to {last}" if last else "stage 0 alone"
            raise ValueError(f"--stage {self} does not exist: this run has {known}")
        return range(self.first, (last if self.last is None else self.last) + 1)

    def of(self, config: "RunConfig") -> tuple[Block, ...]:
        """These blocks of a run. Raises ValueError if the run has not all of them."""
        stages = self.stages(config.stages.num_stages)
        num_paths = len(config.paths)
        if self.path is not None and self.path >= num_paths:
            known = f"the paths 0 to {num_paths - 1}" if num_paths > 1 else "path 0 alone"
            raise ValueError(f"--path {self.path} does not exist: this run has {known}")
        there = config.blocks if self.path is None else config.blocks_of(self.path)
        blocks = tuple(block for block in there if block.stage in stages and self.variant in (None, block.variant))
        if not blocks:
            raise ValueError(f"--stage {self} does not exist: this run has the blocks {', '.join(map(str, there))}")
        return blocks


StagesOrAuto = Annotated[
    StageChoice | Literal["auto"],
    taking(
        "a stage (2), adjacent ones (1-3), a variant of one (2.1), all, or auto", "INT|INT-INT|INT.INT|{all,auto}",
        lambda word: word if word == "auto" else StageChoice.parse(word),
    ),
]  # fmt: skip


def not_allowed(config: "RunConfig", blocks: Iterable[Block], allowed: Collection[str]) -> str:
    """What is to be done before this machine imports the custom classes of these blocks; empty if the user has allowed
    them, or there are none."""
    missing = sorted({config.classes[block] for block in blocks} - {"", *allowed})
    if not missing:
        return ""
    return (
        f"this run would have this machine import and run {', '.join(map(repr, missing))}, its model.custom_class: "
        f"if you trust that code, add {' '.join(f'--allow-class {shlex.quote(name)}' for name in missing)}"
    )
