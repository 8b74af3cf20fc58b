"""Text between people and tokens: what is said of a stream of tokens as they come, and where it ends."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from typing import Literal

from swarm.data.tokenizers import Tokenizer

_HALF = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes of a character whose other bytes are still to come."""

_CONTEXT_TOKENS = 8
"""How many tokens at a prompt's end may decide how the first token after it is written."""


class TextStream:
    """Turns tokens into text one by one; characters of several tokens come with the last of them."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """
        Args:
            prompt: the tokens before the first that is pushed; they are not said.
        """
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._context, self._said = 0, len(self._tokens)
        """Tokens from the first to the second have been said, and are decoded once more as what comes before the
        rest: whether a word has a space before it may depend on that."""

    def push(self, token: int) -> str:
        """What one more token adds; empty if it ends within a character."""
        self._tokens.append(token)
        before, text = self._decoded()
        if text.endswith(_HALF):
            return ""
        self._context, self._said = self._said, len(self._tokens)
        return text[len(before) :]

    def rest(self) -> str:
        """What is left at the end: half a character, most likely."""
        before, text = self._decoded()
        return text[len(before) :]

    def _decoded(self) -> tuple[str, str]:
        before = self._tokenizer.decode(self._tokens[self._context : self._said])
        return before, self._tokenizer.decode(self._tokens[self._context :])


class Writing:
    """A text as it comes: up to an end token or the first of some strings, neither of which is said.

    Attributes:
        num_tokens: the tokens that have been read, an end token included.
        finish_reason: once the text has ended, `stop` if it came to its end, and `length` if the tokens did.
    """

    def __init__(
        self,
        tokens: AsyncIterator[int],
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        end_tokens: Collection[int] = (),
        stops: Sequence[str] = (),
    ) -> None:
        """
        Args:
            tokens: they are closed by whoever opened them.
            prompt: the tokens before these.
        """
        self.num_tokens = 0
        self.finish_reason: Literal["stop", "length"] = "length"
        self._tokens = tokens
        self._stream = TextStream(tokenizer, prompt)
        self._end_tokens = end_tokens
        self._stops = stops

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The text, piece by piece. What may be the beginning of a stop string is held back until more is known."""
        held = ""
        async for token in self._tokens:
            self.num_tokens += 1
            if token in self._end_tokens:
                self.finish_reason = "stop"
                break
            held += self._stream.push(token)
            if found := [held.index(stop) for stop in self._stops if stop in held]:
                self.finish_reason, held = "stop", held[: min(found)]
                break
            keep = _may_begin(held, self._stops)
            if len(held) > keep:
                yield held[: len(held) - keep]
                held = held[len(held) - keep :]
        else:
            held += self._stream.rest()
        if held:
            yield held


def _may_begin(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text with which one of some strings may begin."""
    lengths = [length for stop in stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
    return max(lengths, default=0)
