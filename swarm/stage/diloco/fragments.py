"""The parts of a stage's parameters that are averaged in turn (Streaming DiLoCo, arXiv 2501.18512).

Used by stage/diloco/weights. Handles names and numbers of samples and targets, never a tensor.
"""

from collections.abc import Iterable, Sequence

from swarm.training.samples import NOTHING, Amount


class Fragments:
    """Fragments, and the samples and targets with which each was stepped since it was last averaged.

    Args:
        names: the names of all parameters.

    Raises:
        ValueError: the stage has fewer blocks than fragments.
    """

    def __init__(self, names: Iterable[str], num_fragments: int) -> None:
        self._dealt = dealt(names, num_fragments)
        self.unaveraged = [NOTHING] * num_fragments
        """By fragment, the amount that inner steps have used since the fragment was last averaged."""

    def turn(self, round_number: int) -> int:
        """The fragment that a round averages."""
        return round_number % len(self._dealt)

    def names(self, fragment: int) -> Sequence[str]:
        """The names of a fragment's parameters."""
        return self._dealt[fragment]

    def stepped(self, amount: Amount) -> None:
        """Note that an inner step has used this amount."""
        self.unaveraged = [before + amount for before in self.unaveraged]

    def averaged(self, fragment: int, *, but: Amount) -> None:
        """Note that a fragment was averaged. The steps of the amount `but`, taken after the closing, are not in the
        average."""
        self.unaveraged[fragment] = but

    def forget(self) -> None:
        """Forget all that was learnt."""
        self.unaveraged = [NOTHING] * len(self._dealt)


def dealt(names: Iterable[str], num_fragments: int) -> list[list[str]]:
    """Divide parameter names by block (embedding, each layer, head) among the fragments, so that a fragment's layers
    are far apart.

    Raises:
        ValueError: there are fewer blocks than fragments.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        blocks.setdefault(".".join(parts[: 2 if parts[0] == "layers" else 1]), []).append(name)
    if len(blocks) < num_fragments:
        raise ValueError(f"averaging.num_fragments is {num_fragments}, but a stage has only {len(blocks)} blocks")
    in_order = list(blocks.values())
    return [[name for block in in_order[first::num_fragments] for name in block] for first in range(num_fragments)]
