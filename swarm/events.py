"""What a process can record, of a microbatch, of a round and of itself, and the log with a line for each event.

A process may serve several blocks, and writes the events of all of them to one log: each line names its block.
"""

import itertools
import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swarm.machine.clock import Clock
from swarm.machine.json_file import LineFile
from swarm.types import Block

FORMAT = 4
"""The format of the lines. An audit refuses others."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a process did. The classes below are its kinds."""


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A process begins. It may go on in the file of an earlier process. This is always a process's first line."""

    run: str  # The run's id: a digest of its configuration.
    peer: str  # Peer id of a stage peer or of a trainer.
    name: str
    stage: int
    """The stage that it serves first; -1 for a trainer."""
    setting: str  # synchronous or diloco.
    num_stages: int
    num_fragments: int
    """The number of parts of a stage that are averaged in turn, one in each round."""
    round_microbatches: int
    """Microbatches of a synchronous round, over all paths."""
    most_samples: int
    """The most samples of one member of a block on all paths that count towards a round, however many more it has."""
    software: str
    """Version of swarm."""
    pid: int
    boot: str
    """An id of the machine's boot: monotonic times of one boot can be compared."""
    format: int = FORMAT
    paths: tuple[tuple[int, ...], ...] = ()
    """The variants of the stages that each path leads through; empty if each stage has one."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        paths = self.paths or ((0,) * self.num_stages,)
        return tuple(sorted({Block(stage, variant) for path in paths for stage, variant in enumerate(path)}))

    def passes(self, microbatch: int, block: Block) -> bool:
        return not self.paths or self.paths[microbatch % len(self.paths)][block.stage] == block.variant

    def most_samples_of(self, block: Block) -> int:
        """`most_samples` of a member of this block."""
        num_through = sum(self.passes(path, block) for path in range(len(self.paths)))
        return self.most_samples * num_through // len(self.paths) if self.paths else self.most_samples


@dataclass(frozen=True, kw_only=True)
class Gap(Event):
    """Some events before this one were not written, because the disk was full. `lost` is their number."""

    lost: int


@dataclass(frozen=True, kw_only=True)
class Hop(Event):
    """A microbatch is offered to a peer of the next stage."""

    microbatch: int
    round: int
    stage: int
    peer: str
    attempt: int
    """The number of the hop's attempt. It is 1 until a peer that this hop asked has failed."""


@dataclass(frozen=True, kw_only=True)
class Accumulate(Event):
    """A microbatch's gradient was added to a bucket."""

    microbatch: int
    samples: int
    bucket: int
    only_at: int | None = None
    """If the microbatch is a replay, the stage that lacked it."""


@dataclass(frozen=True, kw_only=True)
class RollBack(Event):
    """A microbatch's gradient was subtracted from its bucket again."""

    microbatch: int
    samples: int
    bucket: int


@dataclass(frozen=True, kw_only=True)
class Ack(Event):
    """A stage peer counts a microbatch, because its answer was acknowledged. In a trainer's log: the trainer is about
    to acknowledge it."""

    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Repeat(Event):
    """A microbatch arrived that this peer knows already."""

    microbatch: int
    state: str
    """running, tentative (the new call adopts it) or committed."""


@dataclass(frozen=True, kw_only=True)
class Grant(Event):
    """A stage's leader granted a trainer microbatches that the stage had lost, to run them again."""

    microbatches: tuple[int, ...]
    trainer: str


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """An inner step was taken with a bucket, which is empty afterwards."""

    bucket: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Close(Event):
    """The contribution to a round was frozen as it is now. A later Close takes the place of this one."""

    round: int
    samples: int
    round_samples: int
    """How many of the samples count towards the round."""
    fragment: int
    microbatches: str = ""
    """Synchronous: the microbatches that the ledger counts, as `ranges` writes them."""


@dataclass(frozen=True, kw_only=True)
class Begin(Event):
    """An attempt was promised, with the contribution that was closed last."""

    round: int
    lineage: str
    attempt: int
    leader: str
    most_samples: int = 0
    """How many of its samples can count, where an amendment is in force; 0: as many as `Start` says."""


@dataclass(frozen=True, kw_only=True)
class Prepare(Event):
    """This peer's exchange in an attempt gave a result. The promised contribution is part of it."""

    round: int
    lineage: str
    attempt: int
    leader: str
    digest: str
    """The digest over the members and the averaged bytes."""
    samples: int
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Abort(Event):
    """An attempt was given up here."""

    round: int
    attempt: int
    leader: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Checked(Event):
    """This peer computed again what another peer of its block had answered: a spot check."""

    round: int
    microbatch: int
    peer: str
    verdict: str  # `agrees`, `differs` or `not_shown`.
    reason: str


