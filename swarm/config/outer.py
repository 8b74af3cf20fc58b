"""`[outer]`: DiLoCo's outer optimizer."""

from dataclasses import dataclass

from swarm.config.checks import STRICT, require, require_positive, require_usable_numbers


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

    __pydantic_config__ = STRICT

    learning_rate: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Nesterov momentum; 0 turns it off."""

    def __post_init__(self) -> None:
        require_usable_numbers("outer", self)
        require_positive("outer", self, "learning_rate")
        require(0 <= self.momentum < 1, f"outer.momentum must be in [0, 1), not {self.momentum}")
