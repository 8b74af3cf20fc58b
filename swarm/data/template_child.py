"""The process in which a chat template is rendered, with limits on its time and memory.

A template is a program, and comes from strangers. Jinja's sandbox gives it access to nothing but its arguments. But it
could still compute for ever (loops within loops, `9 ** (9 ** 9)`) or fill the memory (`"a" * 10 ** 9`). So the kernel
limits this process, and ends it if need be, whatever the template does.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarm.data.template_process import EXIT_NO_MEMORY, MOST_CHARACTERS, read, write

_MOST_REASON = 500
"""The most characters of a fault's reason in the answer, because a template may raise errors with any text."""
_ASSISTANT = "assistant"
# Marks around the assistant's parts. Unicode reserves these two characters so that no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"


class Fault(Exception):
    """A template or a conversation cannot be rendered."""


class Template:
    def __init__(self, template: str, special_tokens: Mapping[str, str], *, seconds: float, characters: int) -> None:
        """
        Args:
            special_tokens: by the names that templates use, such as `bos_token`.
            seconds: processor time after which the process is ended, if one rendering takes it.
            characters: see Limits.

        Raises:
            Fault: the template is not valid.
        """
        self._source = template
        self._special_tokens = special_tokens
        self._seconds, self._most_rendered = seconds, characters
        self._now = datetime.min
        self._tools: Sequence[Any] | None = None
        self._rendered = 0
        try:
            self._plain = self._environment("", "").from_string(template)
            marking = self._environment(_BEGIN, _END)
            self._marked = marking.from_string(template)
            self._marks_itself = any(marking.parse(template).find_all(nodes.ExtensionAttribute))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - Jinja computes constants when it compiles: any error may come
            raise Fault(f"the chat template is not valid: {_reason(error)}") from None

    def _environment(self, begin: str, end: str) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: self._now.strftime(form)
        environment.globals["_generation_marks"] = (begin, end)
        return environment

    def render(self, messages: Sequence[Any], now: datetime, *, opens_turn: bool) -> str:
        """The text of a conversation. Raises Fault if the template refuses the messages."""
        self._now, self._tools, self._rendered = now, None, 0
        return self._run(self._plain, messages, opens_turn=opens_turn)

    def render_training(
        self, messages: Sequence[Any], now: datetime, *, tools: Sequence[Any] | None, unlearnt: Sequence[int]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole conversation, and the spans of characters [first, last) that the assistant said.

        Raises Fault if the template refuses the messages, or the assistant's parts cannot be found.
        """
        self._now, self._tools, self._rendered = now, tools, 0
        self._require_written("tools", tools)
        self._require_written("tool_calls", any(message.get("tool_calls") for message in messages))
        answers = [index for index, message in enumerate(messages) if message.get("role") == _ASSISTANT]
        if self._marks_itself:
            text, spans = _unmarked(self._run(self._marked, messages, opens_turn=False))
            if not unlearnt:
                return text, spans
            if len(spans) != len(answers):
                raise Fault(
                    f"a message has the weight 0, and the chat template marks {len(spans)} parts of {len(answers)} "
                    "messages of the assistant, so that it cannot be told which to leave out"
                )
            return text, [span for index, span in zip(answers, spans, strict=True) if index not in unlearnt]
        text, spans = self._run(self._plain, messages, opens_turn=False), []
        for index in answers:
            if index in unlearnt:
                continue
            said = self._run(self._plain, messages[: index + 1], opens_turn=False)
            opened = self._opened(messages, index, said)
            if not (said.startswith(opened) and text.startswith(said)):
                raise Fault(
                    "the chat template writes a message differently once others follow it, so that the assistant's "
                    "parts cannot be told; put {% generation %} and {% endgeneration %} around them in the template"
                )
            spans.append((len(opened), len(said)))
        return text, spans

    def _opened(self, messages: Sequence[Any], index: int, said: str) -> str:
        """The text of the messages before `index`, with the opening of the assistant's turn; `said` goes on to the
        turn's end."""
        if index > 0:
            return self._run(self._plain, messages[:index], opens_turn=True)
        # Few templates render no messages at all, or write their usual instructions then. So the opening of a next turn
        # is looked for in the text.
        opening = self._run(self._plain, messages[:1], opens_turn=True).removeprefix(said)
        before, found, _ = said.partition(opening) if opening else ("", "", "")
        if not found:
            raise Fault("the conversation begins with the assistant, and it cannot be told where its first turn opens")
        return before + found

    def _require_written(self, name: str, is_there: object) -> None:
        if is_there and name not in self._source:
            raise Fault(f"the conversation has {name!r}, and the chat template does not write them")

    def _run(self, template: jinja2.Template, messages: Sequence[Any], *, opens_turn: bool) -> str:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        try:
            text = template.render(
                messages=messages, tools=self._tools, documents=None, add_generation_prompt=opens_turn,
                **self._special_tokens,
            )  # fmt: skip
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may fail with whatever its expressions raise
            raise Fault(f"the chat template cannot render these messages: {_reason(error)}") from None
        if len(text) > MOST_CHARACTERS:
            raise Fault(f"the chat template makes a text of more than {MOST_CHARACTERS >> 20} million characters")
        self._rendered += len(text)
        if self._rendered > self._most_rendered:
            raise Fault(
                "there are too many messages to find what the assistant said; put {% generation %} and "
                "{% endgeneration %} around its parts in the chat template"
            )
        return text


class _Generation(Extension):
    """`{% generation %}`: puts marks around a part of the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it like that

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        marks: tuple[str, str] = cast(Any, self.environment.globals["_generation_marks"])
        return marks[0] + caller() + marks[1]


def _unmarked(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for number, piece in enumerate(marked.split(_BEGIN)):
        said, *rest = piece.split(_END)
        if len(rest) != min(number, 1):
            raise Fault(
                "a message has a character that Unicode keeps out of texts (U+FDD0, U+FDD1), or the chat template has "
                "one {% generation %} inside another"
            )
        if rest:
            spans.append((len(text), len(text) + len(said)))
        text += piece.replace(_END, "")
    return text, spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own `tojson` escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _reason(error: Exception) -> str:
    return " ".join(str(error)[:_MOST_REASON].split()) or type(error).__name__


def main() -> None:
    source = sys.stdin.buffer
    opening = read(source)
    for kind, most in ((resource.RLIMIT_AS, opening["memory_bytes"]), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    # This signal ends the process once its time is up. The parent may have ignored it, and a child inherits that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    template: Template | None = None
    try:
        while (request := read(source)) is not None:
            signal.setitimer(signal.ITIMER_PROF, opening["seconds"])
            try:
                template = template or Template(
                    opening["template"], opening["special_tokens"], seconds=opening["seconds"],
                    characters=opening["characters"],
                )  # fmt: skip
                reply = {"answer": _answer(template, request)}
            except Fault as fault:
                reply = {"fault": str(fault)}
            signal.setitimer(signal.ITIMER_PROF, 0)
            write(sys.stdout.buffer, reply)
    except MemoryError:
        os._exit(EXIT_NO_MEMORY)


def _answer(template: Template, request: Mapping[str, Any]) -> Any:
    messages, now = request["messages"], datetime.fromisoformat(request["now"])
    if request["is_training"]:
        return template.render_training(messages, now, tools=request["tools"], unlearnt=request["unlearnt"])
    return template.render(messages, now, opens_turn=request["opens_turn"])
