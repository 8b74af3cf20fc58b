"""The optimizers that a configuration asks for, and Muon: steps along orthogonal matrices for the layers' weights.

Names and shapes alone decide which parameters Muon steps, so that the choice is the same under every cut of a model; a
tied embedding is an embedding at both of its stages.

To add another inner optimizer, write an `Optimizer` (optim.py, which also says what the same bits need), and give it a
name in config/optimizer.py and a case in `gradient_optimizer`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, assert_never

import torch

from swarm.config import OptimizerConfig, RunConfig
from swarm.machine.memory import Recycler
from swarm.training.elementwise import GPU_ELEMENTS
from swarm.training.optim import AdamW, Optimizer, OuterSgd, Parameters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7
"""All three are torch.optim.Muon's values, which are K. Jordan's (https://kellerjordan.github.io/posts/muon/)."""
BATCH_ELEMENTS = 1 << 28
"""How many elements the matrices have at most that are computed side by side, so that little memory is needed."""
EXACT_BITS = 53
"""A float64 holds every integer of this many bits exactly."""


def is_hidden_matrix(name: str, shape: torch.Size) -> bool:
    """Whether Muon steps a parameter, because it is a matrix of a layer or of an adapter there."""
    return name.startswith("layers.") and len(shape) == 2


class Cut(Protocol):
    """How parameters are cut over several processes. Each has a part of every parameter, and all call it alike."""

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Put a tensor together from the parts of all processes. Blocks until all of them call it."""

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...


class Muon(AdamW):
    """Muon, as torch.optim.Muon has it, for the matrices of layers, and AdamW for the other parameters.

    Momentum is M <- mu M + (1 - mu) G, and the step is along the orthogonal matrix that is nearest to M, or with
    Nesterov's momentum to (1 - mu) G + mu M; see `orthogonal`. Matrices decay as with AdamW.
    """

    steps_whole_matrices = True

    def __init__(
        self, config: OptimizerConfig, *, same_bits: bool, cut: Cut | None = None, fused: bool = False
    ) -> None:
        """
        Args:
            same_bits: whether other members take the same steps and must get the same bits. See `exactly_orthogonal`.
            cut: how this process's parts of the matrices become whole ones, and back; None where it has whole matrices.
            fused: whether to step in few launches, for a GPU: matrices of one shape are computed side by side.
        """
        super().__init__(config, fused=fused and not same_bits)
        self._same_bits, self._side_by_side = same_bits, fused
        self._cut = cut

    def state_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        return {"momentum_buffer": shape} if is_hidden_matrix(name, shape) else super().state_shapes(name, shape)

    def update(self, parameters: Parameters, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        hidden = {name: value for name, value in parameters.items() if is_hidden_matrix(name, value.shape)}
        super().update({name: value for name, value in parameters.items() if name not in hidden}, gradients, rate)
        for names in self._batches(hidden):
            for name in names:
                if name not in self.state and name not in self.packed:
                    self.put(name, hidden[name], "momentum_buffer", torch.zeros_like(hidden[name]))
            buffers = [
                self.packed[name]["momentum_buffer"].unpacked()
                if name in self.packed
                else self.state[name]["momentum_buffer"]
                for name in names
            ]
            directions = self._directions([gradients[name] for name in names], buffers)
            for name, buffer in zip(names, buffers, strict=True):
                if name in self.packed:
                    self.packed[name]["momentum_buffer"].pack(buffer)
            if self._cut is not None:
                directions = [self._cut.whole(*named) for named in zip(names, directions, strict=True)]
            stacked = torch.stack(list(directions))
            del directions  # They need as much memory again.
            compute = exactly_orthogonal if self._same_bits else orthogonal
            steps = list(compute(stacked).mul_(rate * self._adjustment(stacked.shape[1:])))
            if self._cut is not None:
                steps = [self._cut.part_of(*named) for named in zip(names, steps, strict=True)]
            matrices = [hidden[name].detach() for name in names]
            torch._foreach_mul_(matrices, 1.0 - rate * self._config.weight_decay)
            torch._foreach_sub_(matrices, steps)

    def _batches(self, hidden: Parameters) -> list[list[str]]:
        """The names of the matrices that are stepped side by side: one, or as many of a shape as there is room for."""
        if not self._side_by_side:
            return [[name] for name in hidden]
        alike: dict[torch.Size, list[str]] = {}
        for name, matrix in hidden.items():
            alike.setdefault(matrix.shape, []).append(name)
        batches = []
        for shape, names in alike.items():
            most_elements = GPU_ELEMENTS if self._same_bits else BATCH_ELEMENTS
            size = max(1, most_elements // shape.numel())
            batches += [names[start : start + size] for start in range(0, len(names), size)]
        return batches

    def _directions(self, gradients: list[torch.Tensor], buffers: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Update momenta, and return the matrices that are to be made orthogonal."""
        momentum = self._config.momentum
        changes = torch._foreach_sub(gradients, buffers)
        torch._foreach_mul_(changes, 1.0 - momentum)
        torch._foreach_add_(buffers, changes)
        if not self._config.nesterov:
            return buffers
        directions = torch._foreach_sub(buffers, gradients)
        torch._foreach_mul_(directions, momentum)
        torch._foreach_add_(directions, gradients)
        return directions

    def _adjustment(self, shape: torch.Size) -> float:
        rows, columns = shape
        match self._config.adjust_lr_fn:
            case "match_rms_adamw":
                return 0.2 * math.sqrt(max(rows, columns))
            case "original":
                return math.sqrt(max(1.0, rows / columns))
            case other:
                assert_never(other)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Approximate the orthogonal matrix nearest to each of several [N, rows, columns], in the same type; singular
    values become 0.7 to 1.2.

    These are five iterations of Newton and Schulz with the polynomial aX + b(XX')X + c(XX')^2 X, after a division by
    the Frobenius norm. A GPU computes in bfloat16, as torch.optim.Muon does, and is not waited for. A CPU computes in
    the matrices' own type.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if is_tall else matrices
    values = wide.to(matrices.dtype if matrices.device.type == "cpu" else torch.bfloat16)
    norms = torch.linalg.matrix_norm(values.to(matrices.dtype), keepdim=True).clamp(min=EPSILON)
    values = values / norms.to(values.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = values @ values.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        values = torch.baddbmm(values, polynomial, values, beta=a)
    return (values.mT if is_tall else values).to(matrices.dtype)


def exactly_orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """`orthogonal`, with the same bits on every machine.

    It computes in float64 from matrices of so few bits that no product is ever rounded. So neither the order in which a
    processor adds, nor a fused operation, nor how many matrices there are makes a difference. The device is waited for
    once.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    # Apple's GPUs have no float64.
    device = "cpu" if matrices.device.type == "mps" else matrices.device
    values = (matrices.mT if is_tall else matrices).to(device, torch.float64)
    # The norms are a tensor, because a GPU divides by a number of Python by a product with its rounded inverse.
    values = values / _exact_norms(values).clamp(min=EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = exact_product(values, values.mT)
        # Products and sums are separate operations here, because torch.baddbmm may round once where these round twice.
        polynomial = exact_product(gram, gram).mul_(c).add_(gram.mul_(b))
        values = exact_product(polynomial, values).add_(values.mul_(a))
    return (values.mT if is_tall else values).to(matrices.device, matrices.dtype)


def _exact_norms(matrices: torch.Tensor) -> torch.Tensor:
    """The Frobenius norms of float64 matrices [..., 1, 1], with the same bits on every machine."""
    values, units = _integers(matrices, matrices.shape[-1])
    rows = (values * values).sum(dim=-1)
    sums = map(math.fsum, rows.reshape(-1, rows.shape[-1]).tolist())
    roots = torch.tensor(list(map(math.sqrt, sums)), dtype=torch.float64)
    return roots.to(matrices.device).view(units.shape) * units


def exact_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of float64 matrices, which are first rounded to so few bits that every sum of products is exact.

    For sums of 4,097 to 8,192 products, 20 bits of a matrix's largest element are kept, and for 300 products 22 bits.
    """
    num_terms = left.shape[-1]
    (lefts, left_units), (rights, right_units) = _integers(left, num_terms), _integers(right, num_terms)
    return torch.matmul(lefts, rights).mul_(left_units * right_units)


def _integers(matrices: torch.Tensor, num_terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices as integers and their units [..., 1, 1], such that sums of `num_terms` products of two are exact."""
    bits = (EXACT_BITS - (num_terms - 1).bit_length()) // 2
    _, exponents = torch.frexp(matrices.abs().amax(dim=(-2, -1), keepdim=True))
    # Powers of two as IEEE 754 writes them, because a device may round those that it computes.
    units = ((exponents.long() + (1023 - bits)) << 52).view(torch.float64)
    return torch.div(matrices, units).round_(), units


def gradient_optimizer(config: RunConfig, *, same_bits: bool, cut: Cut | None = None, fused: bool = False) -> Optimizer:
    """The optimizer that steps along gradients: DiLoCo's inner one, or the only one of the synchronous setting.

    Args:
        same_bits: whether other members take the same steps and must get the same bits.
        cut: how parameters are cut over several processes; None where each process has them whole.
        fused: whether to step in few launches, for a GPU. With `same_bits` they have the bits of other steps.
    """
    step = config.gradient_step
    match step.name:
        case "adamw":
            return AdamW(step, fused=fused and not same_bits)
        case "muon":
            return Muon(step, same_bits=same_bits, cut=cut, fused=fused)
        case "auto":
            raise AssertionError("gradient_step has one of the other names")
        case other:
            assert_never(other)


def round_optimizer(config: RunConfig, outer_memory: Recycler | None = None, *, fused: bool = False) -> Optimizer:
    """The optimizer of the step at a round's end, which all members take. Its state is part of the stage's state. For
    `outer_memory` see OuterSgd, and for `fused` gradient_optimizer."""
    if config.rounds.synchronous:
        return gradient_optimizer(config, same_bits=True, fused=fused)
    return OuterSgd(config.outer_step, outer_memory)
