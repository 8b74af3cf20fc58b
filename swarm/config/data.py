"""`[data]`: the text, and how it becomes microbatches."""

from dataclasses import dataclass
from typing import Literal

from swarm.config.checks import (
    STRICT,
    is_sha256,
    require,
    require_at_least_one,
    require_not_negative,
    require_usable_numbers,
)

Format = Literal["text", "chat", "completion"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and how it becomes microbatches."""

    __pydantic_config__ = STRICT

    dataset: str = "stdlib"
    """`stdlib`, a file, folder or glob, or `hf:NAME` for a Hugging Face dataset. Files that end in `.jsonl`, `.ndjson`
    or `.parquet` have rows with named fields, all others are text."""
    hf_config: str = ""
    """Configuration name of the Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    text_field: str = "text"
    """Field of a row that holds the text, where `format` is `text`."""
    tokenizer: str = "bytes"
    """`bytes`, a folder with a tokenizer.json, the path of one, or the name of a model on the hub. The first peer
    publishes `served` where it is not `bytes`: others have the files from the run's peers."""
    tokenizer_identity: str = ""
    """`bytes`, or the SHA-256 of the tokenizer.json; the first peer fills it in."""
    tokenizer_files: str = ""
    """Digest of the tokenizer's files, the chat template included, by which peers give them to others; empty for
    `bytes`; the first peer fills it in."""
    max_tokens: int = 0
    """Use at most this many tokens of the corpus; 0 means all."""
    sequence_length: int = 128
    """Tokens a sample is long."""
    microbatch_size: int = 8
    """Samples in a microbatch."""
    format: Format = "text"
    """What is learnt. `text`: every next token of texts. `chat`: what the assistant says in conversations, which are
    rows with `messages` that have `role` and `content`; the tokenizer's chat template makes them texts. `completion`:
    the `completion` of rows that have a `prompt` too, and the token that ends it."""
    packing: bool = True
    """With `chat` and `completion`: several documents (conversations, say) share a sample, each without seeing the
    others. Otherwise each has a sample of its own, with padding. Texts are cut into samples one after another."""
    too_long: Literal["cut", "drop"] = "cut"
    """With `chat` and `completion`: what becomes of a document that has more than `sequence_length` + 1 tokens."""
    held_out_fraction: float = 0.02
    """Share of the corpus, taken from its end, that is never trained on."""
    seed: int = 0
    """Order of the microbatches, initial weights and dropout all follow from it."""
    digest: str = ""
    """SHA-256 of the tokens and the tokenizer; the first peer fills it in."""

    def __post_init__(self) -> None:
        require_usable_numbers("data", self)
        require(bool(self.dataset), "data.dataset must not be empty")
        require(
            self.dataset != "stdlib" or not self.has_targets,
            f"data.format {self.format!r} needs a data.dataset with such rows: a JSONL or Parquet file, a folder or "
            "glob of them, or hf:NAME",
        )
        require_at_least_one("data", self, "sequence_length", "microbatch_size")
        require_not_negative("data", self, "max_tokens")
        require(
            self.tokenizer_identity in ("", "bytes") or is_sha256(self.tokenizer_identity),
            f"data.tokenizer_identity must be 'bytes' or 64 hexadecimal digits, not {self.tokenizer_identity[:80]!r}",
        )
        require(
            not self.tokenizer_files or is_sha256(self.tokenizer_files),
            f"data.tokenizer_files must be 64 hexadecimal digits, not {self.tokenizer_files[:80]!r}",
        )
        require(0 <= self.seed < 1 << 63, f"data.seed must be at least 0 and below 2^63, not {self.seed}")
        require(
            0.0 < self.held_out_fraction < 1.0,
            f"data.held_out_fraction must be between 0 and 1, not {self.held_out_fraction}",
        )

    @property
    def has_targets(self) -> bool:
        """Whether samples say which of their tokens count."""
        return self.format != "text"

    @property
    def is_packed(self) -> bool:
        """Whether several documents share a sequence, and do not see each other."""
        return self.has_targets and self.packing

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens that a microbatch predicts."""
        return self.microbatch_size * self.sequence_length
