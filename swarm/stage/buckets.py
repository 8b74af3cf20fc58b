"""Versions of the weights, and buckets: sums of gradients that wait for a step. Owned by the compute thread.

With DiLoCo a bucket holds exactly one inner batch. Full buckets wait side by side until everything in them is
acknowledged, so that no batch grows because another one is late. Nothing here writes to weights.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from swarm.machine.memory import Recycler
from swarm.stage.boundary import Boundary
from swarm.stage.staging import Download
from swarm.training.samples import NOTHING, Amount

Tensors = dict[str, torch.Tensor]


@dataclass(eq=False)
class Version:
    """An immutable copy of the weights.

    Attributes:
        number: counts the versions of this peer, from 0.
        users: unfinished microbatches that may still need it.
        casts: with autocast, copies of some parameters that all matrix products use in their place; made once.
        anchor_round: with DiLoCo the round that all peers of the block began with these weights; None for others.
    """

    parameters: Tensors
    number: int = 0
    users: int = 0
    anchor_round: int | None = None
    casts: Tensors = field(default_factory=dict)

    def taken(self) -> None:
        self.users += 1

    def left(self) -> None:
        self.users -= 1


class Versions:
    """The newest version, and those before it that are in use. They are copies of `masters`.

    Args:
        rounds: whether matrices are copied in bfloat16.
    """

    def __init__(self, masters: Mapping[str, torch.Tensor], memory: Recycler, *, rounds: bool = False) -> None:
        self.rounds = rounds
        self._types = {
            name: torch.bfloat16 if rounds and master.ndim > 1 else master.dtype for name, master in masters.items()
        }
        self._masters = masters
        self._memory = memory
        self._num_made = 0
        self._old: WeakSet[Version] = WeakSet()
        """Earlier versions, each kept for as long as something uses it."""
        self.newest = self._make({})

    @property
    def num_old(self) -> int:
        return sum(version.users > 0 for version in self._old)

    def publish(self, copies: Mapping[str, torch.Tensor] | None = None) -> None:
        """Make a version of the present masters. The former version stays for the microbatches that use it.

        Nothing may write to `copies` of some masters: those on the masters' device are used as they are, unless their
        type is another one.
        """
        self._old.add(self.newest)
        self.newest = self._make(copies or {})

    def restart(self) -> None:
        """Make a version of the present masters. Earlier versions no longer count as old ones in use."""
        self._old.clear()
        self.newest = self._make({})

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Version:
        """A version of other weights than the masters. It may share their memory."""
        moved = {name: tensors[name].to(master.device, self._types[name]) for name, master in self._masters.items()}
        return Version(parameters={name: value.detach().requires_grad_() for name, value in moved.items()})

    def _make(self, copies: Mapping[str, torch.Tensor]) -> Version:
        taken = {
            name: copy
            for name, copy in copies.items()
            if copy.device == self._masters[name].device and copy.dtype is self._types[name]
        }
        masters = {name: master for name, master in self._masters.items() if name not in taken}
        made = self._memory.copies(masters, self._types)
        self._num_made += 1
        parameters = {name: (taken | made)[name].requires_grad_() for name in self._masters}
        return Version(parameters=parameters, number=self._num_made - 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """What a microbatch is computed from.

    Attributes:
        wire_inputs: what the stage received, CPU.
        boundary: the encoding of hidden states and gradients in the microbatch's round.
        version: the weights.
    """

    microbatch: int
    wire_inputs: Mapping[str, torch.Tensor]
    boundary: Boundary
    version: Version


@dataclass(frozen=True, eq=False, kw_only=True)
class Source(Inputs):
    """All that is needed to compute a microbatch's gradient again.

    Attributes:
        wire_gradient: the gradient of the stage's output, as received; None at the last stage.
        scale: the power of two by which gradients were multiplied while they were computed.
        is_recorded: whether a recording computed them.
    """

    amount: Amount
    wire_gradient: torch.Tensor | None
    scale: float = 1.0
    is_recorded: bool = False


@dataclass(eq=False)
class GradientBucket:
    """A sum of gradients of single targets' losses, waiting for a step.

    Attributes:
        number: counted from 0 at each peer.
        sums: for each parameter the sum over the targets.
        amount: the samples and targets in the sum.
        num_tentative: microbatches in the sum that are not acknowledged yet; while there are any, no step is taken.
        sources: the sources of the gradients in the sum, in the order of their arrival; kept only in the synchronous
            setting.
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
        return self.amount.samples

    def add(self, gradients: Iterable[torch.Tensor], amount: Amount, *, scale: float = 1.0) -> None:
        """Add gradients, summed over the targets of `amount`, in the order of `sums`. They are too large by the power
        of two `scale`."""
        self._sum_up(gradients, scale)
        self.amount += amount

    def _sum_up(self, gradients: Iterable[torch.Tensor], scale: float) -> None:
        torch._foreach_add_(list(self.sums.values()), list(gradients), alpha=1 / scale)

    def take_out(self, gradients: Iterable[torch.Tensor], amount: Amount, *, scale: float = 1.0) -> None:
        torch._foreach_sub_(list(self.sums.values()), list(gradients), alpha=1 / scale)
        self.amount -= amount

    def accumulate(self, gradients: Iterable[torch.Tensor], source: Source) -> None:
        """Add a microbatch's gradient, which is tentative until `settled`."""
        self.add(gradients, source.amount, scale=source.scale)
        self.num_tentative += 1
        self.versions[source.version.number] += 1
        source.version.taken()

    def settled(self, source: Source) -> None:
        """Note that a gradient is tentative no longer, because it stays or was taken out."""
        self.num_tentative -= 1
        source.version.left()

    def withdrawn(self, source: Source) -> None:
        self.versions[source.version.number] -= 1
        self.sources.pop(source, None)

    def roll_back(self, leaving: Set[Source], again: Callable[[Source], Iterable[torch.Tensor]]) -> None:
        """Take gradients out of the sum.

        Each is computed `again`, times its source's scale, and subtracted. If fewer gradients stay than leave, the
        staying ones are computed again instead, and added to an empty sum.
        """
        staying = [source for source in self.sources if source not in leaving]
        left, kept = (sum((source.amount for source in some), start=NOTHING) for some in (leaving, staying))
        # With DiLoCo `sources` is empty, so the staying gradients are not known: a sum is made anew only if nothing
        # stays.
        if len(staying) < len(leaving) and left + kept == self.amount:
            self.clear(kept)
            for source in staying:
                self._sum_up(again(source), source.scale)
        else:
            for source in leaving:
                self.take_out(again(source), source.amount, scale=source.scale)

    def clear(self, amount: Amount = NOTHING) -> None:
        """Take all gradients out. Gradients of `amount` will be added again, and count from now on."""
        torch._foreach_zero_(list(self.sums.values()))
        self.amount = amount

    @property
    def scale(self) -> float:
        """The factor that turns the sums into means."""
        return 1.0 / max(1, self.amount.targets)

    def means(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The mean over the targets, zeros where there are none: tensor by tensor, so that a device which sends them on
        never holds all of them beside the sums."""
        for name, value in self.sums.items():
            yield name, value * self.scale


@dataclass(eq=False)
class Accumulated:
    """A gradient that is in a bucket, with all that is needed to take it out again."""

    source: Source
    bucket: GradientBucket
    sketch: Download
    """Of the gradient (training/sketches), on its way to the CPU; empty if it is not sketched."""
    settled: bool = False


def moved(tensors: Tensors, device: torch.device) -> Tensors:
    """The tensors on a device; those that are there already are not copied."""
    return {name: value if value.device == device else value.detach().to(device) for name, value in tensors.items()}


class Buckets:
    """The buckets of a stage that no step has emptied yet, oldest first.

    Args:
        new: gives tensors for the sums; their values do not matter.
        batch_samples: samples of one batch, at which a bucket is full; None: a bucket is never full (synchronous).
    """

    def __init__(self, new: Callable[[], Tensors], batch_samples: int | None) -> None:
        self._new = new
        self._batch_samples = batch_samples
        self._num_made = 0
        self._buckets: list[GradientBucket] = []

    def open(self) -> GradientBucket:
        """Return the bucket for the next gradient: the first that is not full, or a new one.

        The first may be older than others, if a gradient was taken out of it again.
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
        """Remove a bucket with which a step is about to be taken."""
        self._buckets.remove(bucket)

    def clear(self) -> None:
        self._buckets = []

    @property
    def num_samples(self) -> int:
        """Samples that no step has used yet. May be asked from another thread."""
        return sum(bucket.num_samples for bucket in tuple(self._buckets))

    @property
    def num_samples_ahead(self) -> int:
        """The samples in full buckets and in the bucket for the next gradient. May be read from another thread.

        Forwards that wait for a step wait until these samples are used. Later buckets that are not full are left out:
        no step can empty them before more gradients come, and the first of these go into an older bucket.
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
