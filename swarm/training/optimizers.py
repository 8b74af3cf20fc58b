"""Which optimizers a configuration means.

Used by stage/, which trains with them, by peers/stage_peer, which restores what they remember, and by the benches'
training in one process.
"""

from swarm.config import OptimizerConfig, RunConfig
from swarm.training.muon import Muon
from swarm.training.optim import AdamW, Optimizer, OuterSgd


def gradient_optimizer(config: OptimizerConfig, *, same_bits: bool) -> Optimizer:
    """What steps along gradients: DiLoCo's inner optimizer, and the only one of the synchronous setting.

    Args:
        same_bits: whether others take the same steps, and have to get the same bits.
    """
    return Muon(config, same_bits=same_bits) if config.name == "muon" else AdamW(config)


def round_optimizer(config: RunConfig) -> Optimizer:
    """What takes the step at a round's end; members of a stage take it alike, and its memory is part of their state."""
    if config.rounds.synchronous:
        return gradient_optimizer(config.optimizer, same_bits=True)
    return OuterSgd(config.outer_step)
