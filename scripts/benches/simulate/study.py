"""The options that all studies have."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """A study's options; the same options give the same figures."""

    json: bool = False
    """Print one JSON object as the last line of stdout, instead of a table."""


@dataclass(frozen=True, kw_only=True)
class ChanceOptions(StudyOptions):
    """The options of a study that draws random numbers."""

    seed: int = 0
    """The seed of all that is drawn."""
