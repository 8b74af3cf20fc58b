"""Optimizers and schedules: AdamW (inner, or the only one) and Nesterov SGD (DiLoCo's outer step); muon.py has Muon.

The same inputs must give the same bits on every machine, whatever its processor, its GPU or its release of torch,
because members of a stage compare digests of the state after their outer steps, and replay each other's rounds.
torch.optim does not promise that, since it fuses products with sums if the processor can. Here a step consists of sums,
differences, products, quotients and square roots of float32 numbers, each an operation of its own in a fixed order, and
IEEE 754 says how each of them is rounded. Factors are computed in float64 by the same operations, because powers and
cosines of a C library may differ in the last bit.

Used by stage/weights and by the benches' training in one process, so that both take the same steps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from swarm.config import OptimizerConfig, OuterConfig

Parameters = Mapping[str, torch.Tensor]

CACHED_ELEMENTS = 1 << 16
"""How many elements each thread steps at once, so that the result of one operation is in cache for the next."""
GPU_ELEMENTS = 1 << 24
"""How many elements are stepped at once on a GPU, where fewer and larger operations are faster."""
COSINE_TERMS = 14
"""How many terms of the cosine's series are summed. Those after them add less than 1e-23 up to a quarter turn."""


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
    if config.schedule == "linear":
        height = 1.0 - progress
    else:
        # The square is (1 + cos(pi * progress)) / 2, and never below 0.
        cosine = _cosine(0.5 * math.pi * progress)
        height = cosine * cosine
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * height)


class Optimizer(ABC):
    """Steps named parameters, and keeps its state for each under the parameter's name."""

    def __init__(self) -> None:
        self.state: dict[str, dict[str, torch.Tensor]] = {}

    @abstractmethod
    def state_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        """By key: the shapes of the state that the optimizer has for such a parameter after the first step."""

    @abstractmethod
    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        """Take one step, in place."""


class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101). Only matrices decay."""

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__()
        self._config = config

    def state_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        return {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}

    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        beta1, beta2, epsilon = self._config.beta1, self._config.beta2, self._config.epsilon
        for name, parameter in parameters.items():
            state = self._state_of(name, parameter)
            num_steps = int(state["step"].add_(1.0))
            size = rate / (1.0 - _power(beta1, num_steps))
            unbiased = 1.0 / math.sqrt(1.0 - _power(beta2, num_steps))
            decay = 1.0 - rate * self._config.weight_decay if parameter.ndim >= 2 else 1.0
            tensors = parameter, gradients[name], state["exp_avg"], state["exp_avg_sq"]
            for (weights, gradient, first, second), scratch in _pieces(*tensors):
                # m <- m + (1 - beta1) (g - m)
                first.add_(torch.sub(gradient, first, out=scratch).mul_(1.0 - beta1))
                # v <- beta2 v + (1 - beta2) g^2
                second.mul_(beta2).add_(torch.mul(gradient, gradient, out=scratch).mul_(1.0 - beta2))
                # p <- decay p - size m / (sqrt(v) unbiased + epsilon)
                _sqrt(second, out=scratch).mul_(unbiased).add_(epsilon)
                weights.mul_(decay).sub_(torch.div(first, scratch, out=scratch).mul_(size))

    def _state_of(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if name not in self.state:
            # The step counter stays on the CPU, where reading it waits for nothing.
            self.state[name] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[name]


class OuterSgd(Optimizer):
    """DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum, no dampening."""

    def __init__(self, config: OuterConfig) -> None:
        super().__init__()
        assert config.momentum >= 0, "what was left out is filled in"
        self._momentum = config.momentum

    def state_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        return {"momentum_buffer": shape}

    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        for name, parameter in parameters.items():
            if self._momentum == 0.0:
                # Without momentum there is no state.
                for (weights, gradient), scratch in _pieces(parameter, gradients[name]):
                    weights.sub_(torch.mul(gradient, rate, out=scratch))
                continue
            if name not in self.state:
                self.state[name] = {"momentum_buffer": torch.zeros_like(parameter)}
            tensors = parameter, gradients[name], self.state[name]["momentum_buffer"]
            for (weights, gradient, velocity), scratch in _pieces(*tensors):
                # v <- mu v + g
                velocity.mul_(self._momentum).add_(gradient)
                # p <- p - rate (mu v + g)
                weights.sub_(torch.mul(velocity, self._momentum, out=scratch).add_(gradient).mul_(rate))


@torch.no_grad()
def step(optimizer: Optimizer, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
    """Take one step with the given gradients and learning rate."""
    optimizer.update(parameters, gradients, rate)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Cut tensors of one shape into groups of rows: views of each group, and scratch memory of the same shape."""
    rows = [tensor if tensor.ndim else tensor.view(1) for tensor in tensors]
    on_cpu = tensors[0].device.type == "cpu"
    num_elements = CACHED_ELEMENTS * torch.get_num_threads() if on_cpu else GPU_ELEMENTS
    num_rows = max(1, num_elements // max(1, rows[0][:1].numel()))
    scratch = torch.empty_like(rows[0][:num_rows], requires_grad=False)
    for piece in zip(*(torch.split(tensor, num_rows) for tensor in rows), strict=True):
        yield piece, scratch[: len(piece[0])]


def _sqrt(tensor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Square roots, correctly rounded. On a CPU torch's own come from MKL, whose last bit depends on the processor."""
    if tensor.device.type != "cpu":
        return torch.sqrt(tensor, out=out)
    np.sqrt(tensor.numpy(), out=out.numpy())
    return out


def _power(base: float, exponent: int) -> float:
    """Compute a power by repeated squaring."""
    power = 1.0
    while exponent:
        if exponent % 2:
            power *= base
        base, exponent = base * base, exponent // 2
    return power


def _cosine(angle: float) -> float:
    """Compute the cosine of an angle up to a quarter turn, by its series."""
    total = term = 1.0
    for number in range(1, COSINE_TERMS):
        term *= -angle * angle / ((2 * number - 1) * (2 * number))
        total += term
    return total


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """The sum of squares over all elements, in float64; within a tensor on MPS in float32, the widest type there."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.device.type == "mps" else torch.float64)
        for tensor in tensors
    ]
    # All norms are read at once, because on a GPU each read waits for everything that was queued before it.
    return sum((norm**2 for norm in torch.stack(norms).tolist()), 0.0) if norms else 0.0


def clip_factor(total_squared_norm: float, max_norm: float) -> float:
    """The factor, at most 1, that brings the gradients' norm down to `max_norm`. A `max_norm` of 0 means no limit."""
    norm = math.sqrt(total_squared_norm)
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm


def state_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, torch.Tensor]:
    """The optimizer's state as named tensors (`NAME/exp_avg`, ...), which are not copied."""
    return {
        f"{name}/{key}": value for name in parameters for key, value in sorted(optimizer.state.get(name, {}).items())
    }


def load_state_tensors(optimizer: Optimizer, parameters: Parameters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the optimizer's state by copies of tensors that `state_tensors` returned earlier or elsewhere."""
    optimizer.state.clear()
    for name, parameter in parameters.items():
        prefix = f"{name}/"
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            optimizer.state[name] = {
                key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                for key, value in state.items()
            }
