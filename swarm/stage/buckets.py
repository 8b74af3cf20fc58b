"""Versions of the weights, and the buckets in which the gradients that were computed with them wait for a step.

Owned by the compute thread: stage/backend computes with versions, fills buckets and takes gradients out again;
stage/weights steps with what is in them and publishes the next version. With DiLoCo a bucket holds exactly one inner
batch. Those that are full wait side by side until everything in them has been acknowledged, so that no batch grows
because another one is late. Nothing here writes to weights.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from swarm.machine.memory import Recycler
from swarm.training.samples import NOTHING, Amount

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class Version:
    """An immutable copy of the weights.

    Attributes:
        number: counts the versions of this peer, from 0.
        users: unfinished microbatches that may still need it.
        casts: with autocast, what products of matrices take instead of some parameters: made once, for all of them.
    """

    parameters: Tensors
    number: int = 0
    users: int = 0
    casts: Tensors = field(default_factory=dict)

    def taken(self) -> None:
        """One more microbatch may need this version."""
        self.users += 1

    def left(self) -> None:
        """One microbatch needs this version no longer."""
        self.users -= 1


class Versions:
    """The newest version, and those before it that are in use.

    Args:
        masters: what versions are copies of.
        memory: where the copies take their memory from.
    """

    def __init__(self, masters: Mapping[str, torch.Tensor], memory: Recycler) -> None:
        self._masters = masters
        self._memory = memory
        self._num_made = 0
        self._old: WeakSet[Version] = WeakSet()
        """Earlier versions, each as long as something uses it."""
        self.newest = self._make({})

    @property
    def num_old(self) -> int:
        """Versions before the newest that are in use."""
        return sum(version.users > 0 for version in self._old)

    def publish(self, copies: Mapping[str, torch.Tensor] | None = None) -> None:
        """Make a version of the masters as they are; the one before stays for the microbatches that use it.

        Args:
            copies: of some masters, to which nobody writes: those on the same device are taken.
        """
        self._old.add(self.newest)
        self.newest = self._make(copies or {})

    def restart(self) -> None:
        """Make a version of the masters as they are; those before count no more."""
        self._old.clear()
        self.newest = self._make({})

    def _make(self, copies: Mapping[str, torch.Tensor]) -> Version:
        taken = {name: copy for name, copy in copies.items() if copy.device == self._masters[name].device}
        made = self._memory.copies({name: master for name, master in self._masters.items() if name not in taken})
        self._num_made += 1
        parameters = {name: (taken | made)[name].requires_grad_() for name in self._masters}
        return Version(parameters=parameters, number=self._num_made - 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """What a microbatch's gradient was computed from: all that is needed to compute it again.

    Attributes:
        wire_inputs: what the stage received, CPU.
        wire_gradient: of its output, likewise; None at the last stage.
        version: the weights that were used.
    """

    microbatch: int
    amount: Amount
    wire_inputs: Mapping[str, torch.Tensor]
    wire_gradient: torch.Tensor | None
    version: Version


@dataclass(eq=False)
class GradientBucket:
    """A sum of gradients of single targets' losses, waiting for a step.

    Attributes:
        number: counted from 0 at each peer.
        sums: for each parameter the sum over the targets.
        amount: what is in the sum.
        num_tentative: microbatches in the sum that nobody has acknowledged yet; no step while there are any.
        sources: where what is in the sum came from, in the order of its coming; kept in the synchronous setting alone.
        versions: how many microbatches in the sum were computed with each version, by its number.
    """

    sums: Tensors
    number: int = 0
    amount: Amount = NOTHING
    num_tentative: int = 0
    sources: dict[Source, None] = field(default_factory=dict)
    versions: Counter[int] = field(default_factory=Counter)

    @property
    def num_samples(self) -> int:
        """Samples in the sum."""
        return self.amount.samples

    def add(self, gradients: Iterable[torch.Tensor], amount: Amount, *, is_counted: bool = False) -> None:
        """Add the sum of the gradients of so many targets, in the order of `sums`.

        Args:
            is_counted: `amount` of this bucket has them already.
        """
        torch._foreach_add_(list(self.sums.values()), list(gradients))
        if not is_counted:
            self.amount += amount

    def take_out(self, gradients: Iterable[torch.Tensor], amount: Amount) -> None:
        """The inverse of `add`."""
        torch._foreach_sub_(list(self.sums.values()), list(gradients))
        self.amount -= amount

    def accumulate(self, gradients: Iterable[torch.Tensor], source: Source) -> None:
        """Add a microbatch's gradient, which is tentative until `settled`."""
        self.add(gradients, source.amount)
        self.num_tentative += 1
        self.versions[source.version.number] += 1
        source.version.taken()

    def settled(self, source: Source) -> None:
        """A gradient is tentative no longer: it stays, or it was taken out."""
        self.num_tentative -= 1
        source.version.left()

    def withdrawn(self, source: Source) -> None:
        """A gradient was taken out of the sum."""
        self.versions[source.version.number] -= 1
        self.sources.pop(source, None)

    def clear(self, amount: Amount = NOTHING) -> None:
        """Take all gradients out; so much is about to be added again, and counted as if it were there."""
        torch._foreach_zero_(list(self.sums.values()))
        self.amount = amount

    @property
    def scale(self) -> float:
        """What the sums are to be multiplied by to be means."""
        return 1.0 / max(1, self.amount.targets)

    def mean(self) -> Tensors:
        """The mean over the targets; zeros where there are none."""
        return {name: value * self.scale for name, value in self.sums.items()}


