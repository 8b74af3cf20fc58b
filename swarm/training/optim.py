"""Optimizers: AdamW (inner, or the only one) and Nesterov SGD (DiLoCo's outer step); not Muon.

The same inputs must give the same bits on every machine, whatever its processor, its GPU or its release of torch,
because members of a stage compare digests of the state after their outer steps, and apply rounds that they missed.
torch.optim does not promise that, since it fuses products with sums if the processor can. Here a step consists of sums,
differences, products, quotients and square roots of float32 numbers, each an operation of its own in a fixed order, and
IEEE 754 says how each of them is rounded. Factors are computed in float64 by the same operations, because powers of a
C library may differ in the last bit.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from swarm.config import OptimizerConfig, OuterConfig
from swarm.machine.memory import Recycler
from swarm.training.blockwise import SIGNED, UNSIGNED, Packed, rows_of, step_packed
from swarm.training.elementwise import Work, adamw, nesterov, sgd, treat, treat_rows

Parameters = Mapping[str, torch.Tensor]

PACKED_ELEMENTS = 4096
"""Matrices with fewer elements keep their moments in float32, as in the paper's code: they take no memory."""


class Optimizer(ABC):
    """Steps named parameters, and keeps its state for each under the parameter's name."""

    steps_whole_matrices = False
    """Whether it needs the whole of a matrix that is cut over several processes."""

    def __init__(self) -> None:
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.packed: dict[str, dict[str, Packed]] = {}
        """The part of the state that is held in 8 bits."""

    def take_over(self, other: "Optimizer") -> None:
        self.state, self.packed = other.state, other.packed

    @abstractmethod
    def state_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        """By key: the shapes of the state that the optimizer has for such a parameter after the first step."""

    @abstractmethod
    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        """Take one step, in place."""

    def packs(self, shape: torch.Size) -> bool:
        """Whether what is remembered of such a parameter is held in 8 bits."""
        return False

    def num_bytes(self, name: str, shape: torch.Size) -> int:
        """The bytes of that state, without counters."""
        size = Packed.num_bytes(shape.numel()) if self.packs(shape) else 4 * shape.numel()
        return size * sum(each == shape for each in self.state_shapes(name, shape).values())

    def put(self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        """Replace a part of the state by a copy of `value`, or by `value` in 8 bits."""
        if key == "step":
            self.state.setdefault(name, {})[key] = value.clone()
        elif self.packs(parameter.shape):
            self._packed_zeros(name, parameter, key).pack(value.to(parameter.device))
        else:
            self.state.setdefault(name, {})[key] = value.to(parameter.device, copy=True)

    def _packed_zeros(self, name: str, parameter: torch.Tensor, key: str) -> Packed:
        table = UNSIGNED if key == "exp_avg_sq" else SIGNED
        zeros = self.packed.setdefault(name, {})[key] = Packed(table, parameter.shape, parameter.device)
        return zeros


class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101). Only matrices decay."""

    def __init__(self, config: OptimizerConfig, *, fused: bool = False) -> None:
        """`fused` says whether to take torch's own fused steps: two launches on a GPU, but other bits on each
        machine."""
        super().__init__()
        self._config = config
        self._fused = fused

    def state_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        return {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}

    def packs(self, shape: torch.Size) -> bool:
        return self._config.moments == "int8" and len(shape) > 1 and shape.numel() >= PACKED_ELEMENTS

    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        whole = {name: parameter for name, parameter in parameters.items() if not self.packs(parameter.shape)}
        if self._fused:
            self._take_fused_steps(whole, gradients, rate)
        else:
            self._take_steps(whole, gradients, rate)
        for name, parameter in parameters.items():
            if name not in whole:
                self._take_packed_step(name, parameter, gradients[name], rate)

    def _take_steps(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        groups: dict[tuple[bool, int], list[list[torch.Tensor]]] = {}
        for name, parameter in parameters.items():
            state = self._state_of(name, parameter)
            kind = parameter.ndim >= 2, int(state["step"].add_(1.0))
            groups.setdefault(kind, []).append([parameter, gradients[name], state["exp_avg"], state["exp_avg_sq"]])
        for (decays, num_steps), group in groups.items():
            _treat(self._work(rate, num_steps, decays=decays), group)

    def _work(self, rate: float, num_steps: int, *, decays: bool) -> Work:
        config = self._config
        return partial(
            adamw, betas=(config.beta1, config.beta2), epsilon=config.epsilon,
            decay=1.0 - rate * config.weight_decay if decays else 1.0,
            size=rate / (1.0 - _power(config.beta1, num_steps)),
            unbiased=1.0 / math.sqrt(1.0 - _power(config.beta2, num_steps)),
        )  # fmt: skip

    def _take_fused_steps(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        for decays in (True, False):
            names = [name for name, parameter in parameters.items() if (parameter.ndim >= 2) == decays]
            if not names:
                continue
            states = [self._state_of(name, parameters[name]) for name in names]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1.0)
            moments = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
            weights = [parameters[name].detach() for name in names]
            self._take_fused_step(
                weights, [gradients[name] for name in names], *moments, steps, rate=rate, decays=decays
            )

    def _take_fused_step(self, *columns: list[torch.Tensor], rate: float, decays: bool) -> None:
        """Take a step in one launch. The columns: weights, gradients, first and second moments, and step counters."""
        config = self._config
        weights, gradients, first, second, counters = columns
        torch._fused_adamw_(
            weights, gradients, first, second, [], counters, lr=rate, beta1=config.beta1, beta2=config.beta2,
            weight_decay=config.weight_decay if decays else 0.0, eps=config.epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip

    def _take_packed_step(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Step one matrix, with a piece of its moments in float32 at a time."""
        counter = self._state_of(name, parameter)["step"].add_(1.0)
        if self._fused:

            def step(_xp: Any, _scratch: Any, *columns: Any) -> None:
                tensors = [[torch.as_tensor(column)] for column in columns]
                self._take_fused_step(*tensors, [counter], rate=rate, decays=True)
        else:
            step = self._work(rate, int(counter), decays=True)
        moments = self.packed[name]
        for weights, gradients, first, second in zip(
            rows_of(parameter.detach().view(-1)), rows_of(gradient.reshape(-1)), moments["exp_avg"].rows(),
            moments["exp_avg_sq"].rows(), strict=True,
        ):  # fmt: skip
            treat_rows(partial(step_packed, step=step), [weights, gradients, *first, *second])

    def _state_of(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        # A step counter is on the CPU, where reading it waits for nothing; fused steps read it on the device.
        device = parameter.device if self._fused else torch.device("cpu")
        if name not in self.state:
            self.state[name] = {"step": torch.tensor(0.0, device=device)}
            for key in ("exp_avg", "exp_avg_sq"):
                if self.packs(parameter.shape):
                    self._packed_zeros(name, parameter, key)
                else:
                    self.state[name][key] = torch.zeros_like(parameter)
        state = self.state[name]
        if state["step"].device != device:
            # A checkpoint's counters arrive on the CPU.
            state["step"] = state["step"].to(device)
        return state


class OuterSgd(Optimizer):
    """DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov momentum, no dampening."""

    def __init__(self, config: OuterConfig, memory: Recycler | None = None) -> None:
        """`memory` gives the memory for momentum, where that is on the CPU; None takes RAM."""
        super().__init__()
        self._memory = memory
        assert config.momentum >= 0, "what was left out is filled in"
        self._momentum = config.momentum

    def state_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        return {"momentum_buffer": shape}

    def put(self, name: str, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        if self._memory is None:
            super().put(name, parameter, key, value)
        else:
            self.state[name] = self._memory.copies({key: value.to(parameter.device)})

    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        if self._momentum == 0.0:
            # Without momentum there is no state.
            _treat(partial(sgd, rate=rate), [[value, gradients[name]] for name, value in parameters.items()])
            return
        group = []
        for name, parameter in parameters.items():
            if name not in self.state:
                self.put(name, parameter, "momentum_buffer", torch.zeros_like(parameter))
            group.append([parameter, gradients[name], self.state[name]["momentum_buffer"]])
        _treat(partial(nesterov, momentum=self._momentum, rate=rate), group)


@torch.no_grad()
def step(optimizer: Optimizer, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
    optimizer.update(parameters, gradients, rate)


def _treat(work: Work, groups: list[list[torch.Tensor]]) -> None:
    treat(work, groups, together=bool(groups) and groups[0][0].device.type != "cpu")


def _power(base: float, exponent: int) -> float:
    power = 1.0
    while exponent:
        if exponent % 2:
            power *= base
        base, exponent = base * base, exponent // 2
    return power


class Views(Mapping[str, torch.Tensor]):
    """Tensors by name, each made when it is asked for: what is held in 8 bits is never all there at once."""

    def __init__(self, makers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._makers[name]().detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def state_views(optimizer: Optimizer, parameters: Parameters) -> Views:
    """The optimizer's state by `NAME/KEY` (`NAME/exp_avg`, ...). Float32 tensors are not copied, and what is held in 8
    bits comes in float32, on the CPU."""
    makers = dict[str, Callable[[], torch.Tensor]]()
    for name in parameters:
        kept, packed = optimizer.state.get(name, {}), optimizer.packed.get(name, {})
        for key in sorted(kept.keys() | packed.keys()):
            is_packed = key in packed
            makers[f"{name}/{key}"] = (
                partial(packed[key].unpacked, torch.device("cpu")) if is_packed else partial(kept.__getitem__, key)
            )
    return Views(makers)


def state_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, torch.Tensor]:
    return dict(state_views(optimizer, parameters))


def load_state_tensors(optimizer: Optimizer, parameters: Parameters, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the optimizer's state by copies of tensors that `state_tensors` returned earlier or elsewhere."""
    optimizer.state.clear()
    optimizer.packed.clear()
    for name, parameter in parameters.items():
        prefix = f"{name}/"
        for key, value in tensors.items():
            if key.startswith(prefix):
                optimizer.put(name, parameter, key.removeprefix(prefix), value)
