"""Checkpoints of a static run. They have a swarm's format, so a swarm can go on from them, and the other way round.

A stage of the pipeline is one file, which the first of its workers writes and all of them read. Used by the loop.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from peers.stage_peer.resume import known, say_changes
from peers.static.options import StaticOptions
from peers.static.spread import Spread
from peers.static.workers import Workers
from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.checkpoint.folder import CheckpointFolder
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig
from swarm.errors import Fatal
from swarm.stage import state
from swarm.stage.staging import HostReader
from swarm.training import optim
from swarm.training.run_rounds import next_lineage
from swarm.types import Block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: the next step.
        run_samples: how many samples were trained on before it.
        lineage: hash chain over the checkpoints so far; empty at the beginning.
    """

    step: int = 0
    run_samples: int = 0
    lineage: str = ""

    def after(self, num_samples: int) -> "Progress":
        return dataclasses.replace(self, step=self.step + 1, run_samples=self.run_samples + num_samples)


class Checkpoints:
    def __init__(self, config: RunConfig, model: Spread, options: StaticOptions, workers: Workers) -> None:
        """`config` is cut into the mesh's stages."""
        self._config = config
        self._model = model
        self._options = options
        self._workers = workers
        self._stage = workers.place("pp")
        self._writer: CheckpointWriter | None = None
        self._written = -1
        self._is_newest_kept = True
        if options.checkpoint is not None and workers.place("dp") == workers.place("tp") == 0:
            self._writer = CheckpointWriter(options.checkpoint, options.keeping, owner=f"static-{self._stage}")

    def restore(self, optimizer: optim.Optimizer) -> Progress:
        """Take the newest checkpoint's state, if there is one. All workers call this. Raises Fatal if the checkpoints
        are of another run, or damaged, or not the same for all workers."""
        paths = (self._options.checkpoint, self._options.resume)
        folders = [CheckpointFolder(path, self._config) for path in paths if path is not None]
        folder = next((folder for folder in folders if not folder.is_empty), None)
        progress = Progress() if folder is None else self._take(folder, optimizer)
        (total,) = self._workers.total(progress.step)
        if total != progress.step * dist.get_world_size():
            raise Fatal("the workers see different checkpoints: --checkpoint must be a folder that all machines share")
        self._written = progress.step
        return progress

    def _take(self, folder: CheckpointFolder, optimizer: optim.Optimizer) -> Progress:
        restored = folder.restore(Block(self._stage), self._model.shapes)
        if restored is None:
            reasons = (file.difference(folder.path / str(name), self._config) for name in file.names(folder.path))
            reason = next((f": they are of another run ({reason})" for reason in reasons if reason), "")
            raise Fatal(f"{folder.path} has no sound checkpoint of this model{reason}")
        if amended := file.difference_of(restored.config, self._config):
            raise Fatal(f"the owner of the run in {folder.path} has amended it, and it goes on as amended: {amended}")
        if restored.pending:
            logger.warning("amendments of later rounds do not count here: %s", "; ".join(restored.pending))
        say_changes(restored.config, self._config, round_number=restored.round, run_samples=restored.run_samples)
        anchor, remembered = state.parts(known(self._config, self._model.shapes, restored))
        parameters = self._model.local_parameters
        with torch.no_grad():
            for name, part in parameters.items():
                part.copy_(self._model.part_of(name, anchor[name]))
        parts = {key: self._model.part_of(key.split("/")[0], value) for key, value in remembered.items()}
        optim.load_state_tensors(optimizer, parameters, parts)
        logger.info("goes on at step %d, from %s", restored.round, ", ".join(map(str, restored.files)))
        return Progress(step=restored.round, run_samples=restored.run_samples, lineage=restored.lineage)

    def require_written(self) -> None:
        """Raise Fatal if this worker could not write the newest state; the log says why."""
        if not self._is_newest_kept:
            raise Fatal(f"the last state of this run is in no checkpoint: step {self._written} could not be written")

    def is_due(self, step: int) -> bool:
        return self._options.checkpoint is not None and self._options.keeping.is_due(step)

    def write(self, progress: Progress, optimizer: optim.Optimizer) -> Progress:
        """Write the state, unless that was done. All workers call this. Return the progress; at the worker that writes,
        with its new lineage."""
        if self._options.checkpoint is None or progress.step == self._written:
            return progress
        self._written = progress.step
        parameters = self._model.local_parameters
        parts = state.named(parameters, optim.state_tensors(optimizer, parameters))
        header = Header(
            config=self._config,
            stage=self._stage,
            round=progress.step,
            run_samples=progress.run_samples,
            lineage=file.UNKNOWN,
            highest_microbatch=self._config.indices_after(progress.run_samples, Block(self._stage)).start - 1,
            state_digest=file.UNKNOWN,
        )
        # One tensor is put together at a time. Whatever happens to the file, all workers go on to the last of them.
        draft = None if self._writer is None else self._writer.draft(header, self._whole_shapes(parts))
        digests = state.StateDigest(HostReader())
        try:
            for key, part in parts.items():
                whole = self._model.whole(key.split("/")[1], part)
                if draft is not None:
                    whole = whole.cpu()
                    digests.add(key, whole)
                    draft.add(key, whole)
        except BaseException:
            # Another worker is gone.
            if draft is not None:
                draft.discard()
            raise
        if self._writer is None or draft is None:
            return progress
        digest = digests.hexdigest
        lineage = next_lineage(
            progress.lineage, progress.step, digest, members=["static"], total_squared_norm=0.0, partners=[]
        )
        header = dataclasses.replace(header, lineage=lineage, state_digest=digest)
        self._is_newest_kept = asyncio.run(self._writer.write(header, draft))
        return dataclasses.replace(progress, lineage=lineage)

    def _whole_shapes(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
        return {key: self._model.shapes[key.split("/")[1]] if part.ndim else part.shape for key, part in parts.items()}
