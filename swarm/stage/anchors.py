"""The weights with which this round and the one before began.

Owned by the compute thread, as a part of stage/weights. Nobody writes to an anchor. Evaluation computes with one; with
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
        self._copied: tuple[Tensors, Tensors] | None = None
        """The anchor that was last wanted on another device, and its copy there."""

    def begin(self, round_number: int, weights: Tensors) -> None:
        """A round begins with these weights."""
        self._copied = None
        self._by_round[round_number] = moved(weights, self._device)
        for number in sorted(self._by_round)[:-KEPT_ANCHORS]:
            del self._by_round[number]

    def find(self, round_number: int) -> Tensors | None:
        """The weights that began a round; None unless it is this round or the one before."""
        return self._by_round.get(round_number)

    def clear(self) -> None:
        """Forget all of them: another state takes their place."""
        self._by_round.clear()

    def on(self, device: torch.device, anchor: Tensors) -> Tensors:
        """An anchor on a device.

        If it is elsewhere, a copy is kept for the evaluation's next microbatches, one at most: until another anchor is
        asked for, or a round begins.
        """
        if all(value.device == device for value in anchor.values()):
            return anchor
        if self._copied is None or self._copied[0] is not anchor:
            # First, memory for what follows.
            self._copied = None
            self._copied = anchor, moved(anchor, device)
        return self._copied[1]


def moved(tensors: Tensors, device: torch.device) -> Tensors:
    """The tensors on a device; those that are there already are no copies."""
    return {name: value if value.device == device else value.detach().to(device) for name, value in tensors.items()}
