"""Computes the next positions of sequences with a module of the model's layers: all of them, or those of one stage.

Used by generation/engine and stage/decoder in inference mode, each on the one thread on which it computes. Knows
nothing of tokens that are chosen, of callers, or of whose turn it is.

Shape suffixes: B sequences, T positions, R numbers a token that travel, N positions whose outputs are wanted, V numbers
of an output: the vocabulary at the last stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.model.attention import CacheRows, KeyValueCache
from swarm.model.stage_module import StageModule


@dataclass(frozen=True, kw_only=True)
class NextPositions:
    """The next positions of one sequence, at least one.

    Attributes:
        cache: that of the earlier positions, to which these are added.
        hidden_1TR: what the stage before made of the tokens; None at the first stage.
        num_logits: how many of these positions' logits the last stage gives: those of the last ones.
    """

    cache: KeyValueCache
    tokens: Sequence[int]
    hidden_1TR: Tensor | None = None
    num_logits: int = 1


class Decoding:
    """Computes sequences side by side, because reading the weights is what takes the time."""

    def __init__(self, upload: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            upload: brings a tensor to the device.
        """
        self._upload = upload

    def compute(
        self, module: Callable[[], StageModule], together: Sequence[NextPositions]
    ) -> list[Tensor | BaseException]:
        """Compute the next positions of one sequence, or one position of each of several.

        If that fails for several, such as for lack of memory, each is computed alone, so that an error concerns no more
        of them than it must.

        Args:
            module: gives the module, or fails.

        Returns:
            For each sequence the outputs_NV of its last positions, or the error with which they failed.
        """
        before = [positions.cache.num_positions for positions in together]
        try:
            return list(self._outputs(module(), together))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            if len(together) == 1:
                return [error]
        # By now the failed computation has given its memory back.
        outputs: list[Tensor | BaseException] = []
        for positions, num_positions in zip(together, before, strict=True):
            positions.cache.rewind(num_positions)
            outputs += self.compute(module, [positions])
        return outputs

    def _outputs(self, module: StageModule, together: Sequence[NextPositions]) -> Tensor:
        caches = [positions.cache for positions in together]
        tokens_BT = self._upload(torch.tensor([positions.tokens for positions in together]))
        hidden = [positions.hidden_1TR for positions in together if positions.hidden_1TR is not None]
        outputs_BNV: Tensor = module(
            torch.cat(hidden) if hidden else tokens_BT,
            tokens_BT=tokens_BT,
            cache=caches[0] if len(caches) == 1 else CacheRows(caches),
            num_logits=together[0].num_logits,
        )
        return outputs_BNV
