"""A stage's weights with DiLoCo: inner steps of its own, and an outer step a round.

Owned by the compute thread. A stage may be averaged in fragments, one in each round, in turn. It may go on training
while a round is exchanged (Streaming DiLoCo, arXiv 2501.18512). The inner steps since the contribution was closed are
then carried over to the new anchor, and count towards the next round. If rounds, a few at most, are committed without
this peer, all its inner steps of these rounds are carried over in the same way, so that it contributes late (as in
asynchronous local SGD, arXiv 2401.09135). Anchors and outer momentum are needed once a round: they are kept on the CPU,
and the outer step is taken there, whatever device trains; or they are in files that are mapped to memory.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from swarm.config import RunConfig, Timeline
from swarm.events import Events, Step
from swarm.machine.memory import Recycler, in_file
from swarm.model.adapters import trained_parameters
from swarm.stage.buckets import GradientBucket, Tensors, Version
from swarm.stage.weights import Round, StageWeights
from swarm.training import optim
from swarm.training.inner_steps import InnerSteps
from swarm.training.optimizers import gradient_optimizer
from swarm.training.round_member import Contribution, RoundResult
from swarm.training.samples import NOTHING, Amount
from swarm.training.scaling import clip, squared_norm_of

KEPT_CLOSINGS = 3
"""Closings of a round that are known. Each holds the weights from which it was taken."""
LATE_VERSIONS = 2
"""Versions that are kept in addition to the newest and those that `max_staleness` asks for. They are for microbatches
that take much longer than others, for example because a later peer has died."""


class _Closing(NamedTuple):
    """A contribution's tensors, anchor minus weights, to which nothing writes, and the round's inner steps by then:
    their number, and the amount that they used."""

    tensors: Tensors
    num_steps: int
    stepped: Amount


class DilocoWeights(StageWeights):
    """An inner step whenever a batch is full, and an outer step from the anchor."""

    def __init__(
        self, config: RunConfig, module: nn.Module, timeline: Timeline, *, lineage: str, share: Fraction, fused: bool,
        events: Events | None, anchors: Path | None,
    ) -> None:  # fmt: skip
        """See weights_of."""
        self._on_disk = None if anchors is None else Recycler(partial(in_file, anchors))
        """Memory for anchors and outer momentum, unless that is RAM."""
        self._events = events or Events()
        self._inner = gradient_optimizer(config, same_bits=False, fused=fused)
        self._fragments = dealt(trained_parameters(module), config.averaging.num_fragments)
        """The names of each fragment's parameters."""
        self._forget()
        self._closings: dict[int, _Closing]
        """The newest closings of this round, by number. They are kept even when the round is reopened, because the
        result of an earlier one may still be decided."""
        self._num_more_steps: int
        """How many inner steps of this round `train_on` has allowed."""
        self._failure: Exception | None = None
        """The failure of an inner step."""
        super().__init__(
            config, module, timeline, batch_samples=config.rounds.inner_batch_samples,
            anchor_device=torch.device("cpu"), lineage=lineage, share=share, fused=fused,
            outer_memory=self._on_disk,
        )  # fmt: skip

    def _forget(self) -> None:
        self._unaveraged = [NOTHING] * len(self._fragments)
        """By fragment, the amount that inner steps have used since the fragment was last averaged."""

    def version_for(self, round_number: int) -> Version:
        return self.version

    def anchored(self, round_number: int) -> Version:
        return self.version if self.version.anchor_round == round_number else super().anchored(round_number)

    # -- inner steps -------------------------------------------------------------------------------------------

    def step_if_due(self) -> None:
        self.require_sound()
        try:
            self._step_if_due()
        except Exception as error:
            self._failure = error
            raise

    def require_sound(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _step_if_due(self) -> None:
        for bucket in self.buckets.ready:
            if self.round.closed and self._num_overlapped() >= self._config.averaging.overlap_steps:
                break
            # A step that would need one more version waits. So do new microbatches, so that no batch grows.
            if self._versions.num_old >= self._config.rounds.max_staleness + LATE_VERSIONS:
                break
            self.buckets.remove(bucket)
            self._inner_step(bucket)

    def _num_overlapped(self) -> int:
        """Inner steps since the round was closed, without those of `train_on`."""
        newest = max(self._closings, default=None)
        num_steps = 0 if newest is None else self.inner_steps.count - self._closings[newest].num_steps
        return num_steps - self._num_more_steps

    def _inner_step(self, bucket: GradientBucket) -> None:
        # In place, because no gradient is added to this bucket or taken out of it any more.
        gradients = bucket.sums
        torch._foreach_mul_(list(gradients.values()), bucket.scale)
        clip(gradients, squared_norm_of(gradients.values()), self._config.optimizer.clip_norm)
        optim.step(self._inner, self.masters, gradients, self.learning_rate)
        self._events.write(Step(bucket=bucket.number, samples=bucket.num_samples))
        self.inner_steps.add(bucket.num_samples, bucket.versions, newest=self.version.number)
        self.round.stepped += bucket.amount
        self._unaveraged = [amount + bucket.amount for amount in self._unaveraged]
        self._versions.publish()

    def train_on(self) -> None:
        self._num_more_steps += self.round.closed
        self.step_if_due()

    # -- rounds ------------------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        elsewhere = self.round_samples * self.round.num_members
        return self._rate_after(self.round.run_samples + elsewhere)

    @property
    def round_samples(self) -> int:
        return self.round.stepped.samples

    def contribute(self) -> Contribution:
        """Freeze the pseudo-gradient, anchor minus weights, of this round's fragment."""
        self.round.closed = True
        fragment, anchor = self._fragment, self._anchor
        tensors = self._memory.like({name: anchor[name] for name in self._fragments[fragment]})
        with torch.no_grad():
            for name, difference in tensors.items():
                subtract = partial(torch.sub, anchor[name], out=difference)
                self._staging.download(self.masters[name].detach(), subtract).wait()
        number = 1 + max(self._closings, default=-1)
        self._closings[number] = _Closing(tensors, self.inner_steps.count, self.round.stepped)
        self._closings.pop(number - KEPT_CLOSINGS, None)
        amount = self._unaveraged[fragment]
        return Contribution(
            tensors=tensors, num_samples=amount.samples, num_targets=amount.targets,
            round_samples=self.round.stepped.samples, fragment=fragment, closing=number,
        )  # fmt: skip

    def _end_round(self, result: RoundResult, rate: float) -> tuple[Amount, Tensors]:
        """Step from the anchor.

        What was learnt from samples that are not in the average is carried over: it is added to the new anchor.
        """
        anchor = self._anchor
        carried, carried_amount = self._carried(result)
        self._closings = {}  # Frees memory for what follows.
        if result.contributed or not carried:
            self._unaveraged[self._fragment] = carried_amount
        stepped = (self._on_disk or self._memory).copies({name: anchor[name] for name in result.tensors})
        optim.step(self._ends_rounds, stepped, result.tensors, self._config.outer_step.learning_rate)
        self._load_masters(stepped)
        if carried:
            self._add_to_masters(carried)
        self._versions.publish(None if carried or self._on_disk else stepped)
        return carried_amount, {**anchor, **stepped}

    @property
    def _fragment(self) -> int:
        return self.round.number % len(self._fragments)

    def _carried(self, result: RoundResult) -> tuple[Tensors, Amount]:
        """The change of the weights that is not in the round's average, and the amount of this round that caused it."""
        if not result.contributed:
            learnt = self._learnt(result.tensors, self._unaveraged[self._fragment].samples)
            return learnt, self.round.stepped if learnt else NOTHING
        # There is no closing if the result was decided without this peer's knowledge, after a restart of the attempt.
        closed = self._closings.get(max(self._closings, default=-1) if result.closing is None else result.closing)
        if (
            closed is None
            or closed.num_steps == self.inner_steps.count
            or closed.tensors.keys() != result.tensors.keys()
        ):
            return {}, NOTHING
        anchor = self._anchor
        since = {
            name: (self.masters[name] - self._staging.upload(anchor[name] - difference)).detach()
            for name, difference in closed.tensors.items()
        }
        return since, self.round.stepped - closed.stepped

    def _learnt(self, names: Iterable[str], num_samples: int) -> Tensors:
        """What inner steps, which have used `num_samples`, have added to parameters since their last average.

        Empty if it is not finite, because a peer must drop weights that diverged. With fragments all these samples may
        be of earlier rounds, which averaged other fragments.
        """
        if not num_samples:
            return {}
        anchor = self._anchor
        learnt = {name: (self.masters[name] - anchor[name].to(self.masters[name].device)).detach() for name in names}
        return learnt if all(bool(value.isfinite().all()) for value in learnt.values()) else {}

    def install(self, tensors: Mapping[str, torch.Tensor], new_round: Round, *, carry: bool = False) -> None:
        num_samples = sum(amount.samples for amount in self._unaveraged)
        learnt = self._learnt(self.masters, num_samples) if carry else {}
        if learnt:
            new_round.stepped = self.round.stepped
        else:
            self._forget()
        super().install(tensors, new_round)
        if learnt:
            self._add_to_masters(learnt)
            self._versions.publish()

    def recall(self, moments: Tensors) -> None:
        optim.load_state_tensors(self._inner, self.masters, moments)

    def _begin(self, new_round: Round, anchor: Tensors) -> None:
        self._closings = {}
        self._num_more_steps = 0
        self.inner_steps = InnerSteps(configured_samples=self._config.rounds.inner_batch_samples)
        super()._begin(new_round, anchor)
        if not any(amount.samples for amount in self._unaveraged):
            self.version.anchor_round = new_round.number

    def _amend(self, config: RunConfig) -> bool:
        if is_new := super()._amend(config):
            before, self._inner = self._inner, gradient_optimizer(config, same_bits=False, fused=self._fused)
            self._inner.take_over(before)
        return is_new

    def _present(self) -> Tensors:
        # What is on the CPU may be the version itself, but not if that is in bfloat16.
        if not self._versions.rounds and self._on_disk is None:
            return self.version.parameters
        on_cpu = {name: master.detach().cpu() for name, master in self.masters.items()}
        return (self._on_disk or self._memory).copies(on_cpu)

    def _stepped(self) -> optim.Parameters:
        return self._anchor

    def _add_to_masters(self, values: Tensors) -> None:
        torch._foreach_add_([self.masters[name].data for name in values], list(values.values()))


def dealt(names: Iterable[str], num_fragments: int) -> list[list[str]]:
    """Divide parameter names by layer group (embedding, each layer, head) among the fragments, so that a fragment's
    layers are far apart. Raises ValueError if there are fewer layer groups than fragments."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        groups.setdefault(".".join(parts[: 2 if parts[0] == "layers" else 1]), []).append(name)
    if len(groups) < num_fragments:
        raise ValueError(f"averaging.num_fragments is {num_fragments}, but a stage has only {len(groups)} layer groups")
    in_order = list(groups.values())
    return [[name for group in in_order[first::num_fragments] for name in group] for first in range(num_fragments)]