@dataclass(frozen=True, kw_only=True)
class OutOfLine(Event):
    """A member is left out of the attempt, because most owners of parts found its contribution out of line."""

    round: int
    peer: str
    reason: str
    is_named: bool
    """Whether it is so repeatedly that it is named as a liar."""
    evidence: tuple[str, ...] = ()
    """Once it is named, what owners of parts have said of it in the last rounds: the round, the owner, the place of its
    part in the vector, and what it found there."""


@dataclass(frozen=True, kw_only=True)
class Commit(Event):
    """A result was applied, and the next round began."""

    round: int
    """The round that ended."""
    parent: str
    """The lineage before the commit."""
    lineage: str
    """The lineage after it."""
    digest: str
    """The digest of the result."""
    attempt: int
    samples: int
    members: tuple[str, ...]
    total_squared_norm: float = 0.0
    """The norm by which the gradient was clipped, squared."""
    partners: tuple[str, ...] = ()
    """Digests of the results that were added up into the average of tied parameters."""
    amended: str = ""
    """The digest of the newest amendment under which the step was taken; empty if there is none."""
    given: tuple[tuple[int, int, int], ...] = ()
    """What each member has given, in the order of `members`: samples that count, the targets in them, and bytes sent.
    Empty if that is not known, as at earlier releases."""
    tally: str = ""
    """The digest of the block's tally after the round; empty if counting begins anew."""
    tally_since: int = 0
    """The first round that is in that tally."""
    next_microbatch: int | None = None
    """Synchronous, once an amendment has changed the size of rounds: the first microbatch of the next round."""
    carried: int = 0
    """Samples that count towards the next round: since the closing, or the round's beginning if it took no part."""


@dataclass(frozen=True, kw_only=True)
class State(Event):
    """The state that a commit led to. Steps of the new round may be logged first, since the digest takes a while."""

    round: int
    """The round that began with this state."""
    lineage: str
    digest: str
    """The digest of anchor and outer state."""


@dataclass(frozen=True, kw_only=True)
class Install(Event):
    """A peer installed a whole state. What it had accumulated but not used in a step is gone."""

    round: int
    """The round that begins with this state."""
    lineage: str
    state: str
    source: str
    """initial, checkpoint or download."""
    parent: str | None = None
    """If this lineage is a checkpoint's under a new name, as it entered at a later round: the checkpoint's lineage."""
    first_microbatch: int | None = None
    """Synchronous, once an amendment has changed the size of rounds: the first microbatch of the round."""
    carried: int = 0
    """Samples that count towards the round: what was learnt from them was kept, and is in no average yet."""


@dataclass(frozen=True, kw_only=True)
class Join(Event):
    """The process serves the block from now on."""


@dataclass(frozen=True, kw_only=True)
class Leave(Event):
    """The process serves the block no longer, of its own accord: it ends, or goes on with other blocks. If it comes
    back, the events there begin with an Install. In a trainer's log: the trainer ends."""


NAMES: dict[str, type[Event]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in Event.__subclasses__()
}
"""The kinds of events, by their names in the lines."""


class Events:
    """Accepts events from any thread. This class discards them; EventLog writes them to a file."""

    def write(self, event: Event, block: Block | None = None) -> None:
        """Record an event. The events of a stage peer are about a block that it serves, except Start. Never raises."""

    def of(self, block: Block) -> "Events":
        """The same log, for the parts of one block: what they write is about this block."""
        return _OfBlock(self, block)


class _OfBlock(Events):
    def __init__(self, events: Events, block: Block) -> None:
        self._events = events
        self._block = block

    def write(self, event: Event, block: Block | None = None) -> None:
        self._events.write(event, block or self._block)


def ranges(microbatches: Iterable[int]) -> str:
    """Return a set of ids in short form, such as "0-7 9 12-15"."""
    words = []
    # Consecutive ids all differ by the same number from their places in the sorted list.
    for _, run in itertools.groupby(enumerate(sorted(microbatches)), key=lambda place: place[1] - place[0]):
        ids = [index for _, index in run]
        words.append(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}")
    return " ".join(words)


_NAME_OF = {event: name for name, event in NAMES.items()}
_encode = json.JSONEncoder(separators=(",", ":")).encode


class EventLog(Events):
    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises OSError if the file can neither be opened nor made."""
        self._file = LineFile(path, "events")
        self._clock = clock
        self._lock = threading.Lock()
        self._num_lost = 0

    def write(self, event: Event, block: Block | None = None) -> None:
        with self._lock:
            if self._num_lost and not self._append(Gap(lost=self._num_lost)):
                self._num_lost += 1
                return
            self._num_lost = 0 if self._append(event, block) else 1

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Event, block: Block | None = None) -> bool:
        values = {"block": None if block is None else str(block), **vars(event)}
        fields = _encode({name: value for name, value in values.items() if value is not None})
        times = f'"time":{self._clock.time():.6f},"monotonic":{self._clock.monotonic():.6f}'
        comma = "," if len(fields) > 2 else ""
        return self._file.append(f'{{"event":"{_NAME_OF[type(event)]}",{times}{comma}{fields[1:]}')
