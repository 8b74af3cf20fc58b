"""Options that set fields of a run's configuration: puts texts in, and lets errors name the option and not the field.

Used by the programs that have such options. Libraries name the configuration's fields in their errors, because they do
not know the options.
"""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from swarm.config import RunConfig
from swarm.errors import CorpusMismatch

FIELDS = {
    "dataset": "data.dataset",
    "validation": "data.validation",
    "tokenizer": "data.tokenizer",
    "max_tokens": "data.max_tokens",
    "stages": "stages.num_stages",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_targets": "lora.targets",
}
"""The field of the configuration that each option sets. Options have the names of the fields of their dataclass."""


class TextOptions(Protocol):
    """Options that name the text of a new run."""

    @property
    def dataset(self) -> tuple[str, ...]: ...
    @property
    def validation(self) -> str | None: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def max_tokens(self) -> int | None: ...


def with_named_text(config: RunConfig, options: TextOptions) -> RunConfig:
    """The configuration with the texts and the tokenizer of the command line, where it names them."""
    named = {name: getattr(options, name) for name in ("dataset", "validation", "tokenizer", "max_tokens")}
    given = {name: value for name, value in named.items() if value not in (None, ())}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **given))


@contextmanager
def naming_options(options: object) -> Iterator[None]:
    """In errors that the block raises, replace the fields in FIELDS by the options that set them, if these are given.

    Raises:
        ValueError, CorpusMismatch: the error that the block raised, with the names of options.
    """
    given = {
        field: f"--{name.replace('_', '-')}"
        for name, field in FIELDS.items()
        if getattr(options, name, None) not in (None, ())
    }
    try:
        yield
    except (ValueError, CorpusMismatch) as error:
        text = renamed(str(error), given)
        if text == str(error):
            raise
        # `with_settings` names --set, though another option has the value.
        text = text.removeprefix("--set: ") if text.startswith("--set: --") else text
        raise (CorpusMismatch if isinstance(error, CorpusMismatch) else ValueError)(text) from error


def renamed(text: str, given: dict[str, str]) -> str:
    """The text with other names for fields. A name in quotes, or one that is part of a longer name, stays as it is."""
    for field, option in given.items():
        text = re.sub(rf"(?<![\w.'\"/-]){re.escape(field)}(?!\.?\w)", option, text)
    return text
