"""`[stages]`: how the layers are cut into stages."""

from dataclasses import dataclass

from swarm.config.checks import STRICT, require, require_usable_numbers
from swarm.machine.words import counted


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """How the layers are cut into stages."""

    __pydantic_config__ = STRICT

    num_stages: int = 3
    """Stages in the pipeline; stage 0 also holds the embedding, the last one the head and the loss."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage; empty means as even as possible, the remainder to the middle stages first."""

    def __post_init__(self) -> None:
        require_usable_numbers("stages", self)
        require(1 <= self.num_stages <= 4096, f"stages.num_stages must be between 1 and 4096, not {self.num_stages}")
        if self.layers_per_stage:
            require(
                len(self.layers_per_stage) == self.num_stages,
                f"stages.layers_per_stage has {counted(len(self.layers_per_stage), 'entry')} for "
                f"{counted(self.num_stages, 'stage')}",
            )
            require(min(self.layers_per_stage) >= 0, "stages.layers_per_stage must not be negative")
