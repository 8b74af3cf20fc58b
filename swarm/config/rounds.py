"""`[rounds]`, `[averaging]` and `[outer]`: when and how peers average, and DiLoCo's outer optimizer."""

from dataclasses import dataclass, field, replace
from typing import Literal

from swarm.config.checks import (
    ADDED,
    AMENDABLE,
    MAY_CHANGE,
    STRICT,
    may_change,
    require,
    require_at_least_one,
    require_not_negative,
    require_usable_numbers,
)

Setting = Literal["synchronous", "diloco"]
CompressedCodec = Literal["fp16", "bf16", "int8", "int4", "topk", "dct-topk", "dct-lowpass"]
CodecName = Literal["fp32", CompressedCodec]
EXACT_TWICE = "fp32", "fp16", "bf16"
"""The codecs whose decoded numbers are encoded again without loss."""
Values = Literal["lut8", "2bit", "sign"]
Indices = Literal["12bit", "elias-fano"]
Quorum = Literal["majority", "available"]
LEARNING_RATE, MOMENTUM = 0.7, 0.9
"""The values of the DiLoCo paper (arXiv 2311.08105)."""
SHORT_MOMENTUM = 0.5
"""The momentum for short rounds: their pseudo-gradients resemble those of the rounds before, so that a larger momentum
would add up too many of them."""
LONG_ROUND = 200
"""A round with at least this many inner batches, of all peers together, is long."""
LEFT_OUT = -1.0
_TO_DILOCO = may_change(lambda run: not run.rounds.synchronous)
"""For peers of the last release a synchronous round's number determines its microbatches, so that after a change it
would repeat some."""


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """When the peers of a stage average."""

    __pydantic_config__ = STRICT

    setting: Setting = field(default="diloco", metadata=_TO_DILOCO)
    """`synchronous`: one optimizer step a round on the summed gradient, like one process. `diloco`: peers take
    inner steps of their own and average pseudo-gradients at the end of the round."""
    round_samples: int = field(default=256, metadata={**_TO_DILOCO, **AMENDABLE})
    """Samples of the whole swarm in one round (one step of the commands); a multiple of the microbatch size, and in the
    synchronous setting at most 262,144 times that. 0 leaves it out, as runs do that begin with a model, and the first
    peer fills in up to 256, or 32 in the synchronous setting, as suits the text."""
    inner_batch_samples: int = field(default=16, metadata=MAY_CHANGE)
    """DiLoCo only: samples a peer accumulates before each inner step; a multiple of the microbatch size. 0 leaves it
    out, and the first peer fills in up to 16, as suits the text."""
    max_staleness: int = 0
    """DiLoCo only: inner steps that a peer may take, as a rule, between a microbatch's forward and the step that uses
    its gradient. A peer computes with at most `1 + max_staleness` inner batches at once. More of them keep it busy over
    longer lines and in deeper pipelines, but a run learns less from each sample (docs/performance.md); a larger
    `inner_batch_samples` does the same, and costs less where the peers are few."""

    check_share: float = field(default=0.02, metadata=ADDED)
    """The share of microbatches that a second peer of the stage computes again, to find peers that compute wrongly
    (docs/security.md); with DiLoCo, but for those from a round's beginning, where a stage has four peers or more. Each
    costs the second peer as much as a microbatch. 0: none, and in the synchronous setting what peers contribute is not
    tied to what they have answered.
    """

    def __post_init__(self) -> None:
        require_usable_numbers("rounds", self)
        require(0 <= self.check_share <= 1, f"rounds.check_share must be in [0, 1], not {self.check_share}")
        require_not_negative("rounds", self, "round_samples", "inner_batch_samples", "max_staleness")

    @property
    def synchronous(self) -> bool:
        return self.setting == "synchronous"


@dataclass(frozen=True, kw_only=True)
class AveragingConfig:
    """How the holders of a block average."""

    __pydantic_config__ = STRICT

    codec: CodecName = field(default="fp32", metadata=AMENDABLE)
    """How contributions and results are encoded on the wire; docs/protocol.md has the layouts and sizes."""
    top_k: int = field(default=64, metadata=AMENDABLE)
    """`topk` and `dct-topk`: coefficients kept of each tile of 4096; a multiple of 4."""
    values: Values = field(default="2bit", metadata=AMENDABLE)
    """`topk` and `dct-topk`: kept values as 8 bits by lookup table, as a sign and one of two magnitudes a tile, or as
    a sign and one magnitude a tile."""
    indices: Indices = field(default="elias-fano", metadata=AMENDABLE)
    """`topk` and `dct-topk`: places of the kept values as 12 bits each, or entropy-coded in a fixed size."""
    feedback_decay: float = field(default=0.95, metadata=AMENDABLE)
    """Share of the residual (what encoding dropped) that a member adds to its next contribution, with the codecs that
    drop much: `int4`, `topk`, `dct-topk`, `dct-lowpass`. 0 turns error feedback off."""
    gather_members: int = field(default=4, metadata=AMENDABLE)
    """`topk` and `dct-topk`: largest group in which every member sends its contribution to every other one. In larger
    ones each tile has an owner that sums it and encodes the sum again, with four times as many coefficients."""
    clip_to_median: float = field(default=3.0, metadata=AMENDABLE)
    """DiLoCo only: a contribution's norm is cut to this many times the median norm of the members; 0 turns it off."""
    overlap_steps: int = field(default=5, metadata=AMENDABLE)
    """DiLoCo only: inner steps a peer may take while a round is exchanged; the result is merged as soon as it is
    committed. A few cost no loss (docs/performance.md). 0: the peer waits, and accumulates gradients."""
    num_fragments: int = 1
    """DiLoCo only: a stage is cut into this many parts; each round averages one of them, in turn. At most as many as
    the smallest stage has layers."""
    group_size: int = field(default=0, metadata=ADDED)
    """DiLoCo only, with the codecs `fp32`, `fp16` and `bf16` and `quorum = "available"`: more members than this average
    in groups of so many, drawn anew for each attempt, and then the groups' averages; a group in which a member dies
    contributes later. 0: all average in one group, and one death voids the exchange of all."""
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
        require_not_negative("averaging", self, "overlap_steps", "group_size")
        require(self.group_size != 1, "averaging.group_size must be 0 or at least 2, not 1")
        require(
            self.group_size == 0 or self.codec in EXACT_TWICE,
            f"averaging.group_size is for the codecs {', '.join(EXACT_TWICE)}, which lose nothing when a result is "
            f"encoded again; averaging.codec is {self.codec}",
        )
        require(
            self.group_size == 0 or self.quorum == "available",
            "averaging.group_size is for averaging.quorum = 'available' only: the few members of the last exchange "
            "decide a round",
        )
        require(
            self.clip_to_median == 0 or self.clip_to_median >= 1,
            f"averaging.clip_to_median must be 0 or at least 1, not {self.clip_to_median}",
        )

    @property
    def needs_majority(self) -> bool:
        """Whether a round needs more than half of the members of the last one; if not, the live peers are enough."""
        return self.quorum == "majority"


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient.

    If both are left out, they follow from the round: 0.7 and 0.5 where it has fewer than 200 inner batches
    (round_samples / inner_batch_samples), and 0.7 and 0.9 where it has more.
    """

    __pydantic_config__ = STRICT

    learning_rate: float = field(default=LEFT_OUT, metadata=AMENDABLE)
    """Outer learning rate; -1 leaves it out, which means 0.7 where a momentum is given."""
    momentum: float = field(default=LEFT_OUT, metadata=AMENDABLE)
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
