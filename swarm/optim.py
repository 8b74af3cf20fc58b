"""Optimizers and schedules: AdamW (inner, or the only one) and Nesterov SGD (DiLoCo's outer step).

Thin over torch.optim. Used by stage/weights and by the single-process reference, so that both take the same
steps. Never decides when to step.
"""

import math
from collections.abc import Iterable, Mapping

import torch

from swarm.config import OptimizerConfig, OuterConfig

Parameters = Mapping[str, torch.nn.Parameter]


def learning_rate(config: OptimizerConfig, run_samples: int) -> float:
    """The rate after `run_samples` samples of the whole run: linear warm-up, then the configured shape."""
    if run_samples < config.warmup_samples:
        return config.learning_rate * (run_samples + 1) / (config.warmup_samples + 1)
    since_warmup = run_samples - config.warmup_samples
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "cosine-restarts":
        progress = since_warmup % config.restart_samples / config.restart_samples
    else:
        progress = min(1.0, since_warmup / (config.total_samples - config.warmup_samples))
    height = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * height)


def build_adamw(parameters: Parameters, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over named parameters; weight decay on matrices only."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )


def build_outer_sgd(parameters: Parameters, config: OuterConfig) -> torch.optim.SGD:
    """DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum, no dampening."""
    return torch.optim.SGD(
        list(parameters.values()),
        lr=config.learning_rate,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
    )


def step(
    optimizer: torch.optim.Optimizer, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float
) -> None:
    """One step with the given gradients and learning rate; leaves no gradient behind."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Sum of squares over all elements, accumulated in float64."""
    return sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)


def clip_factor(total_squared_norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most `max_norm`; 0 means no limit."""
    norm = math.sqrt(total_squared_norm)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm


def state_tensors(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, torch.Tensor]:
    """The optimizer's state as named tensors (`NAME/exp_avg`, ...), references and not copies."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    }


def load_state_tensors(
    optimizer: torch.optim.Optimizer, parameters: Parameters, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Replace the optimizer's state by what `state_tensors` gave, elsewhere or earlier."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        prefix = f"{name}/"
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            # Adam's step counter stays where torch keeps it, on the CPU.
            optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                for key, value in state.items()
            }
