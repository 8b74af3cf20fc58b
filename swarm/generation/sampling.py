"""What is asked of a model's logits: how tokens are chosen, and which scores are told.

generation/decoding chooses and scores them; this file needs no torch.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

MOST_TOP = 20
"""The most of the likeliest tokens that are told for a position."""
MOST_SCORES = 1 << 18
"""The most scores that are told at once: about a megabyte in each list of a message."""
BYTES_OF_SCORE = 12
"""The most bytes that are kept of a score: of a token, and of one of the likeliest with its own."""


def _parameter(default: Any, least: float = -math.inf, most: float = math.inf) -> Any:
    """A number of Sampling, of its default's type, between two limits."""
    return field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    All that takes, sends or checks a parameter goes by these fields: the options of swarm-generate and the fields of
    requests. A new one also needs a field of this name in the message Sampling (generation.proto), where 0 must change
    nothing, because earlier releases leave it out, and a step in `decoding.choose`; `openai_api.requests._NEUTRAL` then
    no longer has its name.
    """

    temperature: float = _parameter(1.0, 0)
    """Divides the logits; 0 takes the likeliest token each time."""
    top_p: float = _parameter(1.0, 0, 1)
    """Choose among the likeliest tokens that have this probability together; 0 takes the likeliest, 1 all."""
    top_k: int = _parameter(0, 0, 2**31 - 1)
    """Choose among this many of the likeliest tokens; 0 among all."""
    seed: int = _parameter(0)
    """The same seed gives the same text."""

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value, least, most = getattr(self, parameter.name), *parameter.metadata.values()
            require_number(parameter.name, value, type(parameter.default), least, most)


def require_number(name: str, value: object, kind: type, least: float, most: float) -> None:
    """Raise ValueError, which begins with the name and leaves the value out, unless this is a number of that kind,
    finite, and between two limits. A whole number is good for a float."""
    if type(value) in (int, kind):
        assert isinstance(value, int | float)
        if least <= value <= most and (isinstance(value, int) or math.isfinite(value)):
            return
    limits = f" from {least} to {most}" if most < math.inf else f", {least} or more" if least > -math.inf else ""
    raise ValueError(f"{name} must be a {'whole ' if kind is int else ''}number{limits}")


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Which tokens of a sequence are scored.

    Attributes:
        first: the position of the first one.
        num_top: how many of the likeliest tokens are told for each.
    """

    first: int
    num_top: int

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ValueError("nothing says how likely the first token of a sequence is")
        if not 0 <= self.num_top <= MOST_TOP:
            raise ValueError(f"at most {MOST_TOP} of the likeliest tokens are told, not {self.num_top}")

    def num_scores(self, num_positions: int) -> int:
        return max(0, num_positions - self.first) * max(1, self.num_top)


def require_few(num_scores: int) -> None:
    """Raise ValueError for more scores than are told at once."""
    if num_scores > MOST_SCORES:
        raise ValueError(
            f"{num_scores} log-probabilities are wanted, and at most {MOST_SCORES} are told at once: ask for fewer "
            "prompts, or fewer of the likeliest tokens"
        )


@dataclass(eq=False)
class Scores:
    """How likely the tokens of a sequence were, by the model alone: temperature and the like do not count.

    Attributes:
        logprobs: the logarithm of each token's probability, from position `scoring.first` on.
        top: the likeliest tokens at each of these positions, the likeliest first.
        top_logprobs: the logarithms of their probabilities.
    """

    scoring: Scoring
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    top: "array[int]" = field(default_factory=lambda: array("I"))
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def next(self) -> int:
        return self.scoring.first + len(self)

    def extend(self, logprobs: Sequence[float], top: Sequence[int], top_logprobs: Sequence[float]) -> None:
        """Add the next tokens' scores, those of the likeliest in one list."""
        self.logprobs.extend(logprobs)
        self.top.extend(top)
        self.top_logprobs.extend(top_logprobs)

    def extend_from(self, other: "Scores", num_last: int) -> None:
        skipped = len(other) - num_last
        skipped_top = skipped * self.scoring.num_top
        self.extend(other.logprobs[skipped:], other.top[skipped_top:], other.top_logprobs[skipped_top:])

    def catch_up(self, other: "Scores", position: int) -> None:
        """Add those of the other's scores that are missing here, up to the token before a position."""
        first, end, num_top = self.next - other.scoring.first, position - other.scoring.first, self.scoring.num_top
        top = slice(first * num_top, max(first, end) * num_top)
        self.extend(other.logprobs[first : max(first, end)], other.top[top], other.top_logprobs[top])

    def at(self, position: int) -> tuple[float, list[tuple[int, float]]] | None:
        """The score of the token at a position, and the likeliest tokens with theirs; None if it has none."""
        index, num_top = position - self.scoring.first, self.scoring.num_top
        if not 0 <= index < len(self):
            return None
        top = slice(index * num_top, (index + 1) * num_top)
        return self.logprobs[index], list(zip(self.top[top], self.top_logprobs[top], strict=True))
