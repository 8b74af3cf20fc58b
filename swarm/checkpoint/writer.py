"""Writes one peer's checkpoints as the rounds go by, and keeps the newest few.

It works in threads of its own. A process that ends does not wait for these threads, because a disk may hang for ever.
After a failure there is a line in the log, and training goes on with the checkpoints that are there. Nothing is deleted
before a newer checkpoint is safely written.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from swarm.checkpoint import file
from swarm.checkpoint.file import Draft, FileName, Header, Tensors
from swarm.checkpoint.keeping import Keeping
from swarm.config import RunConfig, Timeline
from swarm.errors import IntegrityError
from swarm.machine.background import begun
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.training.round_member import RoundMember
from swarm.types import Block

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
LAST_CHECKPOINT_SECONDS = 120.0
"""How long a peer that leaves waits for its checkpoint. Large ones take a while; a disk that hangs takes for ever."""


class CheckpointWriter:
    """Writes the checkpoints of one stage peer into its folder. Several peers may have the same folder."""

    def __init__(self, folder: Path, keeping: Keeping, *, owner: str) -> None:
        """
        Args:
            owner: as for file.write. Unfinished files of an earlier process of this owner are removed.

        Raises:
            OSError: the folder does not exist and cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file.remove_unfinished(folder, owner)
        self.folder = folder
        self._keeping = keeping
        self._owner = owner
        self._lock = asyncio.Lock()
        self._former = file.names(folder)
        """The checkpoints that were in the folder when this peer started."""
        self._is_ours = not self._former
        """Whether these checkpoints are known to be of this run."""
        self._newest: dict[Block, int] = {}
        self.fault = ""
        """Why the last state that was to be written was not; empty if it was."""

    @property
    def had_any(self) -> bool:
        return bool(self._former)

    def is_due(self, round_number: int) -> bool:
        if not self._keeping.is_due(round_number):
            return False
        if self._lock.locked():
            logger.warning("no checkpoint of round %d: an earlier one is still being written", round_number)
            return False
        return True

    def newest_round(self, block: Block) -> int:
        return self._newest.get(block, 0)

    def draft(self, header: Header, shapes: Mapping[str, torch.Size]) -> Draft:
        """Begin a checkpoint that comes tensor by tensor; see Draft."""
        return Draft(self.folder, header, shapes, owner=self._owner)

    async def write(self, header: Header, state: Tensors | Draft) -> bool:
        """Write a state, or complete its draft. Returns whether that succeeded.

        Waits until the last state is written. If this is cancelled, the thread goes on: in the end the file is whole,
        or does not exist.

        Args:
            state: tensors, which must not change any more, or a draft that has all of them.
        """
        async with self._lock:
            if not self._is_ours:
                if foreign := await _apart(lambda: self._foreign(header)):
                    if isinstance(state, Draft):
                        state.discard()
                    return self.failed(f"no checkpoint of round {header.round}: {foreign}")
                self._is_ours = True
            try:
                path = await _apart(lambda: self._write(header, state))
            except IntegrityError as error:
                return self.failed(f"no checkpoint of round {header.round}: {error}; those that are there stay")
            # torch raises RuntimeError when there is no memory.
            except (OSError, RuntimeError, MemoryError) as error:
                return self.failed(f"no checkpoint of round {header.round} in {self.folder}: {error}")
            self.fault = ""
            self._newest[header.block] = header.round
            logger.info("wrote the checkpoint %s", path)
            try:
                await _apart(lambda: self._tidy(header.config, header.name))
            except OSError as error:
                logger.warning("old checkpoints stay: %s", error)
        return True

    def failed(self, fault: str) -> bool:
        self.fault = fault
        logger.error("%s", fault)
        return False

    def _write(self, header: Header, state: Tensors | Draft) -> Path:
        if isinstance(state, Draft):
            return state.finish(header)
        return file.write(self.folder, header, state, owner=self._owner)

    def _foreign(self, header: Header) -> str:
        """Return a line about a checkpoint of another run in this folder, if there is one. (It would be deleted as an
        old one of this run.)"""
        for name in self._former:
            if difference := file.difference(self.folder / str(name), header.config):
                return f"{name} in {self.folder} is of another run ({difference}); give --checkpoint another folder"
        return ""

    def went_back(self, config: RunConfig, round_number: int, *, block: Block | None = None) -> None:
        """Set aside checkpoints of later rounds than the one that the run goes on from, of one block or of all.

        Under their old names they would be taken for the newest ones, or be mixed with later ones. Checkpoints of
        another run are left alone.
        """
        for name in [n for n in self._former if n.round > round_number and block in (None, n.block)]:
            path = self.folder / str(name)
            if file.difference(path, config):
                continue
            self._former.remove(name)
            logger.warning(
                "%s is of a later round than the run goes on from: it gets the ending %s", path, file.SET_ASIDE
            )
            file.set_aside(path)

    def _tidy(self, config: RunConfig, written: FileName) -> None:
        """Delete the checkpoints that are superfluous now."""
        self.went_back(config, written.round, block=written.block)
        cut = (written.block, written.num_stages)
        named = {n.round: n for n in file.names(self.folder) if (n.block, n.num_stages) == cut}
        rounds = [number for number in named if number <= written.round]
        former = {number for number, name in named.items() if name in self._former}
        for number in self._keeping.superfluous(rounds, former):
            (self.folder / str(named[number])).unlink(missing_ok=True)


