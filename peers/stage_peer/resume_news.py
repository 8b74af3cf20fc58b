"""What a stage peer says of a resumed run whose configuration is not the checkpoint's.

Used by server.py. What may differ, and is told here, swarm/checkpoint/changes decides.
"""

import logging

from swarm.checkpoint import changes
from swarm.config import RunConfig
from swarm.training.optim import learning_rate

logger = logging.getLogger(__name__)


def say_changes(checkpoint: RunConfig, run: RunConfig, *, round_number: int, run_samples: int) -> None:
    """Name every field that differs, with the old value and the new one, and what that makes of the learning rate.

    Args:
        checkpoint: the configuration that was written with the state.
        run: the one under which the state goes on, from `round_number`, which is after `run_samples` samples.
    """
    differing = changes.allowed(checkpoint, run)
    if not differing:
        return
    logger.warning("goes on at round %d with another configuration than the checkpoint's:", round_number)
    for name, (before, now) in differing.items():
        logger.warning("  %s: %r before, %r now", name, before, now)
    if any(name.startswith("optimizer.") for name in differing):
        rates = [learning_rate(config.optimizer, run_samples) for config in (checkpoint, run)]
        logger.warning("  the learning rate at %d samples: %.4g before, %.4g now", run_samples, *rates)
