"""`[data]`: the text, and how it becomes microbatches."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from swarm.config.checks import (
    AMENDABLE,
    NO_CHANGE,
    STRICT,
    is_sha256,
    may_change,
    require,
    require_not_negative,
    require_usable_numbers,
)

Format = Literal["text", "chat", "completion"]
HUGGING_FACE, CLASS = "hf:", "class:"
"""What the names of Hugging Face datasets begin with, and those of classes of the user's own."""
WELL_KNOWN = (
    "well-known texts are tiny Shakespeare (https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
    "tinyshakespeare/input.txt), WikiText-2 (hf:Salesforce/wikitext:wikitext-2-raw-v1), TinyStories "
    "(hf:roneneldan/TinyStories), OpenWebText (hf:Skylion007/openwebtext) and C4 (hf:allenai/c4:en)"
)
"""Where they are to be had, for errors that ask for a text."""
MOST_DATASETS = 64
"""The most datasets of one run: each has figures of its own in every evaluation."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and how it becomes microbatches."""

    __pydantic_config__ = STRICT

    dataset: str | tuple[str, ...] = field(default="stdlib", metadata={**NO_CHANGE, **AMENDABLE})
    """`stdlib`, a folder of it (`stdlib:json`), a file, folder or glob, `hf:NAME` (`hf:NAME:CONFIGURATION`) for a
    Hugging Face dataset, `class:package.module:Class` for rows that a class of your own gives, or `dummy` for random
    tokens. Files that end in `.jsonl`, `.ndjson` or `.parquet` have rows with named fields, all others are text. Texts
    and JSONL may be compressed (`.gz`). A list names several datasets: part of each is held out, and has a loss of its
    own."""
    paths: tuple[str, ...] = field(default=(), metadata={**NO_CHANGE, **AMENDABLE})
    """In a run with `stages.variants`: a dataset for each path, named as in `dataset`, which is then left out. Paths
    with the same one take its microbatches in turn. Left out, all paths do so with `dataset`."""
    validation: str = field(default="", metadata=NO_CHANGE)
    """A text of its own for evaluations, named as in `dataset`, of which then nothing is held out. For one dataset."""
    weights: tuple[float, ...] = field(
        default=(), metadata={**may_change(lambda run: not run.data.part_rows), **AMENDABLE}
    )
    """Of several datasets: how much each is trained on. With `[3, 1]` three samples of the first come for one of the
    second, and a dataset that ends begins again. Left out, each sample of all of them comes once in an epoch."""
    hf_config: str = ""
    """Configuration of Hugging Face datasets that name none in `dataset`."""
    hf_split: str = "train"
    """Split of Hugging Face datasets."""
    text_field: str = "text"
    """Field of a row that holds the text, where `format` is `text`."""
    tokenizer: str = field(default="bytes", metadata=NO_CHANGE)
    """`bytes`, a folder with a tokenizer.json, the path of one, the name of a model on the hub, or
    `class:package.module:Class` for a class of your own. The first peer publishes `served` where there are files:
    others have them from the run's peers."""
    tokenizer_identity: str = field(default="", metadata=NO_CHANGE)
    """`bytes`, or the SHA-256 of the tokenizer.json, or of what a class does; the first peer fills it in."""
    tokenizer_files: str = field(default="", metadata=NO_CHANGE)
    """Digest of the tokenizer's files, the chat template included, by which peers give them to others; empty for
    `bytes` and classes; the first peer fills it in."""
    max_tokens: int = 0
    """Use at most this many tokens of each dataset; 0 means all."""
    part_rows: int = 0
    """Hugging Face datasets are read in parts of this many rows, and each part is prepared while the one before it is
    trained on. A part is an epoch, and after a dataset's last row its first ones come again. 0: datasets are prepared
    whole, before training."""
    sequence_length: int = 128
    """Tokens in a sample. 0 leaves it out, as runs do that begin with a model, and the first peer fills in 1024, or as
    many as the model takes, or fewer if the text is small."""
    microbatch_size: int = 8
    """Samples in a microbatch. 0 leaves it out, and the first peer fills in up to 8, as suits the model, the stages and
    the text."""
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
    """Share of each dataset, taken from its end, that is never trained on, unless there is a `validation`. With
    `part_rows` it is the share of a part's rows that is held out, once, at the dataset's beginning."""
    seed: int = 0
    """Order of the microbatches, initial weights and dropout all follow from it."""
    digest: str = field(default="", metadata=AMENDABLE)
    """SHA-256 of the tokens and the tokenizer; the first peer fills it in."""
    dataset_digests: tuple[str, ...] = field(default=(), metadata={**NO_CHANGE, **AMENDABLE})
    """Of several datasets the digest of each, so that trainers put theirs in order; the first peer fills it in."""

    def __post_init__(self) -> None:
        require_usable_numbers("data", self)
        require(not self.paths or self.dataset == "stdlib", "data.paths names all datasets: leave data.dataset out")
        require(not (self.paths and self.weights), "data.weights needs data.dataset: all of data.paths count alike")
        if isinstance(self.dataset, tuple) and len(self.dataset) == 1:
            # A list of one dataset becomes its name, so that either way of writing it makes the same run.
            object.__setattr__(self, "dataset", self.dataset[0])
        self._check_datasets()
        require(
            not {"stdlib", "dummy"} & {one.partition(":")[0] for one in self.datasets} or not self.has_targets,
            f"data.format {self.format!r} needs a data.dataset with such rows: a JSONL or Parquet file, a folder or "
            "glob of them, or hf:NAME",
        )
        require_not_negative("data", self, "sequence_length", "microbatch_size", "max_tokens", "part_rows")
        if self.part_rows:
            whole = [dataset for dataset in self.datasets if not dataset.startswith(HUGGING_FACE)]
            require(
                not whole, f"data.part_rows is for Hugging Face datasets, hf:NAME, and not for {''.join(whole[:1])!r}"
            )
            require(not self.max_tokens, "data.part_rows and data.max_tokens exclude each other: set one of them to 0")
        require(
            self.tokenizer_identity in ("", "bytes") or is_sha256(self.tokenizer_identity),
            f"data.tokenizer_identity must be 'bytes' or 64 hexadecimal digits, not {self.tokenizer_identity[:80]!r}",
        )
        require(
            not self.tokenizer_files or is_sha256(self.tokenizer_files),
            f"data.tokenizer_files must be 64 hexadecimal digits, not {self.tokenizer_files[:80]!r}",
        )
        require(
            len(self.dataset_digests) <= MOST_DATASETS and all(map(is_sha256, self.dataset_digests)),
            f"data.dataset_digests must be at most {MOST_DATASETS} strings of 64 hexadecimal digits",
        )
        require(0 <= self.seed < 1 << 63, f"data.seed must be at least 0 and below 2^63, not {self.seed}")
        require(
            0.0 < self.held_out_fraction < 1.0,
            f"data.held_out_fraction must be between 0 and 1, not {self.held_out_fraction}",
        )

    def _check_datasets(self) -> None:
        datasets, weights = self.datasets, self.weights
        require(bool(datasets) and all(datasets), "data.dataset must not be empty")
        require(
            len(datasets) <= MOST_DATASETS,
            f"data.dataset must name at most {MOST_DATASETS} datasets, not {len(datasets)}: a folder or a glob is one",
        )
        require(
            not self.validation or len(datasets) == 1,
            "data.validation goes with one data.dataset: part of each of several is held out",
        )
        require(
            self.validation not in datasets,
            f"data.validation names the data.dataset, {self.validation!r}: name a text that is not trained on",
        )
        require(
            self.validation not in ("stdlib", "dummy"), "data.validation must be a file, a folder, a glob or hf:NAME"
        )
        for name in self.source_names:
            require(
                self.source_names.count(name) == 1, f"data.dataset names {name!r} twice: give it more of data.weights"
            )
        require(
            len(weights) in (0, len(datasets)),
            f"data.weights has {len(weights)} numbers, and data.dataset names {len(datasets)}: each needs one",
        )
        require(
            all(0.0 < weight < math.inf for weight in weights),
            f"data.weights must be positive and finite, not {list(weights)}",
        )

    @property
    def datasets(self) -> tuple[str, ...]:
        if self.paths:
            return tuple(dict.fromkeys(self.paths))
        return (self.dataset,) if isinstance(self.dataset, str) else self.dataset

    def datasets_of(self, paths: Collection[int]) -> tuple[str, ...]:
        """Those of `datasets` that some paths train on; all if no path is named."""
        if not (paths and self.paths):
            return self.datasets
        return tuple(dict.fromkeys(dataset for path, dataset in enumerate(self.paths) if path in paths))

    @property
    def held_out_rows(self) -> int:
        """With `part_rows`: how many rows at a dataset's beginning are held out."""
        return 0 if self.validation else max(1, int(self.part_rows * self.held_out_fraction))

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the datasets, and of the text for evaluations, that classes of the user's own give."""
        return tuple(name for name in (*self.datasets, self.validation) if name.startswith(CLASS))

    @property
    def named_by_users(self) -> tuple[tuple[str, str], ...]:
        """The options, with their values, with which each trainer's user names code that the run has to do with: texts,
        if one of them comes from a class, and the tokenizer, if it is a class."""
        texts = [("dataset", name) for name in self.datasets]
        texts += [("validation", self.validation)] if self.validation else []
        return (
            *(texts if self.classes else ()),
            *([("tokenizer", self.tokenizer)] if self.tokenizer.startswith(CLASS) else ()),
        )

    @property
    def source_names(self) -> tuple[str, ...]:
        """A short name for each of `datasets`, for its figures: as much of its path's end as is unique among them."""
        paths = [dataset.rstrip("/").split("/") for dataset in self.datasets]

        def name(path: list[str]) -> str:
            ends = (path[-length:] for length in range(1, len(path) + 1))
            end = next((end for end in ends if sum(other[-len(end) :] == end for other in paths) == 1), path)
            # The name comes from the peer that began the run, and is shown in terminals and files.
            return "".join(character if character.isprintable() else "?" for character in "/".join(end))

        return tuple(map(name, paths))

    @property
    def has_targets(self) -> bool:
        """Whether samples say which of their tokens are targets."""
        return self.format != "text"

    @property
    def has_conversations(self) -> bool:
        return self.format == "chat"

    @property
    def is_packed(self) -> bool:
        """Whether several documents share a sequence, without sight of each other."""
        return self.has_targets and self.packing

    @property
    def tokens_per_microbatch(self) -> int:
        return self.microbatch_size * self.sequence_length
