"""What a process can put on record: the events of a microbatch, of a round, and of the process itself.

Whatever does these things writes them to an `Events` that it was given. swarm/events/log makes lines of them, which
swarm/audit reads. They are plain records, which do not change.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

FORMAT = 2
"""Of the lines; an audit refuses others."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that a process did. Its kinds follow."""


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A process begins, or goes on in the file of one that ended. Always a process's first line."""

    run: str
    """The run's id: a digest of its configuration."""
    peer: str
    """Peer id of a stage peer or of a trainer."""
    name: str
    stage: int
    """-1 for a trainer."""
    setting: str
    """synchronous or diloco."""
    num_stages: int
    num_fragments: int
    """Parts of a stage that are averaged in turn, a round each."""
    round_microbatches: int
    """Microbatches of a synchronous round."""
    software: str
    """Version of swarm."""
    pid: int
    boot: str
    """Of the machine: monotonic times of one boot can be compared."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Gap(Event):
    """The disk was full: so many events before this one were not written."""

    lost: int


@dataclass(frozen=True, kw_only=True)
class Hop(Event):
    """A microbatch is offered to a peer of the next stage."""

    microbatch: int
    round: int
    stage: int
    peer: str
    attempt: int
    """1 until a peer that this hop asked has failed."""


@dataclass(frozen=True, kw_only=True)
class Accumulate(Event):
    """A microbatch's gradient was added to a bucket."""

    microbatch: int
    samples: int
    bucket: int
    only_at: int | None = None
    """For a replay, the stage that lacks it."""


@dataclass(frozen=True, kw_only=True)
class RollBack(Event):
    """It was subtracted from that bucket again."""

    microbatch: int
    samples: int
    bucket: int


@dataclass(frozen=True, kw_only=True)
class Ack(Event):
    """A stage peer: an answer was acknowledged, and its microbatch counts. A trainer: it is about to acknowledge."""

    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Repeat(Event):
    """A microbatch came that is known already."""

    microbatch: int
    state: str
    """running, tentative (the new call adopts it) or committed."""


@dataclass(frozen=True, kw_only=True)
class Grant(Event):
    """A stage's leader let a trainer run again what the stage has lost."""

    microbatches: tuple[int, ...]
    trainer: str


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """An inner step was taken with a bucket, which is empty since."""

    bucket: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Close(Event):
    """The contribution to a round was frozen as it is now; later ones take its place."""

    round: int
    samples: int
    round_samples: int
    """Of these, the ones that count towards the round."""
    fragment: int
    microbatches: str = ""
    """Synchronous: what the ledger counts, as `ranges` writes it."""


@dataclass(frozen=True, kw_only=True)
class Begin(Event):
    """An attempt was promised, with the contribution closed last."""

    round: int
    lineage: str
    attempt: int
    leader: str


@dataclass(frozen=True, kw_only=True)
class Prepare(Event):
    """An attempt's exchange came to a result here, which holds that contribution."""

    round: int
    lineage: str
    attempt: int
    leader: str
    digest: str
    """Over the members and the averaged bytes."""
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
class Commit(Event):
    """A result was applied: the next round began."""

    round: int
    """The one that ended."""
    parent: str
    """Lineage before."""
    lineage: str
    """And after."""
    digest: str
    """Of the result."""
    attempt: int
    samples: int
    members: tuple[str, ...]
    total_squared_norm: float = 0.0
    """What the gradient was clipped by."""
    partners: tuple[str, ...] = ()
    """Digests of the results that a shared block's average was made of."""
    carried: int = 0
    """Samples that count towards the next round: learnt since the closing or, by one that took no part, since the round
    began."""


@dataclass(frozen=True, kw_only=True)
class State(Event):
    """What a commit led to. The digest is taken beside training, so steps of the new round may come before it."""

    round: int
    """The one that began with it."""
    lineage: str
    digest: str
    """Of anchor and outer state."""


@dataclass(frozen=True, kw_only=True)
class Install(Event):
    """A state became this peer's as a whole; what it had accumulated, and not stepped with, is gone."""

    round: int
    """The one that begins with it."""
    lineage: str
    state: str
    source: str
    """initial, checkpoint or download."""
    parent: str | None = None
    """The lineage that this one goes on from under another name: a checkpoint's that entered at a later round."""
    carried: int = 0
    """Samples that count towards the round: what was learnt from them, and no average has, was kept."""


@dataclass(frozen=True, kw_only=True)
class Join(Event):
    """It serves from now on."""


@dataclass(frozen=True, kw_only=True)
class Leave(Event):
    """It ends of its own accord."""


@dataclass(frozen=True, kw_only=True)
class Move(Event):
    """It gives its stage up and goes to another: what follows is about that one, from an Install on."""

    stage: int


NAMES: dict[str, type[Event]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in Event.__subclasses__()
}
"""The kinds, as the lines name them."""


class Events(Protocol):
    """Where events go. May be written to from any thread."""

    def write(self, event: Event) -> None:
        """Put an event on record. Never raises."""
        ...


class NoEvents:
    """Keeps no record."""

    def write(self, event: Event) -> None:
        pass


def ranges(microbatches: Iterable[int]) -> str:
    """A set of ids in short: 0-7 9 12-15."""
    words = []
    # Ids that follow each other are all as far ahead of their places.
    for _, run in itertools.groupby(enumerate(sorted(microbatches)), key=lambda place: place[1] - place[0]):
        ids = [index for _, index in run]
        words.append(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}")
    return " ".join(words)
