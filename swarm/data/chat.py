"""Chat templates: a conversation as the text that a model reads.

data/conversations makes training samples with them, and the programs the prompts of a chat. A template is Jinja and
comes from a tokenizer's folder, where `transformers` finds it too, with that library's conventions. It runs in a
sandbox without access to anything but the messages. Texts become tokens elsewhere.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarm.data import tokenizer_files
from swarm.errors import in_one_line

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else a template looks at."""

TRAINING_DATE = datetime(2024, 7, 26)
"""The day that templates are told while samples are made: these must not depend on when that is. Llama 3.2's template
names it where it knows no date."""
MAX_TEMPLATE_BYTES = 1 << 20

_ASSISTANT = "assistant"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Unicode promises that no text has these two.
_BEGIN, _END = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Rendered:
    """A conversation to learn from.

    Attributes:
        spans: the parts of `text`, as characters [first, last), that the assistant said, in order.
    """

    text: str
    spans: Sequence[tuple[int, int]]


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime]) -> None:
        """
        Args:
            special_tokens: by the names under which templates know them, `bos_token` for one.
            now: gives the local time, for templates that tell the model the date.

        Raises:
            ValueError: one line, if it is no valid template.
        """
        self._special_tokens = dict(special_tokens)
        self._now = now
        content = json.dumps([template, self._special_tokens], sort_keys=True)
        self.identity = hashlib.sha256(content.encode()).hexdigest()
        """SHA-256, in hexadecimal: equal identities render alike, at one time."""
        try:
            self._plain = self._environment("", "").from_string(template)
            marking = self._environment(_BEGIN, _END)
            self._marked = marking.from_string(template)
            self._marks_itself = any(marking.parse(template).find_all(nodes.ExtensionAttribute))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {in_one_line(error)}") from None

    def _environment(self, begin: str, end: str) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        environment.globals["_generation_marks"] = (begin, end)
        return environment

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            add_generation_prompt: whether the assistant's next turn is to be opened at the end.

        Raises:
            ValueError: one line, if the template refuses the messages.
        """
        return self._run(self._plain, messages, add_generation_prompt=add_generation_prompt)

    def render_training(self, messages: Sequence[Message]) -> Rendered:
        """The text of a whole conversation, with the parts that the assistant said.

        A template says with `{% generation %}` which parts these are. For another one they are what each of the
        assistant's messages adds to the text that opens its turn, with the end of the turn.

        Raises:
            ValueError: one line, if the template refuses the messages, or does not tell the assistant's parts.
        """
        if self._marks_itself:
            return _unmarked(self._run(self._marked, messages, add_generation_prompt=False))
        text, spans = self.render(messages), []
        for index, message in enumerate(messages):
            if message.get("role") != _ASSISTANT:
                continue
            opened = self.render(messages[:index], add_generation_prompt=True)
            said = self.render(messages[: index + 1])
            if not (said.startswith(opened) and text.startswith(said)):
                raise ValueError(
                    "the chat template writes a message differently once others follow it, so that the assistant's "
                    "parts cannot be told; put {% generation %} and {% endgeneration %} around them in the template"
                )
            spans.append((len(opened), len(said)))
        return Rendered(text, spans)

    def _run(self, template: jinja2.Template, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # noqa: BLE001 - a template may fail with whatever its expressions raise
            raise ValueError(f"the chat template cannot render these messages: {in_one_line(error)}") from None


def load(folder: Path, *, now: Callable[[], datetime]) -> ChatTemplate | None:
    """The template of a tokenizer's folder; None if there is none.

    It is the file chat_template.jinja, or `chat_template` in tokenizer_config.json or chat_template.json, where several
    with names may stand, of which it is `default`.

    Raises:
        ValueError: one line, if it is unreadable, too large or not valid.
    """
    try:
        config = _read_json(folder / "tokenizer_config.json")
        template = _text(folder / "chat_template.jinja")
        if template is None:
            template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
        special_tokens = _read_json(folder / "special_tokens_map.json") | config
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"cannot read the chat template in {folder}: {in_one_line(error)}") from None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"the chat template in {folder} is no text of at most {MAX_TEMPLATE_BYTES >> 20} MiB")
    tokens = {name: _token(special_tokens.get(name)) for name in _SPECIAL_TOKENS}
    try:
        return ChatTemplate(template, {name: token for name, token in tokens.items() if token is not None}, now=now)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def beside(tokenizer: str, *, now: Callable[[], datetime]) -> ChatTemplate:
    """The template of the folder in which a tokenizer lies.

    Args:
        tokenizer: as `data.tokenizer` names it.

    Raises:
        ValueError: one line, also if there is none.
    """
    template = None if tokenizer == "bytes" else load(tokenizer_files.located(tokenizer).parent, now=now)
    if template is None:
        raise ValueError(
            f"there is no chat template beside data.tokenizer {tokenizer!r}: name the tokenizer of a model that was "
            "trained to chat, in its folder, or put a chat_template.jinja there"
        )
    return template


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


def _unmarked(marked: str) -> Rendered:
    text, spans = "", []
    for number, piece in enumerate(marked.split(_BEGIN)):
        said, *rest = piece.split(_END)
        if len(rest) != min(number, 1):
            raise ValueError(
                "a message has a character that Unicode keeps out of texts (U+FDD0, U+FDD1), or the chat template has "
                "one {% generation %} inside another"
            )
        if rest:
            spans.append((len(text), len(text) + len(said)))
        text += piece.replace(_END, "")
    return Rendered(text, spans)


def _text(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        return file.read(MAX_TEMPLATE_BYTES + 1)


def _read_json(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values if isinstance(values, dict) else {}


def _token(value: Any) -> str | None:
    """A special token, which may be a record that has more about it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own would escape what HTML needs escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
