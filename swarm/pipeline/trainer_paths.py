"""The paths that a trainer feeds: which of them stand still, and how many microbatches of each it keeps in flight.

With DiLoCo a path stands still while a block on it has no peers, or a peer has said so a moment ago. It gets no
microbatches then, so that it keeps no room from other paths, and nobody waits for its rounds. In the synchronous
setting everything waits for every path, and in a run of one path there is no other: there no path counts as standing
still.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.machine.words import numbered
from swarm.types import Block, PeerRecord, PeerState

logger = logging.getLogger(__name__)

LEFT_ALONE_SECONDS = 5.0
"""How long a path gets nothing after a peer has given a microbatch back because the path stands still."""
_LEAST_GROWTH = 1.0
"""The growth in the round trip after a Busy. It doubles with each round trip without a Busy, as another trainer may
have left."""
_DECREASE = 0.93
"""The factor by which a Busy shrinks the window. It is near 1: Busy from one of many peers says that this peer has
enough, not that all have."""


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


class Window:
    """How many microbatches a trainer keeps in flight: as many as the swarm takes, so that a trainer needs to know
    neither the swarm's size nor the links. Like a TCP window it doubles in a round trip until a peer is busy; then it
    shrinks, and growth begins anew."""

    def __init__(self, *, start: int, largest: int) -> None:
        self._size = float(min(start, largest))
        self._largest = largest
        self._growth = self._size
        """By how many microbatches the window grows in a round trip."""
        self._num_older = 0
        """How many of the microbatches under way were in flight already when the window last shrank."""

    @property
    def size(self) -> int:
        return max(1, int(self._size))

    def finished(self, *, num_busy: int, in_flight: int) -> None:
        """Adapt the window to a microbatch that came back; `num_busy` is how often peers answered Busy, and `in_flight`
        how many are under way, this one included."""
        is_older = self._num_older > 0
        self._num_older = max(0, self._num_older - 1)
        if num_busy:
            self._growth = _LEAST_GROWTH
            # Microbatches that were refused together shrink the window once, not once each.
            if not is_older:
                self._size = max(1.0, self._size * _DECREASE)
                self._num_older = in_flight - 1
        elif in_flight >= self.size:
            # Only a full window has shown that it is not too large.
            share = 1.0 / self._size
            self._size = min(float(self._largest), self._size + self._growth * share)
            self._growth = min(self._size, self._growth * 2**share)


class Windows(dict[int, Window]):
    """A window for each path, so that a path which is busy or stands still takes no room from the others."""

    def __init__(self, paths: Sequence[int], *, num_stages: int, max_in_flight: int) -> None:
        largest = max(1, max_in_flight // len(paths))
        super().__init__((path, Window(start=2 * num_stages, largest=largest)) for path in paths)

    def wish(self, paths: Iterable[int], held: Counter[int], *, ahead: float = 0.0) -> list[int]:
        """Those of the paths of which more microbatches are wanted than are held, each as often as more are, in turns:
        what fills the window, and a share `ahead` of it besides."""
        room = {path: self[path].size + math.ceil(ahead * self[path].size) - held[path] for path in paths}
        most = max(room.values(), default=0)
        return [path for number in range(most) for path in room if number < room[path]]
