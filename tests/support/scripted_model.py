"""A model that writes the text that a test chooses, in bytes, and records what it was asked."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime

from swarm.data.chat import ChatTemplate
from swarm.data.tokenizers import ByteTokenizer
from swarm.generation.engine import require_room
from swarm.generation.sampling import Sampling, Scores
from swarm.generation.text_model import TextModel

RUN = "tiny.0123456789abcdef"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 0


class ScriptedEngine:
    """Writes the same text again and again, and fails at the place that the test chooses.

    Attributes:
        asked: the prompts that were continued, with their sampling.
        likely: the tokens that it calls the likeliest, with the logarithms of their probabilities.
        under_way: how many sequences are being continued.
    """

    def __init__(self, text: str = "hello", *, longest: int = 100) -> None:
        self.round = 7
        self.longest = longest
        self.likely: dict[int, float] = {ord("h"): -0.25, ord("e"): -0.5, 0xC3: -2.0}
        self.asked: list[tuple[bytes, Sampling, int]] = []
        self.under_way = 0
        self.fault: Exception | None = None
        self.fault_after = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self._text = text.encode()

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, max_tokens: int, scores: Scores | None = None
    ) -> AsyncGenerator[int, None]:
        require_room(self, prompt, max_tokens)
        self.asked.append((bytes(prompt), sampling, max_tokens))
        self.under_way += 1
        try:
            for number in range(max_tokens):
                await self.may_go_on.wait()
                if self.fault is not None and number == self.fault_after:
                    raise self.fault
                token = self._text[number % len(self._text)]
                if scores is not None:
                    self._score(scores, [*prompt[scores.scoring.first :], token] if number == 0 else [token])
                yield token
            if max_tokens == 0 and scores is not None:
                self._score(scores, prompt[scores.scoring.first :])
        finally:
            self.under_way -= 1

    def _score(self, scores: Scores, tokens: Sequence[int]) -> None:
        for token in tokens:
            likely = list(self.likely.items())[: scores.scoring.num_top]
            scores.extend([self.likely.get(token, -4.0)], [token for token, _ in likely], [each for _, each in likely])


def scripted_model(engine: ScriptedEngine, *, template: str | None = TEMPLATE) -> TextModel:
    """The engine with a tokenizer of bytes, of which 0 ends a text."""
    return TextModel(
        run=RUN, engine=engine, tokenizer=ByteTokenizer(), end_tokens=frozenset({END}),
        template=None if template is None else _template(template),
    )  # fmt: skip


@functools.cache
def _template(text: str) -> ChatTemplate:
    """A chat template. All tests of this process share its child process."""
    return ChatTemplate(text, {}, now=lambda: datetime(2026, 1, 1))
