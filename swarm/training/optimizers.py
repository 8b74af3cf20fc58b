"""Chooses the optimizers that a configuration asks for.

Used by stage/ and peers/static, which train with them, by peers/stage_peer, which restores their state, and by the
benches' training in one process.
"""

from typing import assert_never

from swarm.config import RunConfig
from swarm.training.muon import Cut, Muon
from swarm.training.optim import AdamW, Optimizer, OuterSgd


def gradient_optimizer(config: RunConfig, *, same_bits: bool, cut: Cut | None = None, fused: bool = False) -> Optimizer:
    """The optimizer that steps along gradients: DiLoCo's inner one, or the only one of the synchronous setting.

    Args:
        same_bits: whether other members take the same steps and must get the same bits.
        cut: how parameters are cut over several processes; None where each process has them whole.
        fused: whether to step in few launches, for a GPU. Such steps have other bits on each machine, so it counts only
            where `same_bits` is False.
    """
    fused = fused and not same_bits
    step = config.gradient_step
    match step.name:
        case "adamw":
            return AdamW(step, fused=fused)
        case "muon":
            return Muon(step, same_bits=same_bits, cut=cut, fused=fused)
        case "auto":
            raise AssertionError("gradient_step has one of the other names")
        case other:
            assert_never(other)


def steps_whole_matrices(config: RunConfig) -> bool:
    """Whether that optimizer needs the whole of a matrix that is cut over several processes."""
    match config.gradient_step.name:
        case "adamw":
            return False
        case "muon":
            return True
        case "auto":
            raise AssertionError("gradient_step has one of the other names")
        case other:
            assert_never(other)


def round_optimizer(config: RunConfig) -> Optimizer:
    """The optimizer of the step at a round's end, which all members take. Its state is part of the stage's state."""
    if config.rounds.synchronous:
        return gradient_optimizer(config, same_bits=True)
    return OuterSgd(config.outer_step)