class Checkpoints:
    """The checkpoints of one block while the peer serves it. Without a writer nothing is written."""

    def __init__(
        self, writer: CheckpointWriter | None, config: RunConfig, block: Block, member: RoundMember, timeline: Timeline,
        tasks: asyncio.TaskGroup, highest_microbatch: Callable[[], int],
    ) -> None:  # fmt: skip
        """`highest_microbatch` gives the largest id that was granted so far, as the averager knows it."""
        self._writer = writer
        self._config = config
        self._block = block
        self._member = member
        self._timeline = timeline
        self._tasks = tasks
        self._highest_microbatch = highest_microbatch
        self._writing: set[asyncio.Task[None]] = set()

    def committed(self) -> None:
        if self._writer is not None and self._writer.is_due(self._member.progress().round):
            self.begin()

    def begin(self) -> None:
        if self._writer is not None:
            writing = self._tasks.create_task(self._write(self._writer))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)

    async def last(self) -> None:
        """Write a last checkpoint if the newest one is older. Give up after a while if the disk hangs."""
        writer = self._writer
        if writer is None:
            return
        try:
            async with asyncio.timeout(LAST_CHECKPOINT_SECONDS):
                if self._writing:
                    await asyncio.wait(self._writing)
                if self._member.progress().round > writer.newest_round(self._block):
                    await self._write(writer)
        except TimeoutError:
            writer.failed(
                f"no checkpoint of round {self._member.progress().round} in {writer.folder}: not written within "
                f"{LAST_CHECKPOINT_SECONDS:.0f} s; does the disk hang?"
            )
        for writing in self._writing:
            writing.cancel()

    async def _write(self, writer: CheckpointWriter) -> None:
        """Write the state at the beginning of the present round, which no inner step changes."""
        try:
            snapshot = await self._member.snapshot()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            writer.failed(f"no checkpoint of round {self._member.progress().round}, for want of memory: {error}")
            return
        header = Header(
            config=self._config, stage=self._block.stage, variant=self._block.variant, round=snapshot.round,
            run_samples=snapshot.run_samples, lineage=snapshot.lineage, highest_microbatch=self._highest_microbatch(),
            state_digest=snapshot.digest, amendments=self._timeline.texts, tally=snapshot.tally.to_text(),
        )  # fmt: skip
        await writer.write(header, snapshot.tensors)


async def _apart(work: Callable[[], Result]) -> Result:
    return await asyncio.wrap_future(begun(work, "checkpoint"))
