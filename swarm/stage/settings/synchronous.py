"""The synchronous setting: a round is one optimizer step, on the mean of all its gradients, and a known range of ids.

A microbatch is computed with the weights of its round, so all peers compute the same numbers, and a repeat is answered
with the known result. Acknowledged computations are kept until the round is over, because they may have to be taken out
again. A round closes with acknowledged microbatches only.
"""

import dataclasses
from collections.abc import Collection, Iterable
from fractions import Fraction
from functools import partial

import torch
from torch import nn

from swarm.config import RunConfig, Timeline
from swarm.errors import MalformedMessage, NotReady, Overloaded, StaleMicrobatch
from swarm.stage.buckets import GradientBucket, Source, Tensors, Version
from swarm.stage.computation import Computation
from swarm.stage.context import StageContext
from swarm.stage.ledger import Entry, EntryState
from swarm.stage.settings.setting import Setting, Start
from swarm.stage.weights import Round, StageWeights
from swarm.training import optim
from swarm.training.round_member import Contribution, RoundResult
from swarm.training.samples import NOTHING, Amount, Microbatch
from swarm.training.scaling import clipped
from swarm.training.sketches import MOST_SKETCHED, Sketch

REPLAY_GAP_SECONDS = 1.0
"""A replay of a microbatch that counts at a peer is offered to this peer again after so long. In the meantime the peer
may have had to drop the microbatch."""


class SynchronousWeights(StageWeights):
    """One sum of gradients, and one step a round. Owned by the compute thread."""

    def __init__(
        self, config: RunConfig, module: nn.Module, timeline: Timeline, *, lineage: str, share: Fraction, fused: bool
    ) -> None:
        """See weights_of."""
        self._earlier: Version | None
        """The weights of the last round, once a microbatch was computed with them."""
        # Microbatches of the round before are computed with its anchor.
        device = next(module.parameters()).device
        super().__init__(
            config, module, timeline, batch_samples=None, anchor_device=device, lineage=lineage, share=share,
            fused=fused,
        )  # fmt: skip

    def version_for(self, round_number: int) -> Version:
        """The weights of the microbatch's round. Raises NotReady if its round is neither this one nor the one
        before."""
        return self.anchored(round_number)

    def anchored(self, round_number: int) -> Version:
        if round_number == self.round.number:
            return self.version
        if self._earlier is None or self.anchor(round_number) is None:
            self._earlier = super().anchored(round_number)
        return self._earlier

    def accumulate(self, gradients: Iterable[torch.Tensor], source: Source) -> GradientBucket:
        bucket = super().accumulate(gradients, source)
        # The microbatch may have to be taken out when the round closes, if another member counts it as well.
        bucket.sources[source] = None
        return bucket

    def step_if_due(self) -> None:
        pass  # Steps are taken when rounds end.

    def train_on(self) -> None:
        pass

    def require_sound(self) -> None:
        pass  # The only step is a round's end, and its error goes to the member that commits.

    @property
    def learning_rate(self) -> float:
        return self._rate_after(self.round.run_samples)

    @property
    def round_samples(self) -> int:
        return self.buckets.num_samples

    def stop_sum(self) -> None:
        """Let no computation begin that would join the sum, until the round commits or is reopened.

        It runs on any thread, so that it need not wait for a long microbatch on the compute thread.
        """
        self.round.closed = True

    def contribute(self) -> Contribution:
        """Freeze the mean gradient itself: as a difference of weights it would lose its small entries to rounding."""
        self.round.closed = True
        bucket = self.buckets.open()
        return Contribution(
            tensors={name: self._staging.download(value).wait() for name, value in bucket.means()},
            num_samples=bucket.amount.samples,
            num_targets=bucket.amount.targets,
            round_samples=bucket.amount.samples,
        )

    def _end_round(self, result: RoundResult, rate: float) -> tuple[Amount, Tensors]:
        # Not in place, because others may still fetch the average. One by one, so that a device does not hold it twice.
        clip = partial(
            clipped, squared_norm=result.total_squared_norm, max_norm=self._config.optimizer.clip_norm,
            memory=self._memory,
        )  # fmt: skip
        gradients = dict[str, torch.Tensor]()
        for name, value in result.tensors.items():
            gradients |= clip({name: self._staging.upload(value)})
        optim.step(self._ends_rounds, self.masters, gradients, rate)
        del gradients  # Frees memory for what follows.
        self.buckets.clear()
        self._versions.publish()
        return NOTHING, self._present()

    def _present(self) -> Tensors:
        return self.version.parameters

    @property
    def _anchor(self) -> Tensors:
        # Versions may be in bfloat16, and nothing writes to masters before the round commits.
        return {**self.masters}

    def _begin(self, new_round: Round, anchor: Tensors) -> None:
        self._earlier = None
        super()._begin(new_round, anchor)
        # Where one peer holds the block nobody could check it. All peers know the members of the last round.
        is_alone, is_small = len(new_round.tally.members) == 1, self._config.microbatches_per_round <= MOST_SKETCHED
        is_sketched = self._config.rounds.check_share and is_small and not is_alone
        self.sketch = Sketch(self.masters, f"{new_round.lineage} {new_round.number}") if is_sketched else None

    def _stepped(self) -> optim.Parameters:
        return self.masters


