"""A folder of checkpoints, from which a block's state is put together. The run may be cut as before, or differently.

The newest sound round is taken. Unsound files are named in the log, but of the files of another run only the first one.
Nothing is written.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.checkpoint import file
from swarm.checkpoint.file import FileName, Header, OfAnotherRun, Tensors
from swarm.config import RunConfig, Timeline
from swarm.errors import IntegrityError
from swarm.training.tally import EMPTY, Tally
from swarm.types import Block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Restored:
    """A block's state from the files of one round.

    Attributes:
        config: the configuration of the round, amendments included, in the run that wrote the files.
        amendments: those that the run had.
        pending: those of them that are for later rounds, in words.
        tally: the block's, if one file holds exactly this block.
        lineage: the file's own, if one file holds exactly this block. Otherwise it is made from the lineages of all
            files used.
        files: the files that were used.
    """

    config: RunConfig
    round: int
    run_samples: int
    lineage: str
    highest_microbatch: int
    tensors: Tensors
    files: tuple[Path, ...]
    amendments: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    tally: Tally = EMPTY


class CheckpointFolder:
    """The checkpoints of one folder that a run can use. Each file is read once."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self._config = config
        self._names = file.names(path)
        self._headers: dict[FileName, Header | None] = {}
        self.foreign = ""
        """What is told of the first file of another run; empty as long as none was found."""

    @property
    def is_empty(self) -> bool:
        return not self._names

    def restore(
        self, block: Block, shapes: Mapping[str, torch.Size], *, round_number: int | None = None,
        variants: Sequence[int] = (),
    ) -> Restored | None:  # fmt: skip
        """A block's state at the newest round that is whole. None if no round has all of it. Blocks.

        A block is put together from files of its own variant. A round is whole if each block of its cut that has files
        in the folder has a sound file of that round. So all blocks that resume from one folder resume at one round,
        though a single block may have a newer file. If no round is whole, the newest one that has all of this block is
        taken.

        Args:
            shapes: of the block's parameters, by name.
            round_number: if given, only this round is considered.
            variants: if given, the block is the model of a path that leads through these variants of the stages.
        """
        own = self._config.stages.num_stages
        cuts = {cut for cut in self._cuts if round_number in (None, cut[0])}
        newest_first = sorted(cuts, key=lambda cut: (cut[0], cut[1] == own, cut[1]), reverse=True)
        for cut in newest_first:
            if self._is_complete(cut):
                headers = self._sound(cut)
                is_whole = len(headers) == len(self._files(cut))
                if is_whole and (restored := self._gather(headers, block, shapes, variants)):
                    return restored
        for cut in newest_first:
            if restored := self._gather(self._sound(cut), block, shapes, variants):
                logger.warning("round %d in %s is not whole, but has all of stage %s", cut[0], self.path, block)
                return restored
        return None

    def _files(self, cut: tuple[int, int]) -> list[FileName]:
        return [name for name in self._names if (name.round, name.num_stages) == cut]

    def _is_complete(self, cut: tuple[int, int]) -> bool:
        kept = {name.block for name in self._names if name.num_stages == cut[1]}
        is_first = len({number for number, num_stages in self._cuts if num_stages == cut[1]}) == 1
        if is_first and any(len(self._files(other)) == other[1] for other in self._cuts if other[1] != cut[1]):
            # This is the first round of a cut, and another cut has a round with files of all its stages: the run was
            # resumed from those files. It is not known yet which of the new stages write to this folder. So the round
            # counts as complete once all of them have written.
            kept = set(map(Block, range(cut[1])))
        return {name.block for name in self._files(cut)} == kept

    @property
    def _cuts(self) -> set[tuple[int, int]]:
        return {(name.round, name.num_stages) for name in self._names}

    def _sound(self, cut: tuple[int, int]) -> list[Header]:
        for name in self._files(cut):
            if name not in self._headers:
                try:
                    self._headers[name] = file.read_header(self.path / str(name), self._config)
                except IntegrityError as error:
                    self._refuse(name, error)
        return [header for name in self._files(cut) if (header := self._headers[name]) is not None]

    def _refuse(self, name: FileName, error: IntegrityError) -> None:
        is_foreign = isinstance(error, OfAnotherRun)
        if not (is_foreign and self.foreign):
            logger.warning("refused: %s%s", error, "; others like it are not named" if is_foreign else "")
        if is_foreign:
            self.foreign = self.foreign or str(error)
        self._headers[name] = None

    def _gather(
        self, headers: Sequence[Header], block: Block, shapes: Mapping[str, torch.Size], variants: Sequence[int]
    ) -> Restored | None:
        """A block's state from files of one round. None if a parameter is missing, or of another shape."""
        try:
            wanted = dict(enumerate(variants))
            own = [each for each in headers if each.variant == wanted.get(each.stage, block.variant)]
            return self._put_together(own, block, shapes)
        except IntegrityError as error:
            # Another peer of the folder may have just deleted a file.
            logger.warning("refused: %s", error)
            return None

    def _put_together(
        self, headers: Sequence[Header], block: Block, shapes: Mapping[str, torch.Size]
    ) -> Restored | None:
        paths = {header.stage: self.path / str(header.name) for header in headers}
        held = {number: file.parameters(path) for number, path in paths.items()}
        missing, used = set(shapes), list[Header]()
        tensors: dict[str, torch.Tensor] = {}
        # The file with most of this stage comes first. A tied embedding is in two files, and all peers of a stage
        # should choose the same one.
        for header in sorted(headers, key=lambda header: (-len(held[header.stage] & set(shapes)), header.stage)):
            if taken := held[header.stage] & missing:
                used.append(header)
                missing -= taken
                tensors |= file.load(paths[header.stage], taken)
        if not headers or missing or any(tensors[f"anchor/{name}"].shape != shape for name, shape in shapes.items()):
            return None
        used = sorted(used or headers, key=lambda header: header.stage)
        is_same = len(used) == 1 and held[used[0].stage] == set(shapes)
        amendments = max((header.amendments for header in used), key=len)
        timeline = Timeline(used[0].config, amendments)
        origin = "\n".join([f"{self._config.run_id} stage {block}", *(header.lineage for header in used)])
        return Restored(
            config=timeline.at(used[0].round),
            amendments=amendments,
            pending=tuple(str(each) for each in timeline.amendments if each.round > used[0].round),
            tally=Tally.read(used[0].tally) if is_same and used[0].tally else EMPTY,
            round=used[0].round,
            run_samples=max(header.run_samples for header in used),
            lineage=used[0].lineage if is_same else hashlib.sha256(origin.encode()).hexdigest(),
            highest_microbatch=max(header.highest_microbatch for header in headers),
            tensors=tensors,
            files=tuple(paths[header.stage] for header in used),
        )
