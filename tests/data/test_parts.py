"""Hugging Face datasets that are read in parts, while training goes on."""

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.config import DataConfig
from swarm.data import corpora, tokenizers
from swarm.data.microbatches import Microbatches
from swarm.data.parts import RETRY_SECONDS, Parts
from swarm.data.prepared import Prepared, Recipe
from swarm.errors import CorpusMismatch
from swarm.training.samples import TOKENS
from tests.data.texts import Rows, end_of_preparation

PART, HELD_OUT, WIDTH = 20, 2, 32
"""Rows of a part and of what is held out, and bytes of a row: two samples."""
CONFIG = DataConfig(
    dataset="hf:endless", part_rows=PART, held_out_fraction=0.1, sequence_length=WIDTH // 2, microbatch_size=3
)


class Hub(Rows):
    """A dataset whose rows say their numbers. It notes how far it was read, and may stop at a row until it is told to
    go on."""

    def __init__(self, num_rows: int, *, changed: int = -1) -> None:
        super().__init__([])
        self.num_rows, self.changed = num_rows, changed
        self.stops_at = num_rows
        self.has_stopped, self.goes_on = threading.Event(), threading.Event()
        self.num_read = 0
        self.faults: list[Exception] = []
        """Raised one after another at the row at which it would stop."""
        self.without_text = range(0)

    def _all(self) -> Iterator[dict[str, Any]]:
        for number in range(self.num_rows):
            if number >= self.stops_at:
                if self.faults:
                    raise self.faults.pop(0)
                self.has_stopped.set()
                assert self.goes_on.wait(30)
            self.num_read += 1
            text = f"row {number}{'!' if number == self.changed else ''} ".ljust(WIDTH - 1, ".")
            yield {} if number in self.without_text else {"text": text}