class SynchronousSetting(Setting):
    def __init__(self, context: StageContext, weights: SynchronousWeights) -> None:
        self._stage = context.stage
        self._context = context
        self._weights = weights
        self._round = context.present_round
        self._ledger = context.records.ledger

    # -- which microbatches are admitted -----------------------------------------------------------------------------

    def check(self, microbatch: Microbatch) -> None:
        """Raise if a microbatch is not admitted.

        Microbatches of the last round are admitted, with that round's weights, though they no longer count here. A
        stage that lost all its peers and came back from a checkpoint needs them, because it has to do that round again.
        """
        self.require_of_its_round(microbatch)
        if microbatch.round < self._round.number:
            self._check_past(microbatch)
        else:
            self._check_round(microbatch)
        self._check_replay(microbatch)

    def require_of_its_round(self, microbatch: Microbatch) -> None:
        """Where a later round begins and ends is known only once it is the present one."""
        number, indices = self._weights.round.number, self._context.indices
        is_possible = microbatch.index in indices
        if microbatch.round != number:
            is_past = microbatch.round < number
            is_possible = microbatch.index < indices.start if is_past else microbatch.index >= indices.stop
        if not is_possible:
            raise MalformedMessage(f"microbatch {microbatch.index} is not of round {microbatch.round}")

    def _check_past(self, microbatch: Microbatch) -> None:
        if microbatch.round < self._round.number - 1:
            raise StaleMicrobatch(f"microbatch {microbatch.index}: round {microbatch.round} has committed")
        if self._weights.anchor(microbatch.round) is None:
            raise NotReady(f"this peer was not there in round {microbatch.round}")

    def _check_round(self, microbatch: Microbatch) -> None:
        number, is_next = self._round.number, microbatch.round > self._round.number
        is_closed = self._weights.round.closed
        # Later stages take everything that stage 0 admitted, and wait for their own commit if necessary. But a peer
        # that downloads the state takes longer, so the microbatch has to wait elsewhere.
        if is_next and self._round.is_behind:
            raise Overloaded(f"this peer is at round {number} and catches up", retry_after_seconds=0.25)
        # Once its stage's leader has committed a round, it grants the next one. The commit comes here in a moment if
        # this peer is a member; a caller that was refused would give a busy peer a second microbatch meanwhile.
        if self._stage == 0 and is_next and not is_closed:
            raise Overloaded(f"round {number} has not committed yet", retry_after_seconds=0.05)
        # Replays for another stage pass even now, because that stage cannot commit without them.
        if self._stage == 0 and not is_next and microbatch.counts_at(0) and is_closed:
            raise Overloaded(f"round {number} is being averaged", retry_after_seconds=0.05)

    def _check_replay(self, microbatch: Microbatch) -> None:
        """Refuse a replay of a microbatch that counts here. The leader would not have granted the replay if it got this
        peer's reports, so another peer has to do it."""
        entry = self._ledger.find(microbatch.index) if microbatch.accumulate_only_at == self._stage else None
        if entry is not None and entry.state is EntryState.COMMITTED:
            raise Overloaded("it counts here: another peer has to replay it", retry_after_seconds=REPLAY_GAP_SECONDS)

    def queue_of(self, round_number: int) -> int:
        """Give each round slots of its own, so that microbatches that wait for the next round take none of this round's
        slots."""
        # All later rounds share one number. Otherwise callers could create any number of sets of slots by naming new
        # rounds.
        return min(round_number, self._round.number + 1)

    def has_its_part(self, num_in_flight: int) -> bool:
        # A round takes as long as the peer that has most of it.
        config = self._context.config_in(self._round.number)
        num_samples = num_in_flight * config.data.microbatch_size * self._weights.round.num_members
        return num_samples >= config.round_samples_of(self._context.block)

    # -- when microbatches are computed ------------------------------------------------------------------------------

    def due_round(self, microbatch: Microbatch) -> int:
        return microbatch.round

    def look(self) -> None:
        pass

    # -- what a call gets --------------------------------------------------------------------------------------------

    def known(self, microbatch: Microbatch) -> Computation | None:
        entry = self._ledger.find(microbatch.index)
        known = None if entry is None else entry.computation
        return None if known is None or known.failed else known

    def counts(self, microbatch: Microbatch) -> bool:
        return microbatch.counts_at(self._stage) and microbatch.round >= self._round.number

    @property
    def takes_gradients(self) -> bool:
        # A stage closes when its members have the whole round. What a member contributed before it died may still be
        # committed; if not, it is replayed later. A replay for another stage must not wait for this one to reopen,
        # because this one may itself be waiting for that stage.
        return not self._weights.round.closed

    def repeated(self, microbatch: Microbatch, entry: Entry[Computation]) -> Computation | Start:
        known = entry.computation
        if entry.state is EntryState.COMMITTED or known is None:
            return Start(microbatch=self._already_counted(microbatch), accumulate=False, earlier=known)
        is_enough = known.microbatch.accumulate_only_at in (None, microbatch.accumulate_only_at)
        if is_enough and not known.failed:
            return known
        return Start(microbatch=microbatch, accumulate=True, instead_of=known)

    def _already_counted(self, microbatch: Microbatch) -> Microbatch:
        """Return the microbatch that still has to be computed if it counts here already: later stages are not to
        accumulate it.

        Later stages got the acknowledgement, and what they lost is replayed. If they accumulated it again, it would
        have to be taken out. At stage 0 nothing is left to do, because no stage before it needs a gradient.
        """
        if self._stage == 0 and microbatch.accumulate_only_at is None:
            raise StaleMicrobatch(f"microbatch {microbatch.index} counts already")
        return dataclasses.replace(microbatch, accumulate_only_at=self._stage)

    # -- how microbatches end ----------------------------------------------------------------------------------------

    def acknowledged(self, microbatch: Microbatch) -> None:
        # The computation is kept: it may have to be taken out of the round, and a replay may want its answer.
        self._ledger.commit(microbatch.index, microbatch.round, keep_computation=True)

    def may_be_joined(self, computation: Computation) -> bool:
        # At stage 0 a computation that still runs is of no use, because the trainer retries at another peer.
        return computation.done or self._stage > 0

    # -- rounds ------------------------------------------------------------------------------------------------------

    def committed(self) -> frozenset[int]:
        return self._ledger.committed(self._round.number)

    def refuse_gradients(self, drop: Collection[int]) -> list[Entry[Computation]] | None:
        """Return the microbatches that were never acknowledged, and those that another member counts; they are
        undone."""
        # From now on nothing that arrives is accumulated.
        self._weights.stop_sum()
        doubles = [entry for entry in map(self._ledger.find, drop) if entry is not None]
        return [*self._ledger.uncommitted(self._round.number), *doubles]

    def round_began(self) -> None:
        self._ledger.prune(self._round.number)

    def squared_norm(self, result: RoundResult) -> float:
        """The squared norm of the gradient over the whole model, by which gradients are clipped."""
        return result.total_squared_norm
