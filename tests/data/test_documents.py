"""Documents are what is learnt of rows, and each is whole in one sequence."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from swarm.config import DataConfig
from swarm.data import chat, tokenizers
from swarm.data.chat import ChatTemplate
from swarm.data.documents import Document, Documents, sequences
from swarm.data.rows import Row
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS
from tests.support.tokenizers import CHAT_TEMPLATE, write_chat_tokenizer

TALK = [
    {"role": "user", "content": "Hi \U0001f41d"},
    {"role": "assistant", "content": "na\u00efve"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "No \U0001f41d"},
]


def _rows(*values: dict[str, Any]) -> Iterator[Row]:
    return iter([Row(f"a.jsonl, row {number}", each) for number, each in enumerate(values, start=1)])


_TEMPLATES: dict[str, ChatTemplate | None] = {}
"""Each has a process, which takes a while to start."""


def _documents(folder: Path, template: str = CHAT_TEMPLATE, **data: Any) -> Documents:
    config = DataConfig(**{"dataset": "a.jsonl", "format": "chat", "sequence_length": 200, **data})
    path = write_chat_tokenizer(folder, template)
    if template not in _TEMPLATES:
        _TEMPLATES[template] = chat.load(folder, now=lambda: datetime(2026, 1, 1))
    return Documents(config, tokenizers.load(path), _TEMPLATES[template])


def _learnt(documents: Documents, document: Document) -> str:
    return documents.tokenizer.decode(document.tokens[document.targets])


def _of(documents: Documents, *values: dict[str, Any]) -> Sequence[Document]:
    return list(documents.of(_rows(*values)))


def test_of_a_conversation_the_assistants_words_are_learnt(tmp_path: Path) -> None:
    """Compare with marks made by hand, and with those of transformers."""
    documents = _documents(tmp_path)
    (document,) = _of(documents, {"messages": TALK, "source": "kept out"})
    assert _learnt(documents, document) == "na\u00efve<|im_end|>No \U0001f41d<|im_end|>"
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True
    )
    assert document.tokens.tolist() == theirs["input_ids"]
    assert document.targets.tolist() == [bool(value) for value in theirs["assistant_masks"]]


@pytest.mark.parametrize(("tokenizer", "end"), [("bytes", "\n"), ("chat", "<|im_end|>")])
def test_of_a_completion_the_rest_is_learnt_with_its_end(tokenizer: str, end: str, tmp_path: Path) -> None:
    documents = _documents(tmp_path, format="completion")
    if tokenizer == "bytes":
        documents.tokenizer = tokenizers.load("bytes")
    (document,) = _of(documents, {"prompt": "2 + \u00fc =", "completion": " 4\u00fc"})
    text = documents.tokenizer.decode(document.tokens)
    assert text == f"2 + \u00fc = 4\u00fc{end}"
    assert _learnt(documents, document) == f" 4\u00fc{end}"


def test_what_is_too_long_is_cut_or_dropped_and_counted(tmp_path: Path) -> None:
    values = [
        {"prompt": "a" * 4, "completion": "b" * 20},
        {"prompt": "a" * 20, "completion": "b"},
        {"prompt": "a", "completion": "bc"},
    ]
    cut = _documents(tmp_path, format="completion", sequence_length=7)
    assert [len(document) for document in _of(cut, *values)] == [8, 4]
    assert (cut.counts.taken, cut.counts.cut, cut.counts.dropped, cut.counts.without_target) == (2, 1, 0, 1)
    dropping = _documents(tmp_path, format="completion", sequence_length=7, too_long="drop")
    assert [len(document) for document in _of(dropping, *values)] == [4]
    assert (dropping.counts.taken, dropping.counts.cut, dropping.counts.dropped) == (1, 0, 2)


@pytest.mark.parametrize(
    ("config", "values", "reason"),
    [
        ({}, {"messages": "x"}, "there are no 'messages'"),
        ({}, {"messages": [TALK[0], {"content": "x"}]}, "message 2 has no 'role'"),
        (
            {},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1 has a part in 'content' that is no text: 'image_url'",
        ),
        ({}, {"messages": [{**TALK[1], "weight": 0.5}]}, "message 1 has the weight 0.5"),
        ({}, {"messages": TALK, "tools": "{"}, "its 'tools' cannot be read"),
        ({}, {"messages": TALK, "tools": [{}]}, "the conversation has 'tools', and the chat template does not write"),
        (
            {},
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "the conversation has 'tool_calls', and the chat template does not write",
        ),
        ({"format": "completion"}, {"prompt": "x"}, "there is no text in 'completion'; the row has prompt"),
    ],
)
def test_a_row_that_lacks_something_is_left_out_and_named(
    config: dict[str, Any], values: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    documents = _documents(tmp_path, **config)
    good = {"messages": TALK, "prompt": "a", "completion": "b"}
    assert len(_of(documents, values, good, values, good)) == 2
    assert documents.faults.num_rows == 2
    assert documents.faults.first.startswith(f"a.jsonl, row 1: {reason}")
    assert "\n" not in documents.faults.first


def test_where_none_of_many_rows_can_be_learnt_the_dataset_is_not_read_to_its_end(tmp_path: Path) -> None:
    documents, rows = _documents(tmp_path), _rows(*[{"text": "x"}] * 500)
    with pytest.raises(ValueError, match=r"^a.jsonl, row 1: there are no 'messages'; the row has text$"):
        list(documents.of(rows))
    assert next(rows).place == "a.jsonl, row 101"


UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED])
def test_a_message_with_weight_0_is_not_learnt(template: str, tmp_path: Path) -> None:
    documents = _documents(tmp_path, template)
    weighted = [{**TALK[0], "weight": 0}, {**TALK[1], "weight": 0}, TALK[2], {**TALK[3], "weight": 1}]
    (document, whole) = _of(documents, {"messages": weighted}, {"messages": TALK})
    assert _learnt(documents, document).rstrip() == "No \U0001f41d<|im_end|>"
    assert document.tokens.tolist() == whole.tokens.tolist()


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_and_calls_are_rendered_as_transformers_does(tools: Any, tmp_path: Path) -> None:
    documents = _documents(tmp_path, WITH_TOOLS, sequence_length=999)
    messages = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    (document,) = _of(documents, {"messages": messages, "tools": tools})
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tools=[TOOL], return_dict=True)
    assert document.tokens.tolist() == theirs["input_ids"]
    assert _learnt(documents, document) == json.dumps([CALL]) + "<|im_end|>\n"


def test_conversations_with_tools_have_a_template_of_their_own_if_the_model_has_one(tmp_path: Path) -> None:
    """Compare with transformers, also in the lines at the templates' edges."""
    named = [
        {"name": "default", "template": f"\n  {UNMARKED}\n"},
        {"name": "tool_use", "template": f"\n  {WITH_TOOLS}\n"},
    ]
    path = Path(write_chat_tokenizer(tmp_path)).with_name("tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = chat.load(tmp_path, now=lambda: datetime(2026, 1, 1))
    assert ours is not None
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template(TALK, tools=tools, tokenize=False)
        assert ours.render_training(TALK, tools=tools).text == expected


def test_nulls_and_texts_in_parts_are_what_their_values_say(tmp_path: Path) -> None:
    """A table gives every message all fields."""
    documents = _documents(tmp_path, WITH_TOOLS)
    nulls = {"tool_calls": None, "name": None, "weight": None}
    parts = [{"type": "text", "text": "na"}, {"type": "text", "text": "\u00efve", "image_url": None}]
    messages = [{**TALK[0], **nulls}, {"role": "assistant", "content": parts, **nulls}]
    empty, plain = _of(documents, {"messages": messages, "tools": None}, {"messages": TALK[:2]})
    assert documents.faults.num_rows == 0
    assert empty.tokens.tolist() == plain.tokens.tolist()
    assert _learnt(documents, empty) == "na\u00efve<|im_end|>\n"


def _document(number: int, length: int) -> Document:
    targets = np.ones(length, dtype=bool)
    targets[0] = False
    return Document(np.full(length, number, dtype=np.uint16), targets)


def _sequences(lengths: list[int], **data: Any) -> list[npt.NDArray[np.void]]:
    config = DataConfig(dataset="a.jsonl", format="chat", sequence_length=9, **data)
    documents = (_document(number, length) for number, length in enumerate(lengths, start=1))
    return list(sequences(documents, config, vocab_size=1000))


@given(st.lists(st.integers(1, 10), max_size=300))
def test_every_document_is_there_once_and_whole(lengths: list[int]) -> None:
    found: dict[int, int] = {}
    for record in _sequences(lengths):
        numbers = record[DOCUMENTS].tolist()
        assert numbers[0] == 0
        assert set(np.diff(numbers).tolist()) <= {0, 1}
        for document in range(max(numbers) + 1):
            tokens = record[TOKENS][record[DOCUMENTS] == document]
            targets = record[TARGETS][record[DOCUMENTS] == document].tolist()
            assert len(set(tokens.tolist())) == 1
            if tokens[0]:
                assert found.setdefault(int(tokens[0]), len(tokens)) == len(tokens)
                assert targets == [0] + [1] * (len(tokens) - 1)
            else:
                assert not any(targets), "padding teaches nothing"
    assert found == dict(enumerate(lengths, start=1))


def test_little_is_left_empty() -> None:
    lengths = np.random.default_rng(0).integers(1, 10, 3000).tolist()
    assert len(_sequences(lengths)) * 10 < 1.03 * sum(lengths)
