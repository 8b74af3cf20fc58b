"""The loss on held-out text, of each dataset and of all together, computed from the losses of batches.

Used by trainers of a swarm, and by static runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.data.microbatches import HeldOut
from swarm.training import samples


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Losses on held-out text, in nats per target.

    Attributes:
        mean: over the held-out parts of all datasets, weighted by their lengths.
        by_source: the loss of each dataset, by its name.
    """

    mean: float
    by_source: Mapping[str, float]

    @property
    def of_several(self) -> Mapping[str, float]:
        """`by_source` if there are several datasets, else empty."""
        return self.by_source if len(self.by_source) > 1 else {}


def averaged(sources: Sequence[HeldOut], losses: Sequence[float]) -> HeldOutLoss:
    """The loss on all held-out text.

    Args:
        losses: the mean loss over targets of each batch of each source, in order.
    """
    remaining = iter(losses)
    by_source, weights = dict[str, float](), list[float]()
    for source in sources:
        targets = [samples.amount(batch).targets for batch in source.batches]
        by_source[source.name] = float(np.average([next(remaining) for _ in targets], weights=targets))
        weights.append(source.share * sum(targets))
    return HeldOutLoss(mean=float(np.average(list(by_source.values()), weights=weights)), by_source=by_source)
