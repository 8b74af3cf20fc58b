"""A stage's weights in the synchronous setting: one optimizer step a round, on the mean of all its gradients.

Owned by the compute thread. There are no inner steps: gradients are summed until the round closes, and every microbatch
is computed with the weights that began its round.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from swarm.config import RunConfig
from swarm.errors import NotReady
from swarm.stage.buckets import GradientBucket, Source, Tensors, Version
from swarm.stage.weights import Round, StageWeights
from swarm.training import optim
from swarm.training.optimizers import round_optimizer
from swarm.training.round_member import Contribution
from swarm.training.samples import NOTHING, Amount


class SynchronousWeights(StageWeights):
    """The weights in the synchronous setting: one sum of gradients, and one step a round."""

    def __init__(self, config: RunConfig, module: nn.Module, *, lineage: str) -> None:
        self._earlier: Version | None
        """The weights of the last round, once a microbatch was computed with them."""
        super().__init__(
            config,
            module,
            ends_rounds=round_optimizer(config),
            batch_samples=None,
            # Microbatches of the round before are computed with its anchor.
            anchor_device=next(module.parameters()).device,
            lineage=lineage,
        )

    def version_for(self, round_number: int) -> Version:
        """The weights of the microbatch's round.

        Raises:
            NotReady: its round is neither this one nor the one before.
        """
        if round_number == self.round.number:
            return self.version
        anchor = self.anchor(round_number)
        if anchor is None:
            raise NotReady(f"the weights of round {round_number} are not kept: this peer is at {self.round.number}")
        if self._earlier is None:
            self._earlier = Version(parameters=anchor)
        return self._earlier

    def accumulate(self, gradients: Iterable[torch.Tensor], source: Source) -> GradientBucket:
        bucket = super().accumulate(gradients, source)
        # The microbatch may have to be taken out when the round closes, if another member counts it as well.
        bucket.sources[source] = None
        return bucket

    def step_if_due(self) -> None:
        pass  # Steps are taken when rounds end.

    def require_sound(self) -> None:
        pass  # The only step is a round's end, and its error goes to the member that commits.

    @property
    def learning_rate(self) -> float:
        return optim.learning_rate(self._config.gradient_step, self.round.run_samples)

    @property
    def round_samples(self) -> int:
        return self.num_unstepped_samples

    def seal(self) -> None:
        """Let no computation begin that would join the sum, until the round commits or is reopened.

        It runs on any thread, so that it need not wait for a long microbatch on the compute thread.
        """
        self.round.closed = True

    def close(self) -> Contribution:
        """Freeze the mean gradient itself: as a difference of weights it would lose its small entries to rounding."""
        self.round.closed = True
        bucket = self.buckets.open()
        return Contribution(
            tensors={name: self._staging.download(value).wait() for name, value in bucket.mean().items()},
            num_samples=bucket.amount.samples,
            num_targets=bucket.amount.targets,
            round_samples=bucket.amount.samples,
        )

    def _end_round(
        self,
        average: Mapping[str, torch.Tensor],
        total_squared_norm: float,
        rate: float,
        *,
        contributed: bool,
        closing: int | None,
    ) -> tuple[Amount, Tensors]:
        factor = optim.clip_factor(total_squared_norm, self._config.optimizer.clip_norm)
        gradients = {name: self._staging.upload(value) for name, value in average.items()}
        if factor != 1.0:
            # The clipped gradients get memory of their own, because others may still fetch the average.
            clipped = self._memory.like(gradients)
            for name, value in gradients.items():
                torch.mul(value, factor, out=clipped[name])
            gradients = clipped
            del clipped
        optim.step(self._ends_rounds, self.masters, gradients, rate)
        del gradients  # Frees memory for what follows.
        self.buckets.clear()
        self._versions.publish()
        return NOTHING, self.version.parameters

    def _begin(self, new_round: Round, anchor: Tensors) -> None:
        self._earlier = None
        super()._begin(new_round, anchor)

    def _stepped(self) -> optim.Parameters:
        return self.masters
