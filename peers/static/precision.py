"""In which type matrix products are computed, and the scale of losses that float16 needs. Used by the loop."""

import contextlib
import logging
import math
from contextlib import AbstractContextManager

import torch

logger = logging.getLogger(__name__)

FIRST_SCALE, GROWS_AFTER = 2.0**16, 2000
"""The scale at first, and the steps after which twice the scale is tried, as torch.amp.GradScaler has them."""


def computing_in(dtype: str | None, device: torch.device) -> AbstractContextManager[object]:
    """A context for forwards: float16 where that is asked for; else the model computes as its configuration says."""
    return torch.autocast(device.type, torch.float16) if dtype == "fp16" else contextlib.nullcontext()


class LossScale:
    """What losses are multiplied by, so that their gradients do not vanish in float16, nor overflow.

    A step whose gradients are not finite is left out, and the scale is halved (Micikevicius et al., arXiv 1710.03740).
    """

    def __init__(self, dtype: str | None) -> None:
        self._is_on = dtype == "fp16"
        self.factor = FIRST_SCALE if self._is_on else 1.0
        self._num_good = 0

    def accepts(self, squared_norm: float) -> bool:
        """Whether gradients of this squared norm can be used; learns from it. Without float16 all can."""
        if not self._is_on:
            return True
        if not math.isfinite(squared_norm):
            self.factor, self._num_good = self.factor / 2, 0
            logger.info("a step overflowed float16 and is left out: the loss scale is now %g", self.factor)
            return False
        self._num_good += 1
        if self._num_good % GROWS_AFTER == 0:
            self.factor *= 2
        return True
