"""`[outer]`: DiLoCo's outer optimizer."""

from dataclasses import dataclass, replace

from swarm.config.checks import STRICT, require, require_usable_numbers
from swarm.config.rounds import RoundsConfig

LEARNING_RATE, MOMENTUM = 0.7, 0.9
"""The values of the DiLoCo paper (arXiv 2311.08105)."""
SHORT_MOMENTUM = 0.5
"""The momentum for short rounds: their pseudo-gradients resemble those of the rounds before, so that a larger momentum
would add up too many of them."""
LONG_ROUND = 200
"""A round with at least this many inner batches, of all peers together, is long."""
LEFT_OUT = -1.0


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient.

    If both are left out, they follow from the round: 0.7 and 0.5 where it has fewer than 200 inner batches
    (round_samples / inner_batch_samples), and 0.7 and 0.9 where it has more.
    """

    __pydantic_config__ = STRICT

    learning_rate: float = LEFT_OUT
    """Outer learning rate; -1 leaves it out, which means 0.7 where a momentum is given."""
    momentum: float = LEFT_OUT
    """Nesterov momentum; 0 turns it off. -1 leaves it out, which means 0.9 where a learning rate is given."""

    def __post_init__(self) -> None:
        require_usable_numbers("outer", self)
        require(
            self.learning_rate > 0 or self.learning_rate == LEFT_OUT,
            f"outer.learning_rate must be positive, or -1 to be left out, not {self.learning_rate}",
        )
        require(
            0 <= self.momentum < 1 or self.momentum == LEFT_OUT,
            f"outer.momentum must be in [0, 1), or -1 to be left out, not {self.momentum}",
        )

    def of(self, rounds: RoundsConfig) -> "OuterConfig":
        """The configuration with all values filled in, for a run with these rounds."""
        num_inner_batches = rounds.round_samples / rounds.inner_batch_samples
        if self.learning_rate == self.momentum == LEFT_OUT and num_inner_batches < LONG_ROUND:
            return OuterConfig(learning_rate=LEARNING_RATE, momentum=SHORT_MOMENTUM)
        return replace(
            self,
            learning_rate=LEARNING_RATE if self.learning_rate == LEFT_OUT else self.learning_rate,
            momentum=MOMENTUM if self.momentum == LEFT_OUT else self.momentum,
        )
