"""`[optimizer]`: the optimizer that steps along gradients, and its learning rate."""

from dataclasses import dataclass, field
from typing import Literal

from swarm.config.checks import (
    AMENDABLE,
    STRICT,
    require,
    require_not_negative,
    require_positive,
    require_usable_numbers,
)
from swarm.config.schedule import Schedule, check_schedule


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon: the inner optimizer of DiLoCo, the only one of the synchronous setting."""

    __pydantic_config__ = STRICT

    name: Literal["auto", "adamw", "muon"] = "auto"
    """`adamw`; or `muon`: Muon for the matrices of layers (with LoRA, of adapters), as torch.optim.Muon has it, and
    AdamW for everything else: embedding, positions, head, norms, biases. `auto` is `muon` for DiLoCo's
    inner steps where a model is trained from drawn weights and a step has at least 8 tokens for each column of the
    model (inner_batch_samples x sequence_length, against d_model); and `adamw` otherwise."""
    learning_rate: float = field(default=0.0, metadata=AMENDABLE)
    """Peak learning rate. 0 leaves it out, and the first peer fills in what suits the run: 1e-3 where weights are
    drawn, 2e-5 where a model is trained further, and 2e-4 for adapters (LoRA)."""
    beta1: float = field(default=0.9, metadata=AMENDABLE)
    """AdamW: decay of the first moment."""
    beta2: float = field(default=0.95, metadata=AMENDABLE)
    """AdamW: decay of the second moment."""
    epsilon: float = field(default=1e-8, metadata=AMENDABLE)
    """AdamW: added to the root of the second moment."""
    moments: Literal["fp32", "int8"] = "fp32"
    """How the optimizer's memory of a matrix, its moments or its momentum, is held between steps: `int8` takes a byte a
    number instead of four, by dynamic quantisation in blocks of 256 (arXiv 2110.02861). Not that of vectors and of
    matrices below 4,096 numbers. Checkpoints are the same with both."""
    momentum: float = field(default=0.95, metadata=AMENDABLE)
    """Muon: decay of the momentum."""
    nesterov: bool = field(default=True, metadata=AMENDABLE)
    """Muon: Nesterov's momentum."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = field(default="match_rms_adamw", metadata=AMENDABLE)
    """Muon: the factor for the learning rate of a matrix. `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), which makes
    steps as large as AdamW's, so that one learning rate and decay suit both (arXiv 2502.16982). `original`:
    sqrt(max(1, rows / columns))."""
    weight_decay: float = field(default=0.0, metadata=AMENDABLE)
    """Decoupled decay, on matrices only."""
    clip_norm: float = field(default=1.0, metadata=AMENDABLE)
    """Largest norm of a gradient; 0 turns clipping off. Over the whole model in the synchronous setting, over
    a peer's stage in DiLoCo's inner steps."""
    schedule: Schedule = field(default="auto", metadata=AMENDABLE)
    """Shape after the warm-up; `cosine-restarts` begins again at the peak every `restart_samples`. `auto` is `cosine`
    where `total_samples` are given, and else `constant`; the first peer fills it in."""
    warmup_samples: int = field(default=-1, metadata=AMENDABLE)
    """Samples over which the rate rises linearly. -1 leaves them out, which means none where weights are drawn, and
    else a twentieth of `total_samples`, or a round; the first peer fills it in."""
    total_samples: int = field(default=0, metadata=AMENDABLE)
    """Samples at which the rate reaches its floor; needed by `linear` and `cosine`. `--steps` of the first peer fills
    it in."""
    restart_samples: int = field(default=0, metadata=AMENDABLE)
    """Samples between two restarts; needed by `cosine-restarts`."""
    final_fraction: float = field(default=0.1, metadata=AMENDABLE)
    """Floor, as a share of the peak."""

    def __post_init__(self) -> None:
        require_usable_numbers("optimizer", self)
        require_positive("optimizer", self, "epsilon")
        require_not_negative(
            "optimizer", self, "learning_rate", "weight_decay", "clip_norm", "total_samples", "restart_samples"
        )
        require(
            self.warmup_samples >= -1,
            f"optimizer.warmup_samples must not be negative, or -1 to be left out, not {self.warmup_samples}",
        )
        for name in ("beta1", "beta2", "momentum"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name} must be in [0, 1), not {getattr(self, name)}")
        check_schedule(self)
        require(0 <= self.final_fraction <= 1, f"optimizer.final_fraction must be in [0, 1], not {self.final_fraction}")
