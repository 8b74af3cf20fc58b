"""`[rounds]`: when peers average."""

from dataclasses import dataclass
from typing import Literal

from swarm.config.checks import STRICT, require_not_negative, require_usable_numbers

Setting = Literal["synchronous", "diloco"]


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """When peers that share blocks average."""

    __pydantic_config__ = STRICT

    setting: Setting = "diloco"
    """`synchronous`: one optimizer step a round on the summed gradient, like one process. `diloco`: peers take
    inner steps of their own and average pseudo-gradients at the end of the round."""
    round_samples: int = 256
    """Samples of the whole swarm in one round (one step of the commands); a multiple of the microbatch size, and in the
    synchronous setting at most 262,144 times that. 0 leaves it out, as runs do that begin with a model, and the first
    peer fills in up to 256, or 32 in the synchronous setting, as suits the text."""
    inner_batch_samples: int = 16
    """DiLoCo only: samples a peer accumulates before each inner step; a multiple of the microbatch size. 0 leaves it
    out, and the first peer fills in up to 16, as suits the text."""
    max_staleness: int = 0
    """DiLoCo only: inner steps that a peer may take, as a rule, between a microbatch's forward and the step that uses
    its gradient. A peer computes with at most `1 + max_staleness` inner batches at once. More of them keep it busy over
    longer lines and in deeper pipelines, but a run learns less from each sample (docs/performance.md); a larger
    `inner_batch_samples` does the same, and costs less where the peers are few."""

    def __post_init__(self) -> None:
        require_usable_numbers("rounds", self)
        require_not_negative("rounds", self, "round_samples", "inner_batch_samples", "max_staleness")

    @property
    def synchronous(self) -> bool:
        """Whether the swarm follows the trajectory of a single process."""
        return self.setting == "synchronous"
