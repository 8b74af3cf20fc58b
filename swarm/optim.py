"""Optimizers and schedules: AdamW (inner, or the only one) and Nesterov SGD (DiLoCo's outer step).

Thin over the functions of torch.optim. Its classes are left alone: the first one that is made imports torch._dynamo,
which takes as long as torch itself. Used by stage/weights and by the single-process reference, so that both take the
same steps. Never decides when to step.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch.optim import adamw, sgd

from swarm.config import OptimizerConfig, OuterConfig

Parameters = Mapping[str, torch.Tensor]


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


class Optimizer(ABC):
    """Steps named parameters, and keeps what it remembers of each under its name."""

    def __init__(self) -> None:
        self.state: dict[str, dict[str, torch.Tensor]] = {}

    @abstractmethod
    def state_shapes(self, parameter: torch.Tensor) -> dict[str, torch.Size]:
        """What it remembers of a parameter once it has stepped, by key."""

    @abstractmethod
    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        """One step, in place."""


class AdamW(Optimizer):
    """Decays matrices only."""

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__()
        self._config = config

    def state_shapes(self, parameter: torch.Tensor) -> dict[str, torch.Size]:
        return {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}

    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        matrices = [name for name, parameter in parameters.items() if parameter.ndim >= 2]
        vectors = [name for name, parameter in parameters.items() if parameter.ndim < 2]
        for names, weight_decay in ((matrices, self._config.weight_decay), (vectors, 0.0)):
            states = [self._state_of(name, parameters[name]) for name in names]
            adamw.adamw(
                [parameters[name] for name in names],
                [gradients[name] for name in names],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                # One after the other: all at once takes a GPU as much memory again as a moment does.
                foreach=False, amsgrad=False, beta1=self._config.beta1, beta2=self._config.beta2, lr=rate,
                weight_decay=weight_decay, eps=self._config.epsilon, maximize=False,
            )  # fmt: skip

    def _state_of(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if name not in self.state:
            # The step counter stays on the CPU, where reading it waits for nothing.
            self.state[name] = {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }  # fmt: skip
        return self.state[name]


class OuterSgd(Optimizer):
    """DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum, no dampening."""

    def __init__(self, config: OuterConfig) -> None:
        super().__init__()
        self._momentum = config.momentum

    def state_shapes(self, parameter: torch.Tensor) -> dict[str, torch.Size]:
        return {"momentum_buffer": parameter.shape}

    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        names = list(parameters)
        buffers = [self.state.get(name, {}).get("momentum_buffer") for name in names]
        sgd.sgd(
            [parameters[name] for name in names],
            [gradients[name] for name in names],
            buffers,
            weight_decay=0.0, momentum=self._momentum, lr=rate, dampening=0.0, nesterov=self._momentum > 0,
            maximize=False,
        )  # fmt: skip
        # Of a first step's momentum a new buffer is made.
        self.state |= {
            name: {"momentum_buffer": buffer} for name, buffer in zip(names, buffers, strict=True) if buffer is not None
        }


@torch.no_grad()
def step(optimizer: Optimizer, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
    """One step with the given gradients and learning rate."""
    optimizer.update(parameters, gradients, rate)


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Sum of squares over all elements, accumulated in float64."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    # Read together: on a GPU each reading waits for all that was queued before it.
    return sum((norm**2 for norm in torch.stack(norms).tolist()), 0.0) if norms else 0.0


def clip_factor(total_squared_norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most `max_norm`; 0 means no limit."""
    norm = math.sqrt(total_squared_norm)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm


def state_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, torch.Tensor]:
    """The optimizer's state as named tensors (`NAME/exp_avg`, ...), references and not copies."""
    return {
        f"{name}/{key}": value for name in parameters for key, value in sorted(optimizer.state.get(name, {}).items())
    }


def load_state_tensors(optimizer: Optimizer, parameters: Parameters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the optimizer's state by what `state_tensors` gave, elsewhere or earlier."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        prefix = f"{name}/"
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            optimizer.state[name] = {
                key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                for key, value in state.items()
            }
