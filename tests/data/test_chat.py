import json
import os
import signal
import subprocess
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swarm.data import chat
from swarm.data.chat import TRAINING_DATE, ChatTemplate
from swarm.data.template_process import Limits
from tests.support.tokenizers import CHAT_TEMPLATE, write_chat_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "na\u00efve" <b>'},
    {"role": "assistant", "content": "na\u00efve \U0001f41d"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "No."},
]
WITHOUT_MARKS = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _template(text: str, limits: Limits | None = None, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(text, special_tokens, now=lambda: datetime(2026, 5, 4), limits=limits)


def _said(template: ChatTemplate, messages: list[dict[str, str]]) -> list[str]:
    rendered = template.render_training(messages)
    assert rendered.text == template.render(messages)
    return [rendered.text[first:last] for first, last in rendered.spans]


def test_parts_of_the_assistant_are_what_the_template_marks() -> None:
    template = _template(CHAT_TEMPLATE, eos_token="<|im_end|>")
    assert _said(template, TALK) == ["na\u00efve \U0001f41d<|im_end|>", "No.<|im_end|>"]
    assert _said(template, TALK[:2]) == []


def test_template_that_changes_earlier_turns_is_refused() -> None:
    """An example is a template that leaves a model's reasoning out of all turns except the last."""
    template = _template(
        "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}{% endfor %}", eos_token="."
    )
    with pytest.raises(ValueError, match=r"differently once others follow it.*generation") as raised:
        template.render_training(TALK)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["generation", "prefixes", "tools", "llama_date"])
def test_renders_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Compare the text, and, for a template that marks them, the assistant's tokens."""
    template = {
        "generation": CHAT_TEMPLATE,
        "prefixes": WITHOUT_MARKS,
        "tools": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{% if tools is none %}none{% endif %}"
        "{%- for m in messages %}\n   {%- if loop.index0 == 1 %}\n  {%- continue %}\n  {%- endif %}\n {{ m.role }}\n"
        "{% endfor %}",
        "llama_date": "{{ bos_token }}{{ eos_token }}{% set ns = namespace(x=1) %}{{ ns.x }}{{ messages[-1]['role'] }}",
    }[name]
    write_chat_tokenizer(tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = chat.load(tmp_path, now=lambda: TRAINING_DATE)
    assert ours is not None
    for add in (False, True):
        expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=add)
        assert ours.render(TALK, add_generation_prompt=add) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% for i in range(10000000) %}x{% endfor %}", "range"),
    ],
)
def test_what_a_template_may_not_do_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot render.*{reason}") as raised:
        _template(text).render(TALK)
    assert "\n" not in str(raised.value)


IN_LITTLE_TIME = Limits(seconds=0.2)
WITH_LITTLE_MEMORY = Limits(seconds=5.0, memory_bytes=128 << 20)


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        # This is one operation, before anything is rendered: Jinja computes constants when it compiles.
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_template_that_computes_without_end_is_ended(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be rendered: it computes for more than 0\.2 seconds$"):
        _template(text, IN_LITTLE_TIME).render(TALK)


def test_a_conversation_that_would_take_hours_is_refused_on_every_machine_alike() -> None:
    messages = [{"role": "user", "content": "x" * 15_000}, *TALK[1:3] * 40]
    with pytest.raises(ValueError, match=r"too many messages to find what the assistant said; put \{% generation"):
        _template(WITHOUT_MARKS, Limits(characters=1 << 20), eos_token="").render_training(messages)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{% set n = namespace(s='a' * 1024) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    ],
)
def test_a_template_that_fills_the_memory_is_ended(text: str) -> None:
    template = _template("{% if messages %}" + text + "{% endif %}", WITH_LITTLE_MEMORY)
    assert template.render([]) == ""
    with pytest.raises(ValueError, match=r"it takes more than 128 MiB of memory$"):
        template.render(TALK)


def test_a_text_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="makes a text of more than 16 million characters"):
        _template("{{ 'x' * 17000000 }}").render(TALK)


def test_after_a_rendering_that_failed_the_next_one_is_made() -> None:
    template = _template("{% if messages | length > 1 %}{{ 9 ** (9 ** messages[1].n) }}{% endif %}!", IN_LITTLE_TIME)
    assert template.render([{}]) == "!"
    with pytest.raises(ValueError, match="computes for more than"):
        template.render([{}, {"n": 9}])
    assert template.render([{}]) == "!"
    template.close()
    assert template.render([{}]) == "!"


def _endless() -> ChatTemplate:
    """A template whose process has begun, and that would render a first message with a 9 for a minute."""
    template = _template("{{ 9 ** (9 ** messages[0].n) }}", Limits(seconds=60.0))
    assert template.render([{"n": 0}]) == "9"
    return template


def _press_and_render(pressing: threading.Timer, template: ChatTemplate) -> None:
    """On a busy machine the key may be pressed before the rendering begins."""
    pressing.start()
    template.render([{"n": 9}])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rendering_can_be_interrupted(number: signal.Signals) -> None:
    """Ctrl-C interrupts it, and so does SIGTERM in a program that turns it into an exception."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    template = _endless()
    before = signal.signal(number, interrupt)
    pressing = threading.Timer(0.3, os.kill, [os.getpid(), number])
    try:
        with pytest.raises(KeyboardInterrupt):
            _press_and_render(pressing, template)
        pressing.join()
    finally:
        signal.signal(number, before)


def test_a_rendering_whose_process_begins_just_then_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    template, start = _template("{{ messages[0].n }}"), subprocess.Popen

    def closed_and_started(*arguments: Any, **options: Any) -> Any:
        template.close()
        return start(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", closed_and_started)
        with pytest.raises(ValueError, match="was closed"):
            template.render([{"n": 9}])
    assert template.render([{"n": 9}]) == "9"


def test_messages_may_hold_what_json_does_not_know() -> None:
    """Rows of Parquet files hold such values, and lone halves of characters. Messages without end are refused."""
    template = _template("{{ messages[0].content }}{{ messages[0].at }}")
    messages: list[dict[str, Any]] = [{"content": "\ud800", "at": datetime(2026, 5, 4)}]
    assert template.render(messages) == "\ud8002026-05-04 00:00:00"
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        template.render([{"content": deep}])
    assert template.render(messages[:1])


TOKEN = {"content": "<s>", "lstrip": False}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "one", "bos_token": TOKEN}}, "one"),
        (
            {
                "chat_template.json": {"chat_template": "{{ bos_token }}"},
                "special_tokens_map.json": {"bos_token": TOKEN},
            },
            "<s>",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": {}},
                        5,
                        {"name": "tool_use", "template": "a"},
                        {"name": "default", "template": "b"},
                    ]
                }
            },
            "b",
        ),
        ({}, None),
    ],
)
def test_template_is_found_where_transformers_keeps_it(
    files: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = chat.load(tmp_path, now=lambda: TRAINING_DATE)
    assert (template.render([]) if template is not None else None) == expected