class Buckets:
    """The buckets of a stage that no step has emptied yet, oldest first.

    Args:
        new: gives sums to fill, of any values.
        batch_samples: samples of one batch, at which a bucket is full; None: a bucket is never full (synchronous).
    """

    def __init__(self, new: Callable[[], Tensors], batch_samples: int | None) -> None:
        self._new = new
        self._batch_samples = batch_samples
        self._num_made = 0
        self._buckets: list[GradientBucket] = []

    def open(self) -> GradientBucket:
        """The one that a gradient goes into: the first that is not full, or a new one.

        That may be an older one, of which a gradient was taken out again.
        """
        for bucket in self._buckets:
            if not self._is_full(bucket):
                return bucket
        self._buckets.append(self._make())
        return self._buckets[-1]

    @property
    def ready(self) -> list[GradientBucket]:
        """The buckets that are full and hold nothing tentative, oldest first."""
        return [bucket for bucket in self._buckets if self._is_full(bucket) and not bucket.num_tentative]

    def remove(self, bucket: GradientBucket) -> None:
        """A step is about to be taken with this one."""
        self._buckets.remove(bucket)

    def clear(self) -> None:
        """Forget all gradients."""
        self._buckets = []

    @property
    def num_samples(self) -> int:
        """Samples that no step has used yet. May be asked from another thread."""
        return sum(bucket.num_samples for bucket in tuple(self._buckets))

    @property
    def num_samples_ahead(self) -> int:
        """The samples in full buckets and in the one that the next gradient goes into. May be asked from another
        thread.

        What waits for a step waits for these. Later buckets that are not full are left out: no step can empty them
        before more gradients have come, the first of which go into an older bucket.
        """
        buckets = tuple(self._buckets)
        following = next((bucket for bucket in buckets if not self._is_full(bucket)), None)
        return sum(bucket.num_samples for bucket in buckets if bucket is following or self._is_full(bucket))

    def _is_full(self, bucket: GradientBucket) -> bool:
        return self._batch_samples is not None and bucket.num_samples >= self._batch_samples

    def _make(self) -> GradientBucket:
        bucket = GradientBucket(sums=self._new(), number=self._num_made)
        self._num_made += 1
        bucket.clear()
        return bucket
