"""`[stages]` and `[wire]`: how the layers are cut into stages, and what travels between these."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from swarm.config.checks import AMENDABLE, STRICT, may_change, require, require_usable_numbers
from swarm.machine.words import counted
from swarm.types import LARGEST_STAGE, LARGEST_VARIANT, Block

MOST_PATHS = 1024
"""The most paths of one run: each takes its turn in the order of the microbatches."""
WireDtype = Literal["fp32", "bf16", "fp16", "int8"]
_NEVER = may_change(lambda run: False)


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """How the layers are cut into stages."""

    __pydantic_config__ = STRICT

    num_stages: int = 3
    """Stages in the pipeline; stage 0 also holds the embedding, the last one the head and the loss."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage; empty means as even as possible, the remainder to the middle stages first."""
    variants: tuple[int, ...] = field(default=(), metadata=_NEVER)
    """How many variants each stage has, with parameters of their own (DiPaCo, arXiv 2403.10616): `[1, 4, 4, 1]`. Left
    out, each stage has one. A variant of a stage is a block, which peers serve and average by itself."""
    paths: tuple[tuple[int, ...], ...] = field(default=(), metadata=_NEVER)
    """The paths through the variants: each names one variant of every stage. Microbatches take them in turn. Left out,
    they are all combinations, in the order in which the last stage's variant changes first."""

    def __post_init__(self) -> None:
        require_usable_numbers("stages", self)
        require(
            1 <= self.num_stages <= LARGEST_STAGE + 1,
            f"stages.num_stages must be between 1 and {LARGEST_STAGE + 1}, not {self.num_stages}",
        )
        if self.layers_per_stage:
            require(
                len(self.layers_per_stage) == self.num_stages,
                f"stages.layers_per_stage has {counted(len(self.layers_per_stage), 'entry')} for "
                f"{counted(self.num_stages, 'stage')}",
            )
            require(min(self.layers_per_stage) >= 0, "stages.layers_per_stage must not be negative")
        if self.variants:
            require(
                len(self.variants) == self.num_stages,
                f"stages.variants has {counted(len(self.variants), 'entry')} for {counted(self.num_stages, 'stage')}",
            )
            require(
                all(1 <= number <= LARGEST_VARIANT + 1 for number in self.variants),
                f"stages.variants must be between 1 and {LARGEST_VARIANT + 1}, not {list(self.variants)}",
            )
        require(not self.paths or bool(self.variants), "stages.paths needs stages.variants")
        num_paths = len(self.paths) or math.prod(self.variants)
        require(num_paths <= MOST_PATHS, f"stages.variants makes {num_paths} paths, and a run has at most {MOST_PATHS}")
        for path in self.paths:
            require(
                len(path) == self.num_stages and all(0 <= v < n for v, n in zip(path, self.variants, strict=True)),
                f"stages.paths must name a variant of each stage, of {list(self.variants)}, and {list(path)} does not",
            )
        require(len({*self.paths}) == len(self.paths), "stages.paths names a path twice")
        for stage, number in enumerate(self.variants):
            unused = set(range(number)) - {path[stage] for path in self.all_paths}
            require(not unused, f"no path leads through variant {min(unused, default=0)} of stage {stage}")

    def ends(self, num_layers: int) -> tuple[int, ...]:
        """The numbers of layers after which stages end, without the last one's: as configured, or as even as possible.

        The remainder goes to the middle stages first, because the outer ones also have the embedding and the head.
        """
        sizes = list(self.layers_per_stage)
        if not sizes:
            share, remainder = divmod(num_layers, self.num_stages)
            middle_first = sorted(range(self.num_stages), key=lambda stage: abs(2 * stage - (self.num_stages - 1)))
            sizes = [share + (stage in middle_first[:remainder]) for stage in range(self.num_stages)]
        return tuple(itertools.accumulate(sizes[:-1]))

    @functools.cached_property
    def all_paths(self) -> tuple[tuple[int, ...], ...]:
        """Every path: the variant of each stage that it leads through. A run without variants has one path."""
        return self.paths or tuple(itertools.product(*map(range, self.variants or (1,) * self.num_stages)))

    def classes(self, named: str | Sequence[str | Sequence[str]]) -> dict[Block, str]:
        """The class that `model.custom_class` names for each block. Raises ValueError if a block has none, or two."""
        paths, found = self.all_paths, dict[Block, str]()
        of_paths = (named,) * len(paths) if isinstance(named, str) else named
        require(
            len(of_paths) == len(paths),
            f"model.custom_class has {counted(len(of_paths), 'entry')}, and the run has {counted(len(paths), 'path')}: "
            "each needs one",
        )
        for number, (path, of_path) in enumerate(zip(paths, of_paths, strict=True)):
            of_stages = (of_path,) * self.num_stages if isinstance(of_path, str) else of_path
            require(
                len(of_stages) == self.num_stages,
                f"model.custom_class has {counted(len(of_stages), 'entry')} for path {number}, and the run has "
                f"{counted(self.num_stages, 'stage')}: name one class for the whole path, or one for each stage",
            )
            for block, name in zip(map(Block, range(self.num_stages), path), of_stages, strict=True):
                other = found.setdefault(block, name)
                require(
                    name == other,
                    f"model.custom_class names two classes for stage {block}, {other!r} and {name!r} (of path "
                    f"{number}): paths that share it name the same one",
                )
        return found


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How activations and their gradients travel between stages."""

    __pydantic_config__ = STRICT

    dtype: Literal[WireDtype, "auto"] = field(default="fp32", metadata=AMENDABLE)
    """Type of numbers on the wire; computation stays as it is. `fp16`: with a scale for each tensor, so that small
    gradients survive. `int8`: a byte each, and a scale for every 128. All but `fp32` round numbers; a synchronous run
    then follows one process that rounds at the same places. `auto`, which the first peer replaces:
    `bf16`, but `fp32` in a synchronous run."""
