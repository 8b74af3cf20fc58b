"""The arithmetic of optimizers' steps, element by element, in operations of which each is rounded by itself.

Each function is a Work of pieces.py: it is called with the functions of `xp`, with scratch memory, and with pieces of
the weights, of their gradient and of what the optimizer remembers, to which it writes.
"""

from typing import Any

from swarm.training.blockwise import SIGNED, UNSIGNED
from swarm.training.pieces import Work


def adamw(
    xp: Any,
    scratch: Any,
    weights: Any,
    gradient: Any,
    first: Any,
    second: Any,
    *,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
    size: float,
    unbiased: float,
) -> None:
    # m <- m + (1 - beta1) (g - m)
    xp.subtract(gradient, first, out=scratch)
    xp.multiply(scratch, 1.0 - betas[0], out=scratch)
    xp.add(first, scratch, out=first)
    # v <- beta2 v + (1 - beta2) g^2
    xp.multiply(gradient, gradient, out=scratch)
    xp.multiply(scratch, 1.0 - betas[1], out=scratch)
    xp.multiply(second, betas[1], out=second)
    xp.add(second, scratch, out=second)
    # p <- decay p - size m / (sqrt(v) unbiased + epsilon)
    xp.sqrt(second, out=scratch)
    xp.multiply(scratch, unbiased, out=scratch)
    xp.add(scratch, epsilon, out=scratch)
    xp.divide(first, scratch, out=scratch)
    xp.multiply(scratch, size, out=scratch)
    xp.multiply(weights, decay, out=weights)
    xp.subtract(weights, scratch, out=weights)


def packed(
    xp: Any, scratch: Any, weights: Any, gradient: Any,
    first: Any, first_scales: Any, second: Any, second_scales: Any, *, step: Work,
) -> None:  # fmt: skip
    """Take a step with moments that are held as codes and scales."""
    moments = SIGNED.decode(first, first_scales), UNSIGNED.decode(second, second_scales)
    step(xp, scratch, weights, gradient, *moments)
    SIGNED.encode(moments[0], first, first_scales)
    UNSIGNED.encode(moments[1], second, second_scales)


def nesterov(
    xp: Any, scratch: Any, weights: Any, gradient: Any, velocity: Any, *, momentum: float, rate: float
) -> None:
    # v <- mu v + g
    xp.multiply(velocity, momentum, out=velocity)
    xp.add(velocity, gradient, out=velocity)
    # p <- p - rate (mu v + g)
    xp.multiply(velocity, momentum, out=scratch)
    xp.add(scratch, gradient, out=scratch)
    sgd(xp, scratch, weights, scratch, rate=rate)


def sgd(xp: Any, scratch: Any, weights: Any, gradient: Any, *, rate: float) -> None:
    xp.multiply(gradient, rate, out=scratch)
    xp.subtract(weights, scratch, out=weights)
