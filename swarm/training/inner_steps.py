"""Figures of a peer's inner steps in one round (DiLoCo): their number, their samples, and the staleness of their
gradients.

stage/weights counts them, peers report them with the round, and trainers, peers and swarm-status show them, so that
users can see why a run learns badly. Pure.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

FAR_OFF = 0.5
"""A warning is due if the samples of a step differ from the configured ones by more than this share of them."""
LATE = 1.0
"""A warning is due if the mean staleness is more than this many steps."""


@dataclass
class InnerSteps:
    """The inner steps of one round at one peer.

    Attributes:
        samples: all samples that they used.
        configured_samples: samples that one step is to use; 0 in the synchronous setting, which has no inner steps.
        staleness: versions of the weights that were made between a microbatch's forward and its step, summed over the
            microbatches.
    """

    count: int = 0
    samples: int = 0
    configured_samples: int = 0
    microbatches: int = 0
    staleness: int = 0
    largest_staleness: int = 0

    def add(self, samples: int, versions: Mapping[int, int], *, newest: int) -> None:
        """Count a step. `versions` says how many microbatches were computed with each version, by its number. `newest`
        is the version on top of which the step is taken."""
        self.count += 1
        self.samples += samples
        for number, count in versions.items():
            if count:
                self.microbatches += count
                self.staleness += (newest - number) * count
                self.largest_staleness = max(self.largest_staleness, newest - number)

    @classmethod
    def read(cls, message: Any) -> Self:
        return cls(**{field.name: getattr(message, field.name) for field in dataclasses.fields(cls)})

    @property
    def samples_per_step(self) -> float:
        return self.samples / self.count if self.count else 0.0

    @property
    def mean_staleness(self) -> float:
        return self.staleness / self.microbatches if self.microbatches else 0.0

    @property
    def fault(self) -> str:
        """One line on why the run learns less than it could, and what to change. Empty if all is well."""
        if self.count and abs(self.samples_per_step - self.configured_samples) > FAR_OFF * self.configured_samples:
            return (
                f"inner steps took {self.samples_per_step:.0f} samples, and rounds.inner_batch_samples is "
                f"{self.configured_samples}"
            )
        if self.mean_staleness > LATE:
            return (
                f"gradients were {self.mean_staleness:.1f} inner steps late on average, {self.largest_staleness} at "
                "most, and a run learns less from those: lower rounds.max_staleness, or raise "
                "rounds.inner_batch_samples"
            )
        return ""
