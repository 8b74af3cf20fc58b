from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import DataConfig
from swarm.data.documents import NUM_OPEN, Document, pack, sequences
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS


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


def test_without_packing_each_has_a_sequence() -> None:
    first, second = _sequences([3, 10], packing=False)
    assert first.dtype.names == (TOKENS, TARGETS)
    assert first[TOKENS].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert first[TARGETS].tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert second[TOKENS].tolist() == [2] * 10


@pytest.mark.parametrize("count", [1, 5000])
def test_a_bounded_number_is_open(count: int) -> None:
    """That is so however many documents fit nowhere."""
    taken = 0

    def documents() -> Any:
        nonlocal taken
        for number in range(count):
            taken = number + 1
            yield _document(number, 6)

    for closed, _ in enumerate(pack(documents(), 10), start=1):
        assert taken - closed <= NUM_OPEN
