"""The holdings of one process: buckets of gradients, and inner steps that are in no round yet.

What each contribution must hold is recomputed from them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from swarm.events import Accumulate, Close, Commit, RollBack, Step, ranges

Report = Callable[[str, Collection[int]], None]
"""Called with a description of the fault, and the microbatches concerned."""


@dataclass(eq=False)
class _Bucket:
    """A bucket: which microbatches' gradients are in it, and how often each."""

    counts: Counter[int] = field(default_factory=Counter)
    acked: set[int] = field(default_factory=set)
    replays: set[int] = field(default_factory=set)
    """The microbatches that were accumulated because this stage alone lacked them."""
    samples: int = 0

    @property
    def ids(self) -> set[int]:
        return {index for index, count in self.counts.items() if count > 0}


@dataclass(frozen=True, eq=False)
class _Step:
    """An inner step, numbered from 1 within a process, and the bucket that it used."""

    number: int
    counts: Counter[int]
    samples: int


@dataclass(frozen=True, eq=False)
class Closing:
    round: int
    fragment: int
    counts: Counter[int]
    replays: frozenset[int]
    round_samples: int
    last_step: int


class Holdings:
    """The holdings of a process since it began, or moved to its stage. At first there are none."""

    def __init__(self, *, is_synchronous: bool, num_fragments: int, report: Report) -> None:
        self._is_synchronous = is_synchronous
        self._report = report
        self._buckets: dict[int, _Bucket] = {}
        self._highest_bucket = -1
        self._steps: list[_Step] = []
        self._num_steps = 0
        self._bases = [0] * num_fragments
        """By fragment, the number of the last inner step that is in an average, or was lost."""
        self._round_samples = 0
        """Samples of the inner steps that count towards the round."""

    def accumulate(self, event: Accumulate) -> None:
        self._highest_bucket = max(self._highest_bucket, event.bucket)
        bucket = self._buckets.setdefault(event.bucket, _Bucket())
        bucket.counts[event.microbatch] += 1
        bucket.samples += event.samples
        if event.only_at is not None:
            bucket.replays.add(event.microbatch)

    def roll_back(self, event: RollBack) -> None:
        bucket = self._buckets.get(event.bucket)
        if bucket is None:
            # A bucket of a round that is over, or of a state that was given up, counts nowhere any more.
            if event.bucket > self._highest_bucket:
                self._report("rolled back from a bucket that holds nothing", [event.microbatch])
            return
        if bucket.counts[event.microbatch] < 1:
            self._report("rolled back, but was not accumulated", [event.microbatch])
        bucket.counts[event.microbatch] -= 1
        bucket.samples -= event.samples
        bucket.acked.discard(event.microbatch)
        bucket.replays.discard(event.microbatch)

    def acknowledge(self, microbatch: int) -> None:
        for bucket in self._buckets.values():
            if bucket.counts[microbatch] > 0:
                bucket.acked.add(microbatch)
                return
        self._report("acknowledged, but is in no bucket", [microbatch])

    def step(self, event: Step) -> None:
        bucket = self._buckets.pop(event.bucket, _Bucket())
        if tentative := bucket.ids - bucket.acked:
            self._report("stepped with before it was acknowledged", tentative)
        if bucket.samples != event.samples:
            self._report(
                f"an inner step used {event.samples} samples, and {bucket.samples} were accumulated less rolled back",
                (),
            )
        self._num_steps += 1
        self._round_samples += event.samples
        self._steps.append(_Step(self._num_steps, +bucket.counts, bucket.samples))

    def close(self, event: Close) -> Closing:
        """Recompute a contribution that was frozen now, and compare it with the event."""
        if self._is_synchronous:
            buckets = self._buckets.values()
            counts, samples = _sum(+bucket.counts for bucket in buckets), sum(bucket.samples for bucket in buckets)
            round_samples, replays = samples, frozenset[int]().union(*(bucket.replays for bucket in buckets))
            if tentative := set(counts).difference(*(bucket.acked for bucket in buckets)):
                self._report("contributed before it was acknowledged", tentative)
            if ranges(counts) != event.microbatches:
                self._report(f"the contribution is said to hold {event.microbatches}, not {ranges(counts)}", ())
        else:
            taken = [step for step in self._steps if step.number > self._bases[event.fragment]]
            counts, samples = _sum(step.counts for step in taken), sum(step.samples for step in taken)
            round_samples, replays = self._round_samples, frozenset()
        if (samples, round_samples) != (event.samples, event.round_samples):
            self._report(
                f"the contribution is said to be of {event.samples} samples, {event.round_samples} of them of the "
                f"round; accumulated less rolled back are {samples} and {round_samples}",
                (),
            )
        return Closing(event.round, event.fragment, counts, replays, round_samples, self._num_steps)

    def commit(self, event: Commit, closing: Closing | None, *, is_member: bool) -> None:
        """Note that a round was committed. What the round took, and what was lost at its end, counts towards no later
        round. `closing` is the one that is in the result, where the process prepared the result, and otherwise its last
        one."""
        if self._is_synchronous:
            self._buckets.clear()
            return
        if event.carried and not is_member:
            # The result has nothing of this process, so all its steps are carried over.
            self._check_carried(event.carried)
            return
        fragment = event.round % len(self._bases)
        # Steps after the last closing are carried over, or are lost together with those before it.
        last = closing.last_step if closing is not None else self._num_steps
        after = sum(step.samples for step in self._steps if step.number > last)
        if event.carried not in (0, after):
            self._report(f"{event.carried} samples were carried over, and {after} came after the closing", ())
        self._bases[fragment] = last if event.carried else self._num_steps
        self._round_samples = event.carried
        self._steps = [step for step in self._steps if step.number > min(self._bases)]

    def install(self, carried: int) -> None:
        """Note that the process installed a whole state, and that `carried` of its samples count towards the round."""
        self._buckets.clear()
        if carried:
            self._check_carried(carried)
        else:
            self._steps.clear()
            self._bases = [self._num_steps] * len(self._bases)
            self._round_samples = 0

    def untaken(self) -> list[set[int]]:
        """The microbatches that no round has taken yet, by fragment."""
        in_buckets = set[int]().union(*(bucket.ids for bucket in self._buckets.values()))
        return [in_buckets.union(*(step.counts for step in self._steps if step.number > base)) for base in self._bases]

    def _check_carried(self, num_samples: int) -> None:
        if num_samples != self._round_samples:
            self._report(f"{num_samples} samples were carried over, and {self._round_samples} learnt from", ())


def _sum(counts: Iterable[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for part in counts:
        total.update(part)
    return total
