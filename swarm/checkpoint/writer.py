"""Writes one stage peer's checkpoints as the rounds go by, and keeps the newest few.

Used by peers/stage_peer, which hands it copies of the stage's state. It works in threads of its own, for which the end
of the process does not wait, since a disk may hang for ever. A failure is one line in the log, and training goes on
with the checkpoints that are there. Nothing is deleted before something newer is safely written.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from swarm.checkpoint import file
from swarm.checkpoint.file import FileName, Header, Tensors
from swarm.config import RunConfig
from swarm.errors import IntegrityError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
DEFAULT_EVERY = 10
"""Rounds from one checkpoint to the next, where the user does not say."""


class CheckpointWriter:
    """Writes the checkpoints of one stage peer into its folder. Several peers may have the same folder."""

    def __init__(self, folder: Path, *, every: int, keep: int, owner: str) -> None:
        """
        Args:
            every: rounds from one checkpoint to the next.
            keep: how many checkpoints stay.
            owner: as for file.write. What its last process left unfinished is removed.

        Raises:
            OSError: there is no such folder, and it cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file.remove_unfinished(folder, owner)
        self.folder = folder
        self._every = every
        self._keep = keep
        self._owner = owner
        self._lock = asyncio.Lock()
        self._former = file.names(folder)
        """What was there when this peer started."""
        self._is_ours = not self._former
        """Whether what was there is known to be of this run."""
        self._newest: dict[int, int] = {}

    @property
    def had_any(self) -> bool:
        """Whether checkpoints were there when this peer started."""
        return bool(self._former)

    def is_due(self, round_number: int) -> bool:
        """Whether the state at the beginning of this round is to be written now."""
        if round_number % self._every:
            return False
        if self._lock.locked():
            logger.warning("no checkpoint of round %d: an earlier one is still being written", round_number)
            return False
        return True

    def newest_round(self, stage: int) -> int:
        """The newest round at which this peer wrote a checkpoint of a stage; 0 if there is none."""
        return self._newest.get(stage, 0)

    async def write(self, header: Header, tensors: Tensors) -> bool:
        """Write a state, whose tensors must not change any more, and tell whether that succeeded.

        Waits until the state before it is written. Cancellation leaves the thread at work: the file will be whole, or
        not there.
        """
        async with self._lock:
            if not self._is_ours:
                if foreign := await _apart(lambda: self._foreign(header)):
                    logger.error("no checkpoint of round %d: %s", header.round, foreign)
                    return False
                self._is_ours = True
            try:
                path = await _apart(lambda: file.write(self.folder, header, tensors, owner=self._owner))
            except IntegrityError as error:
                logger.error("no checkpoint of round %d: %s; those that are there stay", header.round, error)
                return False
            # torch says with a RuntimeError that there is no memory.
            except (OSError, RuntimeError, MemoryError) as error:
                logger.error("no checkpoint of round %d in %s: %s", header.round, self.folder, error)
                return False
            self._newest[header.stage] = header.round
            logger.info("wrote the checkpoint %s", path)
            try:
                await _apart(lambda: self._tidy(header.config, header.name))
            except OSError as error:
                logger.warning("old checkpoints stay: %s", error)
        return True

    def _foreign(self, header: Header) -> str:
        """Say which checkpoint here, if any, is of another run: otherwise it would be deleted as an old one of this
        run."""
        for name in self._former:
            if difference := file.difference(self.folder / str(name), header.config):
                return f"{name} in {self.folder} is of another run ({difference}); give --checkpoint another folder"
        return ""

    def went_back(self, config: RunConfig, round_number: int, *, stage: int | None = None) -> None:
        """Set aside checkpoints of later rounds than the one that the run goes on from, of one stage or of all.

        Under their old names they would be taken for the newest, or be mixed with those still to come. Checkpoints of
        another run are left alone.
        """
        for name in [n for n in self._former if n.round > round_number and stage in (None, n.stage)]:
            path = self.folder / str(name)
            if file.difference(path, config):
                continue
            self._former.remove(name)
            logger.warning(
                "%s is of a later round than the run goes on from: it gets the ending %s", path, file.SET_ASIDE
            )
            file.set_aside(path)

    def _tidy(self, config: RunConfig, written: FileName) -> None:
        """Delete all but the newest few; of those that a leaving peer wrote in between, keep only the newest one.

        Of those in between that were here before this peer started, `keep` may stay, in case `every` was another
        number then.
        """
        self.went_back(config, written.round, stage=written.stage)
        cut = (written.stage, written.num_stages)
        kept = [n for n in file.names(self.folder) if (n.stage, n.num_stages) == cut and n.round <= written.round]
        regular = [name for name in kept if name.round % self._every == 0]
        between = [name for name in kept if name.round % self._every]
        former = [name for name in between if name in self._former]
        own = [name for name in between if name not in self._former]
        first_kept = regular[-self._keep].round if len(regular) >= self._keep else 0
        passed = [name for name in former if name.round < first_kept]
        for name in {*regular[: -self._keep], *own[:-1], *former[: -self._keep], *passed}:
            (self.folder / str(name)).unlink(missing_ok=True)


async def _apart(work: Callable[[], Result]) -> Result:
    """Do `work` in a thread for which the end of the process does not wait, as it would for a pool's thread."""
    future: Future[Result] = Future()
    # From now on the work cannot be cancelled. The caller can only stop waiting for it.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return await asyncio.wrap_future(future)
