"""Packing: puts documents side by side in sequences of one length, as records that can be read by number.

Used by data/prepared, which writes the records; data/microbatches reads them. Documents stay whole. The order of the
sequences depends on the documents alone. A bounded number of sequences is open at a time.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from swarm.config import DataConfig
from swarm.data.documents import Document
from swarm.training import samples
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS, token_dtype

NUM_OPEN = 64
"""The most sequences that are open because they still have room. With this many, hardly any room is left empty."""
_RECORDS_AT_ONCE = 1024


def record_dtype(config: DataConfig, vocab_size: int) -> np.dtype[np.void]:
    """One sequence: the fields of training/samples, each [sequence_length + 1]."""
    shape = (config.sequence_length + 1,)
    types = {
        TOKENS: token_dtype(vocab_size),
        TARGETS: np.dtype("u1"),
        DOCUMENTS: token_dtype(config.sequence_length + 2),
    }
    return np.dtype([(name, types[name], shape) for name in samples.names(config)])


def sequences(documents: Iterator[Document], config: DataConfig, vocab_size: int) -> Iterator[npt.NDArray[np.void]]:
    """Yield sequences, as records of shape (). Each ends with padding, which counts as a document without targets."""
    dtype = record_dtype(config, vocab_size)
    if not config.is_packed:
        for document in documents:
            yield _record([document], dtype)
        return
    for group in pack(documents, config.sequence_length + 1):
        yield _record(group, dtype)


def pack(documents: Iterator[Document], capacity: int) -> Iterator[list[Document]]:
    """Yield groups of documents of at most `capacity` tokens. Each document goes into the fullest open group with room
    for it.

    This is best fit with a bounded number of bins (Johnson 1974): if too many are open, the fullest is closed.
    """
    groups: list[list[Document]] = []
    rooms: list[int] = []
    for document in documents:
        fitting = [index for index, room in enumerate(rooms) if room >= len(document)]
        if fitting:
            index = min(fitting, key=rooms.__getitem__)
        else:
            index = len(groups)
            groups.append([])
            rooms.append(capacity)
        groups[index].append(document)
        rooms[index] -= len(document)
        if rooms[index] == 0 or len(groups) > NUM_OPEN:
            fullest = min(range(len(rooms)), key=rooms.__getitem__)
            rooms.pop(fullest)
            yield groups.pop(fullest)
    yield from groups


def longest_learnt(records: npt.NDArray[np.void]) -> int:
    """The least sequence_length with which every document of some records is learnt whole."""
    longest = 0
    for start in range(0, len(records), _RECORDS_AT_ONCE):
        some = records[start : start + _RECORDS_AT_ONCE]
        places_BT = np.broadcast_to(np.arange(some[TARGETS].shape[1]), some[TARGETS].shape)
        if DOCUMENTS in (records.dtype.names or ()):
            begins_BT = np.diff(some[DOCUMENTS].astype(np.int64), axis=1, prepend=-1) != 0
            places_BT = places_BT - np.maximum.accumulate(np.where(begins_BT, places_BT, 0), axis=1)
        longest = max(longest, int(np.max(places_BT * some[TARGETS])))
    return longest


def _record(documents: list[Document], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    record, names = np.zeros((), dtype=dtype), dtype.names or ()
    start = 0
    for number, document in enumerate(documents):
        end = start + len(document)
        record[TOKENS][start:end] = document.tokens
        record[TARGETS][start:end] = document.targets
        if DOCUMENTS in names:
            record[DOCUMENTS][start:end] = number
        start = end
    if DOCUMENTS in names:
        record[DOCUMENTS][start:] = len(documents)
    return record
