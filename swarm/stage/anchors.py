"""The weights with which this round and the one before began.

Owned by the compute thread, as a part of stage/weights. Nothing writes to an anchor. Evaluation computes with one; with
DiLoCo it is what a round's outer step starts from, and in the synchronous setting what a microbatch of the round before
is computed with.
"""

import torch

from swarm.stage.buckets import Tensors

CPU = torch.device("cpu")
KEPT_ANCHORS = 2
"""Rounds whose anchor stays readable, for evaluation and for stages that have to repeat a round: this one and the one
before."""


class Anchors:
    """Anchors by round.

    Args:
        device: where they are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_round: dict[int, Tensors] = {}

    def begin(self, round_number: int, weights: Tensors) -> None:
        """Keep the weights with which a round begins."""
        self._by_round[round_number] = moved(weights, self._device)
        for number in sorted(self._by_round)[:-KEPT_ANCHORS]:
            del self._by_round[number]

    def find(self, round_number: int) -> Tensors | None:
        """The weights that began a round; None unless it is this round or the one before."""
        return self._by_round.get(round_number)

    def clear(self) -> None:
        """Forget all anchors, because another state takes their place."""
        self._by_round.clear()


def moved(tensors: Tensors, device: torch.device) -> Tensors:
    """The tensors on a device; those that are there already are not copied."""
    return {name: value if value.device == device else value.detach().to(device) for name, value in tensors.items()}
