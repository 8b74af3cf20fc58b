"""Parts of a Hugging Face dataset: it is read while training goes on, because it may be too large to be prepared whole.

data/corpora makes the parts, and data/microbatches asks for them by number. Row 0 is the first row after those that are
held out; part k is rows k * part_rows to (k + 1) * part_rows, and after the last row comes row 0 again. So all machines
have the same parts, and one that begins with a later part only has to skip rows. A thread prepares the part that is
asked for and the next one. On disk are part 0, which every start compares with the run's, the last part, the present
one and the next.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

from swarm.data import prepared, rows
from swarm.data.prepared import Prepared, Recipe
from swarm.data.rows import Row
from swarm.data.sources import Part
from swarm.machine.background import begun

logger = logging.getLogger(__name__)

THREAD_NAME = "parts"
RETRY_SECONDS = 30.0
"""Time until a part is tried again that could not be prepared, because the hub may be away for a while."""


class Parts:
    def __init__(
        self, dataset: str, recipe: Recipe, cache_dir: Path, *, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._cache_dir = cache_dir
        self._pause = pause
        self._open: tuple[Iterator[Row], int] | None = None
        """The dataset where the last part that was read ended, and the number of its next row."""
        self._num_rows = 0
        """The number of rows that are not held out; 0 before the end was reached."""
        self._present = -1
        """The part that was asked for last, without those that came late."""
        self._futures: dict[int, Future[Prepared]] = {}
        """The parts that are at hand or will be, in the order in which they are prepared."""

    def held_out(self) -> Prepared:
        """Prepare the held-out rows. Blocks. Raises ValueError as `prepare` does."""
        return self._prepared(Part("held-out", self._held_out_rows()))

    def first(self) -> Prepared:
        """Prepare part 0. Blocks. Raises ValueError as `prepare` does, and if the dataset has fewer rows."""
        first = self._prepared(Part(_name(0), self._rows(0)))
        self._futures[0] = Future()
        self._futures[0].set_result(first)
        return first

    def want(self, number: int) -> Future[Prepared]:
        """Part `number`, once it is prepared, which does not fail: what cannot be read now is tried again. Part 0 must
        have been prepared. Only one thread may call this."""
        if number not in self._futures or number > self._present:
            self._present = number
            near = {0, number - 1, number, number + 1}
            # What is prepared just now must not be deleted before it is open.
            self._futures = {n: future for n, future in self._futures.items() if n in near or not future.done()}
            for each in (number, number + 1):
                if each not in self._futures:
                    before = [*self._futures.values()][-1:]
                    self._futures[each] = begun(partial(self._prepare, each, before), THREAD_NAME)
            names = ["held-out", *map(_name, near | self._futures.keys())]
            prepared.delete_parts(self._dataset, self._recipe, self._cache_dir, but=names)
            if not self._futures[number].done():
                logger.info("training waits for part %d of %s, which is prepared now", number, self._dataset)
        return self._futures[number]

    # -- in the background ---------------------------------------------------------------------------------------------

    def _prepare(self, number: int, before: Collection[Future[Prepared]]) -> Prepared:
        wait(before)
        while True:
            try:
                # Only a dataset's first part has to have rows that can be used: an error would not pass.
                return self._prepared(Part(_name(number), self._rows(number), may_be_empty=True))
            except ValueError as error:
                logger.warning("part %d is prepared again in %.0f s: %s", number, RETRY_SECONDS, error)
                self._pause(RETRY_SECONDS)

    def _prepared(self, part: Part) -> Prepared:
        return prepared.prepare(self._dataset, self._recipe, self._cache_dir, part=part)

    # -- reading rows --------------------------------------------------------------------------------------------------

    def _held_out_rows(self) -> Iterator[Row]:
        reader = rows.of_hugging_face(self._dataset, self._recipe.config)
        yield from itertools.islice(reader, self._recipe.config.held_out_rows)
        self._open = reader, 0

    def _rows(self, number: int) -> Iterator[Row]:
        """The rows of a part. Raises ValueError if they cannot be read, or the dataset is too small for one part."""
        config = self._recipe.config
        first = number * config.part_rows
        reader, position = self._opened(first)
        while position < first + config.part_rows:
            row = next(reader, None)
            if row is None:
                self._note_end(self._num_rows or position)
                position = max(position, first)
                reader = self._from_row(position)
                continue
            position += 1
            if position > first:
                yield row
        # If the part was not read to its end, the next one is read from the dataset's start.
        self._open = reader, position

    def _opened(self, first: int) -> tuple[Iterator[Row], int]:
        found, self._open = self._open, None
        return found if found is not None and found[1] <= first else (self._from_row(first), first)

    def _from_row(self, first: int) -> Iterator[Row]:
        if first and not self._num_rows:
            logger.info("skips %d rows of %s", first, self._dataset)
            reader = self._reader(first)
            if (row := next(reader, None)) is not None:
                return itertools.chain([row], reader)
            self._note_end(sum(1 for _ in self._reader(0)))
        return self._reader(first % self._num_rows if self._num_rows else 0)

    def _reader(self, skipped: int) -> Iterator[Row]:
        config = self._recipe.config
        return rows.of_hugging_face(self._dataset, config, skipped=config.held_out_rows + skipped)

    def _note_end(self, num_rows: int) -> None:
        config = self._recipe.config
        if num_rows < config.part_rows:
            raise ValueError(
                f"data.dataset {self._dataset!r} has {num_rows + config.held_out_rows} rows, too few for "
                f"data.part_rows {config.part_rows}: leave that out"
            )
        self._num_rows = num_rows


def _name(number: int) -> str:
    return f"part-{number}"
