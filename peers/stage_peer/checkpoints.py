"""Writes a stage peer's checkpoints: when they are due, while training goes on, and once more when the peer leaves."""

import asyncio
from collections.abc import Callable

from peers.shared import option_checks
from peers.stage_peer.options import PeerOptions
from swarm.checkpoint.file import Header
from swarm.checkpoint.writer import DEFAULT_EVERY, CheckpointWriter
from swarm.config import RunConfig
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.stage.member import StageMember

LAST_CHECKPOINT_SECONDS = 120.0
"""How long a peer that leaves waits for its checkpoint. Large ones take a while; a disk that hangs takes for ever."""


def open_checkpoints(options: PeerOptions, owner: str) -> CheckpointWriter | None:
    """Make the writer of checkpoints, if they are wanted. Raises ValueError if --resume names no folder."""
    writer = None
    if options.checkpoint is not None:
        writer = CheckpointWriter(
            options.checkpoint, every=options.checkpoint_every or DEFAULT_EVERY, keep=options.keep_checkpoints or 3,
            owner=owner,
        )  # fmt: skip
    if options.resume is not None:
        option_checks.require_folder("--resume", options.resume)
    return writer


class Checkpoints:
    """The checkpoints of one stage while the peer serves it. Without a writer nothing is written."""

    def __init__(
        self, writer: CheckpointWriter | None, config: RunConfig, stage: int, member: StageMember,
        tasks: asyncio.TaskGroup, highest_microbatch: Callable[[], int],
    ) -> None:  # fmt: skip
        """
        Args:
            highest_microbatch: gives the largest id that was granted so far, as the averager knows it.
        """
        self._writer = writer
        self._config = config
        self._stage = stage
        self._member = member
        self._tasks = tasks
        self._highest_microbatch = highest_microbatch
        self._writing: set[asyncio.Task[None]] = set()
        """The checkpoints that are being written."""

    def committed(self) -> None:
        if self._writer is not None and self._writer.is_due(self._member.progress().round):
            self.begin()

    def begin(self) -> None:
        """Begin to write a checkpoint, and do not wait for it."""
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
                if self._member.progress().round > writer.newest_round(self._stage):
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
            config=self._config,
            stage=self._stage,
            round=snapshot.round,
            run_samples=snapshot.run_samples,
            lineage=snapshot.lineage,
            highest_microbatch=self._highest_microbatch(),
            state_digest=snapshot.digest,
        )
        await writer.write(header, snapshot.tensors)
