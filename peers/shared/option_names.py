"""Has errors about a configuration's values name the options that the user typed, where the values come from options.

Used by the programs that have such options. Libraries know the fields alone, and name these in their errors.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from swarm.errors import CorpusMismatch

FIELDS = {
    "dataset": "data.dataset",
    "tokenizer": "data.tokenizer",
    "stages": "stages.num_stages",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_targets": "lora.targets",
}
"""The options that stand for a field of the configuration, by their names in the options' dataclass."""


@contextmanager
def naming_options(options: object) -> Iterator[None]:
    """Have errors that leave the block name those of FIELDS as options that these options give.

    Raises:
        ValueError, CorpusMismatch: what the block raises, in words that the user knows.
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
        raise (CorpusMismatch if isinstance(error, CorpusMismatch) else ValueError)(text) from error


def renamed(text: str, given: dict[str, str]) -> str:
    """A text with other names of fields. What stands in quotes or belongs to a longer name stays."""
    for field, option in given.items():
        text = re.sub(rf"(?<![\w.'\"/-]){re.escape(field)}(?!\.?\w)", option, text)
    return text
