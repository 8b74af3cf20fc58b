import dataclasses
from typing import Any

import numpy as np
import pytest

from swarm.config import DataConfig
from swarm.data.microbatches import Microbatches, Texts
from swarm.errors import CorpusMismatch
from swarm.training.samples import TOKENS
from tests.support.text_corpus import text_corpus

SEQUENCE = 4


def _microbatches(*, training: int, held_out: int = 101, seed: int = 0, microbatch_size: int = 3) -> Microbatches:
    """Token i of the corpus is i, so that a sample says where it comes from."""
    tokens = np.arange(training + held_out, dtype=np.uint32)
    corpus = text_corpus((tokens, training), vocab_size=training + held_out)
    settings: dict[str, Any] = {"sequence_length": SEQUENCE, "microbatch_size": microbatch_size, "seed": seed}
    return Microbatches(corpus, DataConfig(**settings))


def _samples(microbatches: Microbatches, count: int, microbatch_size: int = 3) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.concatenate([microbatches.tokens(index) for index in range(-(-count // microbatch_size))])[:count]


def _epoch(microbatches: Microbatches, number: int) -> list[int]:
    """The first token of each sample of an epoch."""
    size = microbatches.num_windows
    return [int(first) for first in _samples(microbatches, size * (number + 1))[-size:, 0]]


@pytest.mark.parametrize("windows", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 257, 1000])
def test_each_window_once_an_epoch(windows: int) -> None:
    """Around powers of two and four the walk differs, and epochs end inside microbatches."""
    microbatches = _microbatches(training=windows * SEQUENCE + 1)
    assert microbatches.num_windows == windows
    expected = [window * SEQUENCE for window in range(windows)]
    assert sorted(_epoch(microbatches, 0)) == expected
    assert sorted(_epoch(microbatches, 2)) == expected


def test_order_is_well_mixed() -> None:
    """Neighbours in the order are no neighbours in the text, and each part of an epoch draws from the whole text."""
    first = np.array(_epoch(_microbatches(training=40_001), 0)) / 40_000
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    counts = np.histogram(first[:1000], bins=10, range=(0, 1))[0]
    assert counts.min() > 60


def test_pure() -> None:
    """Another trainer, asked in another order, hands out the same samples."""
    one, other = _microbatches(training=1000), _microbatches(training=1000)
    forward = [one.tokens(index) for index in range(100)]
    backward = [other.tokens(index) for index in reversed(range(100))][::-1]
    assert np.array_equal(forward, backward)


def test_order_never_changes() -> None:
    """A run may outlive a release: these numbers must stay."""
    assert _microbatches(training=401, seed=7).tokens(40)[:, 0].tolist() == [212, 380, 136]


@pytest.mark.parametrize("training", [400, 401, 402, 403])
def test_training_never_sees_what_is_held_out(training: int) -> None:
    microbatches = _microbatches(training=training)
    assert _samples(microbatches, microbatches.num_windows).max() < training
    assert min(batch[TOKENS].min() for batch in microbatches.held_out(1000)) == training


def test_held_out_is_spread_evenly() -> None:
    """The held-out windows are the same each time, are from the whole part, and none comes twice."""
    microbatches = _microbatches(training=400, held_out=101)
    batches = [batch[TOKENS] for batch in microbatches.held_out(7)]
    assert [len(batch) for batch in batches] == [3, 3, 1]
    firsts = np.concatenate(batches)[:, 0]
    assert np.diff(firsts).min() >= 3 * SEQUENCE
    assert np.diff(firsts).max() <= 4 * SEQUENCE
    assert np.array_equal(np.concatenate([batch[TOKENS] for batch in microbatches.held_out(7)])[:, 0], firsts)


def _mixture(*windows: int, weights: tuple[float, ...] = (), microbatch_size: int = 3) -> Microbatches:
    """Each dataset has so many windows to train on, and half as many held out; tokens of the k-th begin at 10^6 k."""
    parts = []
    for number, count in enumerate(windows):
        tokens = np.arange(count * SEQUENCE + 1 + count // 2 * SEQUENCE + 1, dtype=np.uint32) + number * 10**6
        parts.append((tokens, count * SEQUENCE + 1))
    names = tuple(f"texts/{number}" for number in range(len(windows)))
    config = DataConfig(
        dataset=names, weights=weights, sequence_length=SEQUENCE, microbatch_size=microbatch_size, seed=3
    )
    return Microbatches(text_corpus(*parts, vocab_size=10**7), config)


def test_of_several_datasets_each_window_comes_once_an_epoch() -> None:
    microbatches = _mixture(7, 1, 20)
    expected = [
        number * 10**6 + window * SEQUENCE for number, count in enumerate((7, 1, 20)) for window in range(count)
    ]
    for epoch in range(3):
        found = _epoch(microbatches, epoch)
        assert sorted(found) == expected
        assert found != expected
    samples = _samples(microbatches, 28)
    assert np.array_equal(samples - samples[:, :1], np.tile(np.arange(SEQUENCE + 1), (28, 1))), "no window of two texts"


def test_weights_say_how_much_of_each_dataset_is_seen() -> None:
    """A small dataset comes again and again, a large one in parts, and all windows of one come equally often."""
    microbatches = _mixture(10, 190, weights=(3, 1))
    assert microbatches.num_windows == 200
    firsts = _samples(microbatches, 200 * 19)[:, 0]
    for epoch in range(19):
        assert (firsts[epoch * 200 : (epoch + 1) * 200] < 10**6).sum() == 150
    for found, num_windows, times in ((firsts[firsts < 10**6], 10, 285), (firsts[firsts >= 10**6], 190, 5)):
        windows, counts = np.unique(found, return_counts=True)
        assert len(windows) == num_windows
        assert set(counts) == {times}


def test_amended_weights_make_the_microbatches_of_a_run_that_always_had_them() -> None:
    before, always = _mixture(10, 190), _mixture(10, 190, weights=(3, 1))
    after = before.weighted((3, 1))
    assert before.weighted((3, 1)) is after
    assert after.weighted(()) is not after
    assert before.weighted(()) is before
    for index in (0, 5, 70, 1000):
        assert np.array_equal(after.tokens(index), always.tokens(index))
    first, second = (each.held_out_by_source(20) for each in (before, after))
    for one, other in zip(first, second, strict=True):
        assert all(np.array_equal(a[TOKENS], b[TOKENS]) for a, b in zip(one.batches, other.batches, strict=True))


def _by_path(paths: tuple[str, ...], wanted: tuple[int, ...] = (), **windows: int) -> Microbatches:
    """Each dataset has so many windows to train on, and as many held out; tokens of the k-th begin at 10^6 k."""
    config = DataConfig(paths=paths, sequence_length=SEQUENCE, microbatch_size=2, seed=3)
    parts = {
        name: (np.arange(2 * count * SEQUENCE + 2, dtype=np.uint32) + number * 10**6, count * SEQUENCE + 1)
        for number, (name, count) in enumerate(windows.items())
    }
    corpus = text_corpus(*(parts[name] for name in config.datasets_of(wanted)), vocab_size=10**7)
    return Microbatches(corpus, config, wanted)


def test_each_path_has_a_text_of_its_own() -> None:
    microbatches = _by_path(("a", "b", "c"), a=8, b=6, c=10)
    for index in range(30):
        firsts = microbatches.tokens(index)[:, 0]
        assert set(firsts // 10**6) == {index % 3}
    for path, count in enumerate((8, 6, 10)):
        seen = [int(first) for turn in range(count // 2) for first in microbatches.tokens(3 * turn + path)[:, 0]]
        assert sorted(seen) == [path * 10**6 + window * SEQUENCE for window in range(count)]


def test_paths_with_the_same_text_take_its_microbatches_in_turn() -> None:
    """So no two paths of an epoch train on one window, and one text at all paths is what it is without paths."""
    shared, alone = _by_path(("a", "b", "a"), a=12, b=4), _by_path(("a",), a=12)
    taken = [index for index in range(9) if index % 3 != 1]
    for number, index in enumerate(taken):
        assert np.array_equal(shared.tokens(index), alone.tokens(number))
    everywhere = _by_path(("a", "a"), a=12)
    assert all(np.array_equal(everywhere.tokens(index), alone.tokens(index)) for index in range(20))


def test_a_trainer_of_some_paths_needs_only_their_texts() -> None:
    names = ("a", "b", "c", "b")
    whole, some = _by_path(names, a=8, b=6, c=10), _by_path(names, (1, 2), a=8, b=6, c=10)
    for index in (1, 2, 5, 6, 9, 10):
        assert np.array_equal(some.tokens(index), whole.tokens(index))
    assert [held_out.name for held_out in some.held_out_by_source(8)] == ["b", "c"]


def test_held_out_text_says_which_paths_train_on_its_dataset() -> None:
    held_out = _by_path(("a", "b", "a"), a=8, b=6).held_out_by_source(8)
    assert [(each.name, each.paths) for each in held_out] == [("a", (0, 2)), ("b", (1,))]
    assert [int(each.batches[0][TOKENS][0, 0]) for each in held_out] == [8 * SEQUENCE + 1, 10**6 + 6 * SEQUENCE + 1]
    assert {each.paths for each in _mixture(7, 20).held_out_by_source(8)} == {()}


def test_another_text_is_opened_once_and_tried_again_if_it_was_not_there() -> None:
    config = DataConfig(digest="a" * 64)
    first, other = _microbatches(training=101), _microbatches(training=101)
    named = dataclasses.replace(config, digest="b" * 64)
    outcomes: list[Microbatches | Exception] = [ValueError("no such file"), other]

    def open_text(wanted: DataConfig) -> Microbatches:
        assert wanted is named
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    texts = Texts(first, config, open_text)
    assert texts.at(config) is first
    with pytest.raises(CorpusMismatch, match="goes on with another text, stdlib, which is not here: no such file"):
        texts.want(named).result(timeout=10)
    assert texts.at_hand(named) is first
    assert texts.want(named).result(timeout=10) is other
    assert texts.at(dataclasses.replace(named, dataset="elsewhere")) is other is texts.at_hand(named)
