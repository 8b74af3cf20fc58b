"""Chat templates: they turn a conversation into the text that a model reads.

A template is Jinja and comes from a tokenizer's folder, where `transformers` finds it too, with that library's
conventions. It runs in a process of its own (data/template_child), in a sandbox without access to anything but the
messages.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from swarm.data import tokenizer_files
from swarm.data.template_process import Limits, TemplateProcess
from swarm.machine import json_file

Message = Mapping[str, Any]
"""`role` and `content`, and any other field that a template reads."""

TRAINING_DATE = datetime(2024, 7, 26)
"""The date that templates get when samples are made, because samples must not depend on the day. It is the date that
Llama 3.2's template uses when it gets none."""
MAX_TEMPLATE_BYTES = 1 << 20

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ORDINARY = [
    {"role": "user", "content": "Do bees sleep?"},
    {"role": "assistant", "content": "Yes, at night."},
    {"role": "user", "content": "And ants?"},
]
"""An ordinary conversation, which every template has to render."""


@dataclass(frozen=True)
class Rendered:
    """A conversation to learn from. `spans` are the parts of `text` that the assistant said, in order, each as
    characters [first, last)."""

    text: str
    spans: Sequence[tuple[int, int]]


class ChatTemplate:
    """One template, rendered in a process of its own, which the first rendering starts."""

    def __init__(
        self, template: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime],
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        """`special_tokens` are named as templates name them, such as `bos_token`. `now` gives the local time, for
        templates that write the date for the model."""
        self._now = now
        content = json.dumps([template, special_tokens], sort_keys=True)
        self.identity = hashlib.sha256(content.encode()).hexdigest()
        """SHA-256, in hexadecimal: templates with equal identities render alike, if `now` is the same."""
        opening = {"template": template, "special_tokens": dict(special_tokens)}
        self._process = TemplateProcess(opening, limits or Limits())

    def check(self) -> None:
        """Raise ValueError, one line, if the template is not valid, or cannot render an ordinary conversation."""
        self.render(ORDINARY, add_generation_prompt=True)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation. `add_generation_prompt` says whether the text ends with the opening of the
        assistant's next turn. Raises ValueError, of one line, if the template is not valid, refuses the messages, or
        goes beyond its limits."""
        text: str = self._ask(messages, is_training=False, opens_turn=add_generation_prompt)
        return text

    def render_training(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None,
        unlearnt: Sequence[int] = (),
    ) -> Rendered:  # fmt: skip
        """The text of a whole conversation, with the parts that the assistant said.

        A template may mark these parts with `{% generation %}`. If it does not, they are found by comparison: each of
        the assistant's messages is what the text gains after the opening of its turn, including the end of the turn.

        Args:
            tools: what the assistant may call, as JSON schemas.
            unlearnt: the indices of messages of which nothing is learnt, although the assistant says them.

        Raises:
            ValueError: as `render`, and if the assistant's parts cannot be found.
        """
        text, spans = self._ask(messages, is_training=True, tools=tools, unlearnt=unlearnt)
        return Rendered(text, [(first, last) for first, last in spans])

    def close(self) -> None:
        """End the process. A rendering in another thread fails; the next rendering starts the process again."""
        self._process.close()

    def _ask(self, messages: Sequence[Message], **how: Any) -> Any:
        return self._process.ask({"messages": messages, "now": self._now().isoformat(), **how})


def load(folder: Path, *, now: Callable[[], datetime]) -> ChatTemplate | None:
    """The template of a tokenizer's folder; None if there is none.

    It is in the file chat_template.jinja, or it is `chat_template` in tokenizer_config.json or chat_template.json. If
    that is a list of named templates, the one called `default` is taken, and `tool_use` for conversations with tools.

    Raises:
        ValueError: one line, if the template is unreadable or too large.
    """
    config = json_file.read_object(folder / "tokenizer_config.json", is_optional=True)
    template = _text(folder / "chat_template.jinja") or config.get("chat_template")
    if not template:
        template = json_file.read_object(folder / "chat_template.json", is_optional=True).get("chat_template")
    special_tokens = json_file.read_object(folder / "special_tokens_map.json", is_optional=True) | config
    if isinstance(template, list):
        entries = [each for each in template if isinstance(each, dict) and isinstance(each.get("name"), str)]
        named = {each["name"]: each.get("template") for each in entries}
        template, for_tools = named.get("default"), named.get("tool_use")
        if isinstance(template, str) and isinstance(for_tools, str):
            # The signs + keep the spaces and lines at the edges, and Jinja leaves out the last line's end.
            with_tools, without = for_tools.removesuffix("\n"), template.removesuffix("\n")
            template = f"{{% if tools +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"the chat template in {folder} is no text of at most {MAX_TEMPLATE_BYTES >> 20} MiB")
    tokens = {name: tokenizer_files.token_text(special_tokens.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplate(template, {name: token for name, token in tokens.items() if token is not None}, now=now)


def beside(tokenizer: str, *, now: Callable[[], datetime]) -> ChatTemplate:
    """The template in the folder of a tokenizer. `tokenizer` is as `data.tokenizer` names it. Raises ValueError, of one
    line, also if there is none."""
    has_files = tokenizer_files.has_files(tokenizer)
    template = load(tokenizer_files.located(tokenizer).parent, now=now) if has_files else None
    if template is None:
        raise ValueError(
            f"there is no chat template beside data.tokenizer {tokenizer!r}: name the tokenizer of a model that was "
            "trained to chat, in its folder, or put a chat_template.jinja there"
        )
    return template


def _text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read {path}: {reason}") from None
