"""The type in which matrix products are computed, and the loss scale that float16 needs. Used by the loop."""

import contextlib
import logging
import math
from contextlib import AbstractContextManager

import torch

from swarm.errors import Fatal

logger = logging.getLogger(__name__)

FIRST_SCALE, GROWS_AFTER = 2.0**16, 2000
"""The first scale, and after how many good steps it is doubled; torch.amp.GradScaler has the same values."""


def computing_in(dtype: str | None, device: torch.device) -> AbstractContextManager[object]:
    """A context for forwards: autocast to float16 if the dtype is fp16; otherwise it changes nothing, and the model
    follows its configuration."""
    if dtype != "fp16":
        return contextlib.nullcontext()
    # The cache of casts is off. With it, microbatches would share one cast of a weight, and the backward would add the
    # weight's gradient only after FSDP had exchanged the gradients of its layer, so it would be lost.
    return torch.autocast(device.type, torch.float16, cache_enabled=False)


class LossScale:
    """The factor by which losses are multiplied, so that their gradients neither vanish nor overflow in float16.

    If a step's gradients are not finite, the step is computed again with half the scale. (Micikevicius et al., arXiv
    1710.03740, skip such a step, and so take fewer steps than with other types.) For types other than fp16 the factor
    stays 1.
    """

    def __init__(self, dtype: str | None) -> None:
        self._is_on = dtype == "fp16"
        self.factor = FIRST_SCALE if self._is_on else 1.0
        self._num_good = 0

    def accepts(self, squared_norm: float, step: int) -> bool:
        """Whether a step's scaled gradients, which have this squared norm, can be used; adapts the scale.

        Raises:
            Fatal: they cannot, and a smaller scale would not help.
        """
        if math.isfinite(squared_norm):
            self._num_good += 1
            if self._is_on and self._num_good % GROWS_AFTER == 0:
                self.factor *= 2
            return True
        if self.factor <= 1.0:
            remedy = "a smaller optimizer.learning_rate" + (", or --dtype bf16" if self._is_on else "")
            raise Fatal(f"the gradient of step {step} is not finite: take {remedy}")
        self.factor, self._num_good = self.factor / 2, 0
        logger.info("step %d overflows float16 and is computed again: the loss scale is now %g", step, self.factor)
        return False
