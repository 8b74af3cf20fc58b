"""`[averaging]`: how the peers of a stage average."""

from dataclasses import dataclass
from typing import Literal, assert_never

from swarm.config.checks import STRICT, require, require_at_least_one, require_not_negative, require_usable_numbers

CompressedCodec = Literal["fp16", "bf16", "int8", "int4", "topk", "dct-topk", "dct-lowpass"]
CodecName = Literal["fp32", CompressedCodec]
Values = Literal["lut8", "2bit", "sign"]
Indices = Literal["12bit", "elias-fano"]
Quorum = Literal["majority", "available"]


@dataclass(frozen=True, kw_only=True)
class AveragingConfig:
    """How the holders of a block average."""

    __pydantic_config__ = STRICT

    codec: CodecName = "fp32"
    """How contributions and results are encoded on the wire; docs/protocol.md has the layouts and sizes."""
    top_k: int = 64
    """`topk` and `dct-topk`: coefficients kept of each tile of 4096; a multiple of 4."""
    values: Values = "2bit"
    """`topk` and `dct-topk`: kept values as 8 bits by lookup table, as a sign and one of two magnitudes a tile, or as
    a sign and one magnitude a tile."""
    indices: Indices = "elias-fano"
    """`topk` and `dct-topk`: places of the kept values as 12 bits each, or entropy-coded in a fixed size."""
    feedback_decay: float = 0.95
    """Share of the residual (what encoding dropped) that a member adds to its next contribution, with the codecs that
    drop much: `int4`, `topk`, `dct-topk`, `dct-lowpass`. 0 turns error feedback off."""
    gather_members: int = 4
    """`topk` and `dct-topk`: largest group in which every member sends its contribution to every other one. In larger
    ones each tile has an owner that sums it and encodes the sum again, with four times as many coefficients."""
    clip_to_median: float = 3.0
    """DiLoCo only: a contribution's norm is cut to this many times the median norm of the members; 0 turns it off."""
    overlap_steps: int = 5
    """DiLoCo only: inner steps a peer may take while a round is exchanged; the result is merged as soon as it is
    committed. A few cost no loss (docs/performance.md). 0: the peer waits, and accumulates gradients."""
    num_fragments: int = 1
    """DiLoCo only: a stage is cut into this many parts; each round averages one of them, in turn. At most as many as
    the smallest stage has layers."""
    quorum: Quorum = "available"
    """`majority`: a round needs more than half of the members of the last committed one. `available`: the live peers
    are enough."""

    def __post_init__(self) -> None:
        require_usable_numbers("averaging", self)
        require(
            4 <= self.top_k <= 1024 and self.top_k % 4 == 0,
            f"averaging.top_k must be a multiple of 4 between 4 and 1024, not {self.top_k}",
        )
        require(0 <= self.feedback_decay <= 1, f"averaging.feedback_decay must be in [0, 1], not {self.feedback_decay}")
        require_at_least_one("averaging", self, "gather_members", "num_fragments")
        require_not_negative("averaging", self, "overlap_steps")
        require(
            self.clip_to_median == 0 or self.clip_to_median >= 1,
            f"averaging.clip_to_median must be 0 or at least 1, not {self.clip_to_median}",
        )

    @property
    def needs_majority(self) -> bool:
        """Whether a round needs more than half of the members of the last one; if not, the live peers are enough."""
        match self.quorum:
            case "majority":
                return True
            case "available":
                return False
            case other:
                assert_never(other)
