"""The paths that a trainer feeds, and which of them stand still.

With DiLoCo a path stands still while a block on it has no peers, or a peer has said so a moment ago. It gets no
microbatches then, so that it keeps no room from other paths, and nobody waits for its rounds. In the synchronous
setting everything waits for every path, and in a run of one path there is no other: there no path counts as standing
still.
"""

import logging
from collections.abc import Callable, Collection, Sequence

from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.machine.words import numbered
from swarm.types import Block, PeerRecord, PeerState

logger = logging.getLogger(__name__)

LEFT_ALONE_SECONDS = 5.0
"""How long a path gets nothing after a peer has given a microbatch back because the path stands still."""


class TrainerPaths:
    """Attributes:
    paths: the paths that the trainer feeds, in ascending order.
    blocks: the blocks on these paths.
    entries: those of stage 0.
    """

    def __init__(
        self, config: RunConfig, clock: Clock, peers: Callable[[Block], Sequence[PeerRecord]],
        chosen: Collection[int] = (),
    ) -> None:  # fmt: skip
        """`peers` finds the known records of a block. Without `chosen` paths the trainer feeds all. Raises ValueError
        if the run does not have one of them."""
        num_paths = len(config.paths)
        if wrong := sorted(path for path in chosen if not 0 <= path < num_paths):
            whole = f"the paths 0 to {num_paths - 1}" if num_paths > 1 else "one path, which is 0"
            raise ValueError(f"there is no path {wrong[0]}: this run has {whole}")
        self.paths = tuple(sorted({*chosen} or range(num_paths)))
        self.blocks = tuple(sorted({block for path in self.paths for block in config.blocks_of(path)}))
        self.entries = tuple(block for block in self.blocks if block.stage == 0)
        self._config = config
        self._clock = clock
        self._peers = peers
        self._may_stand_still = num_paths > 1 and not config.rounds.synchronous
        self._left_alone: dict[int, tuple[float, str]] = {}
        """By path: until when, and why."""
        self._said = set[int]()
        """The paths of which the log says that they stand still."""

    def through(self, block: Block) -> tuple[int, ...]:
        """The paths that lead through a block."""
        return tuple(path for path in self._config.paths_through(block) if path in self.paths)

    def entry_of(self, microbatch: int) -> Block:
        return self._config.blocks_of(self._config.path_of(microbatch))[0]

    def empty_block(self, path: int) -> Block | None:
        """A block on the path at which no known peer serves; None if there is none."""

        def is_empty(block: Block) -> bool:
            return not any(record.state is PeerState.SERVING for record in self._peers(block))

        return next(filter(is_empty, self._config.blocks_of(path)), None)

    def leave_alone(self, microbatch: int, reason: str) -> None:
        """Note that a peer has given a microbatch back because its path stands still."""
        until = self._clock.monotonic() + LEFT_ALONE_SECONDS
        self._left_alone[self._config.path_of(microbatch)] = until, reason

    def is_live(self, path: int) -> bool:
        return self._why_still(path) is None

    @property
    def missing(self) -> Block | None:
        """If all paths stand still, a block without peers."""
        if any(map(self.is_live, self.paths)):
            return None
        return next((block for path in self.paths if (block := self.empty_block(path)) is not None), None)

    def followed(self) -> tuple[Block, ...]:
        """The blocks whose rounds the trainer follows: those on paths that do not stand still; while all do, those on
        all of its paths. In the synchronous setting all of the run."""
        if self._config.rounds.synchronous:
            return self._config.blocks
        live = [path for path in self.paths if self.is_live(path)]
        return tuple(sorted({block for path in live or self.paths for block in self._config.blocks_of(path)}))

    def _why_still(self, path: int) -> str | None:
        if not self._may_stand_still:
            return None
        until, reason = self._left_alone.get(path, (0.0, ""))
        if self._clock.monotonic() < until:
            return reason
        block = self.empty_block(path)
        return None if block is None else f"stage {block} has no peers"

    def say_changes(self) -> None:
        """Log which paths have begun to stand still, and which go on."""
        still: dict[str, list[int]] = {}
        for path in self.paths:
            if (reason := self._why_still(path)) is not None and path not in self._said:
                still.setdefault(reason, []).append(path)
        for reason, paths in still.items():
            verb = "stands" if len(paths) == 1 else "stand"
            logger.warning("%s %s still: %s", numbered("path", paths), verb, reason)
        going = [path for path in sorted(self._said) if self.is_live(path)]
        if going:
            logger.info("%s %s on", numbered("path", going), "goes" if len(going) == 1 else "go")
        self._said.difference_update(going)
        self._said.update(*still.values())