@pytest.fixture(autouse=True)
def _nothing_in_the_background(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    end_of_preparation()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(10**9)
    hub.install(monkeypatch)
    return hub


def _data(cache: Path, config: DataConfig = CONFIG) -> Microbatches:
    return Microbatches(corpora.prepare(config, cache_dir=cache), config)


def _ready(data: Microbatches, index: int) -> Microbatches:
    for part in data.preparing(index):
        part.result(30)
    return data


def _rows_of_epoch(data: Microbatches, epoch: int) -> list[int]:
    """The row with which each sample of an epoch begins, if it begins with one, in the order of the epoch."""
    size, batch = data.num_windows, CONFIG.microbatch_size
    samples = [sample for index in range(epoch * size // batch, -(-(epoch + 1) * size // batch))
               for sample in _ready(data, index).tokens(index)]  # fmt: skip
    texts = [bytes(sample.tolist()).decode() for sample in samples[epoch * size % batch :][:size]]
    return [int(text.split()[1]) for text in texts if text.startswith("row")]


def _of(part: Prepared | Future[Prepared]) -> list[int]:
    """The rows of a part of texts."""
    found = part.result(30) if isinstance(part, Future) else part
    return [int(line.split()[1]) for line in found.tokens.tobytes().decode().splitlines()]


def _recipe(config: DataConfig = CONFIG) -> Recipe:
    return Recipe(config, tokenizers.load("bytes"), None)


def test_an_epoch_has_the_rows_of_its_part_and_no_others(hub: Hub, tmp_path: Path) -> None:
    """The last sample of a part would need the token after it, and is left out."""
    data = _data(tmp_path)
    assert data.num_windows == 2 * PART - 1
    for epoch in range(3):
        first = HELD_OUT + epoch * PART
        rows = _rows_of_epoch(data, epoch)
        assert sorted(rows) == list(range(first, first + PART))
        assert rows != sorted(rows)
    held_out = [bytes(sample.tolist()).decode() for batch in data.held_out(100) for sample in batch[TOKENS]]
    assert [text[:5] for text in held_out if text.startswith("row")] == ["row 0", "row 1"]


def test_whoever_begins_later_has_the_same_samples_and_tokenizes_nothing_before(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _data(tmp_path / "first")
    later = 5 * first.num_windows // CONFIG.microbatch_size
    expected = [_ready(first, index).tokens(index) for index in range(later + 20)][later:]
    other = _data(tmp_path / "other")
    found = [_ready(other, index).tokens(index) for index in range(later, later + 20)]
    assert np.array_equal(found, expected)
    names = {path.stem.partition("-")[2] for path in (tmp_path / "other").glob("*.tokens")}
    assert {"held-out", "part-0", "part-5"} <= names <= {"held-out", "part-0", *(f"part-{n}" for n in range(4, 8))}
    fresh = Hub(10**9)
    fresh.install(monkeypatch)
    again = _data(tmp_path / "other")
    assert fresh.num_read == 0, "a restart finds its first part on disk"
    assert np.array_equal(_ready(again, later + 19).tokens(later + 19), expected[-1])


def test_the_next_part_is_prepared_while_the_present_one_is_trained_on(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data = _data(tmp_path)
    assert hub.num_read == HELD_OUT + PART, "training begins when there is one part"
    hub.stops_at = HELD_OUT + PART + 5
    assert not data.preparing(0)
    data.samples(0)
    assert hub.has_stopped.wait(30), "a thread reads the next part"
    assert "training waits" not in caplog.text
    next_one = data.num_windows // CONFIG.microbatch_size
    [part] = data.preparing(next_one)
    data.samples(1)
    assert not part.done()
    assert not part.cancel(), "a microbatch that is given up does not end it for others"
    assert "training waits for part 1 of hf:endless, which is prepared now" in caplog.messages
    hub.goes_on.set()
    assert part.result(30)
    assert not data.preparing(next_one)
    assert hub.asked == [("endless", None, "train", True)], "the dataset is read on, and not from its start"


def test_older_parts_are_deleted_but_the_first(hub: Hub, tmp_path: Path) -> None:
    parts = Parts("hf:endless", _recipe(), tmp_path)
    parts.held_out()
    parts.first()
    kept = [parts.want(number) for number in range(6)]
    assert [_of(part)[0] for part in kept] == [PART * number + HELD_OUT for number in range(6)]
    _of(parts.want(6))
    assert {path.stem.partition("-")[2] for path in tmp_path.glob("*.tokens")} - {"part-7"} == {
        "held-out", "part-0", "part-5", "part-6",
    }  # fmt: skip
    assert len([path for path in tmp_path.glob("*.json") if not path.stem.endswith("part-7")]) <= 4
    later = parts.want(6)
    assert _of(parts.want(0)) == list(range(HELD_OUT, HELD_OUT + PART)), "it is always at hand"
    assert parts.want(6) is later


def test_a_part_that_is_prepared_just_now_is_not_deleted(hub: Hub, tmp_path: Path) -> None:
    """A run may jump ahead meanwhile."""
    pauses: list[float] = []
    parts = Parts("hf:endless", _recipe(), tmp_path, pause=pauses.append)
    parts.first()
    hub.stops_at = HELD_OUT + PART + 5
    early = parts.want(1)
    assert hub.has_stopped.wait(30)
    late = parts.want(9)
    assert parts.want(1) is early, "it is not prepared twice"
    hub.goes_on.set()
    assert (_of(early)[0], _of(late)[0]) == (HELD_OUT + PART, HELD_OUT + 9 * PART)
    assert not pauses


@pytest.mark.parametrize("is_there", [True, False])
def test_a_part_that_another_process_deletes_just_now_is_at_hand_at_once(
    is_there: bool, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has gone on to later parts, and deletes this one as soon as it sees it."""
    pauses: list[float] = []
    parts = Parts("hf:endless", _recipe(), tmp_path, pause=pauses.append)
    parts.first()
    if is_there:
        _of(Parts("hf:endless", _recipe(), tmp_path).want(1))
    names, memmap, replace = {"part-1", "part-2"}, np.memmap, Path.replace
    deleted = set[Path]()

    def delete(path: Path) -> None:
        if path.suffix == ".tokens" and path.stem.partition("-")[2] in names and path.parent == tmp_path:
            deleted.add(path)
            path.unlink()

    def mapped(path: Path, **options: Any) -> Any:
        delete(path)
        return memmap(path, **options)

    def replaced(path: Path, target: Path) -> Path:
        result = replace(path, target)
        delete(target)
        return result

    monkeypatch.setattr(np, "memmap", mapped)
    monkeypatch.setattr(Path, "replace", replaced)
    assert _of(parts.want(1)) == list(range(HELD_OUT + PART, HELD_OUT + 2 * PART))
    assert deleted
    assert not pauses


def test_a_dataset_with_other_rows_is_refused(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = corpora.published(CONFIG, corpora.prepare(CONFIG, cache_dir=tmp_path / "first"), None)
    corpora.check_digest(run, corpora.prepare(run, cache_dir=tmp_path / "same"))
    for changed in (0, HELD_OUT + PART - 1):
        Hub(10**9, changed=changed).install(monkeypatch)
        with pytest.raises(CorpusMismatch, match="'hf:endless' is different text here"):
            corpora.check_digest(run, corpora.prepare(run, cache_dir=tmp_path / f"changed {changed}"))


@pytest.mark.parametrize("number", [2, 7, 12])
@pytest.mark.parametrize("num_rows", [50, 60])
def test_after_the_last_row_the_first_ones_come_again(
    num_rows: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(HELD_OUT + num_rows).install(monkeypatch)
    parts = Parts("hf:finite", _recipe(dataclasses.replace(CONFIG, dataset="hf:finite")), tmp_path)
    assert _of(parts.held_out()) == [0, 1]
    assert _of(parts.first()) == list(range(HELD_OUT, HELD_OUT + PART))
    expected = [[HELD_OUT + row % num_rows for row in range(n * PART, (n + 1) * PART)] for n in range(20)]
    assert _of(parts.want(number)) == expected[number]
    assert _of(parts.want(number + 1)) == expected[number + 1]
    assert _of(parts.want(1)) == expected[1], "a run may go back to a checkpoint"


def test_a_part_that_the_hub_does_not_give_is_tried_again(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    parts = Parts("hf:endless", _recipe(), tmp_path, pause=pauses.append)
    parts.first()
    hub.stops_at, hub.faults = PART + 5, [ConnectionError("the hub is away"), ConnectionError("still away")]
    hub.goes_on.set()
    assert _of(parts.want(1)) == list(range(HELD_OUT + PART, HELD_OUT + 2 * PART))
    assert pauses == [RETRY_SECONDS] * 2
    assert "part 1 is prepared again in 30 s: cannot load data.dataset 'hf:endless': " in caplog.text


def test_instead_of_a_part_without_text_the_first_one_comes_again(hub: Hub, tmp_path: Path) -> None:
    """An error would end a training that has gone on for days."""
    hub.without_text = range(HELD_OUT + PART, HELD_OUT + 2 * PART)
    data = _data(tmp_path)
    assert sorted(_rows_of_epoch(data, 1)) == sorted(_rows_of_epoch(data, 0))
