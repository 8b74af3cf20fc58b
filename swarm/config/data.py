"""`[data]`: the text, and how it becomes microbatches."""

from dataclasses import dataclass

from swarm.config.checks import (
    STRICT,
    is_sha256,
    require,
    require_at_least_one,
    require_not_negative,
    require_usable_numbers,
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and how it becomes microbatches."""

    __pydantic_config__ = STRICT

    dataset: str = "stdlib"
    """`stdlib`, a file, folder or glob of text, or `hf:NAME` for a Hugging Face dataset."""
    hf_config: str = ""
    """Configuration name of the Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    hf_text_field: str = "text"
    """Field of the Hugging Face dataset that holds the text."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    tokenizer_identity: str = ""
    """`bytes`, or the SHA-256 of the tokenizer.json; the first peer fills it in. A trainer may have its copy at another
    path, but it has to be this one."""
    max_tokens: int = 0
    """Use at most this many tokens of the corpus; 0 means all."""
    sequence_length: int = 128
    """Tokens a sample is long."""
    microbatch_size: int = 8
    """Samples in a microbatch."""
    held_out_fraction: float = 0.02
    """Share of the corpus, taken from its end, that is never trained on."""
    seed: int = 0
    """Order of the microbatches, initial weights and dropout all follow from it."""
    digest: str = ""
    """SHA-256 of the tokens and the tokenizer; the first peer fills it in."""

    def __post_init__(self) -> None:
        require_usable_numbers("data", self)
        require(bool(self.dataset), "data.dataset must not be empty")
        require_at_least_one("data", self, "sequence_length", "microbatch_size")
        require_not_negative("data", self, "max_tokens")
        require(
            self.tokenizer_identity in ("", "bytes") or is_sha256(self.tokenizer_identity),
            f"data.tokenizer_identity must be 'bytes' or 64 hexadecimal digits, not {self.tokenizer_identity[:80]!r}",
        )
        require(0 <= self.seed < 1 << 63, f"data.seed must be at least 0 and below 2^63, not {self.seed}")
        require(
            0.0 < self.held_out_fraction < 1.0,
            f"data.held_out_fraction must be between 0 and 1, not {self.held_out_fraction}",
        )

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens that a microbatch predicts."""
        return self.microbatch_size * self.sequence_length
