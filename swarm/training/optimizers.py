"""The optimizers that a configuration asks for, and Muon: steps along orthogonal matrices for the layers' weights.

Names and shapes alone decide which parameters Muon steps, so that the choice is the same under every cut of a model; a
tied embedding is an embedding at both of its stages.

To add another inner optimizer, write an `Optimizer` (optim.py, which also says what the same bits need), and give it a
name in config/optimizer.py and a case in `gradient_optimizer` and in `steps_whole_matrices`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, assert_never

import torch

from swarm.config import OptimizerConfig, RunConfig
from swarm.machine.memory import Recycler
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
        ...

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...


class Muon(AdamW):
    """Muon, as torch.optim.Muon has it, for the matrices of layers, and AdamW for the other parameters.

    Momentum is M <- mu M + (1 - mu) G, and the step is along the orthogonal matrix that is nearest to M, or with
    Nesterov's momentum to (1 - mu) G + mu M; see `orthogonal`. Matrices decay as with AdamW.
    """

    def __init__(
        self, config: OptimizerConfig, *, same_bits: bool, cut: Cut | None = None, fused: bool = False
    ) -> None:
        """
        Args:
            same_bits: whether other members take the same steps and must get the same bits. See `orthogonal`.
            cut: how this process's parts of the matrices become whole ones, and back; None where it has whole matrices.
            fused: whether matrices of one shape are computed side by side, and nothing is read back from the device.
        """
        assert not (fused and same_bits), "fused steps have other bits on each machine"
        super().__init__(config, fused=fused)
        self._same_bits = same_bits
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
            factor = rate * self._adjustment(directions[0].shape)
            if self._fused:
                steps = list(orthogonal_batch(torch.stack(list(directions))).mul_(factor))
            else:
                steps = [orthogonal(matrix, same_bits=self._same_bits).mul_(factor) for matrix in directions]
            if self._cut is not None:
                steps = [self._cut.part_of(*named) for named in zip(names, steps, strict=True)]
            matrices = [hidden[name].detach() for name in names]
            torch._foreach_mul_(matrices, 1.0 - rate * self._config.weight_decay)
            torch._foreach_sub_(matrices, steps)

    def _batches(self, hidden: Parameters) -> list[list[str]]:
        """The names of the matrices that are stepped side by side: one, or as many of a shape as there is room for."""
        if not self._fused:
            return [[name] for name in hidden]
        alike: dict[torch.Size, list[str]] = {}
        for name, matrix in hidden.items():
            alike.setdefault(matrix.shape, []).append(name)
        batches = []
        for shape, names in alike.items():
            size = max(1, BATCH_ELEMENTS // shape.numel())
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


def orthogonal(matrix: torch.Tensor, *, same_bits: bool) -> torch.Tensor:
    """Approximate the orthogonal matrix nearest to `matrix`, in the same type; singular values become 0.7 to 1.2.

    These are five iterations of Newton and Schulz with the polynomial aX + b(XX')X + c(XX')^2 X, after a division by
    the Frobenius norm.

    Args:
        same_bits: whether to compute in float64 from matrices of so few bits that no product is ever rounded. Then
            neither the order in which a processor adds nor a fused operation makes a difference, and all machines get
            the same bits. Otherwise a GPU computes in bfloat16, as torch.optim.Muon does, and a CPU in the matrix's
            own type.
    """
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    product, norm = (exact_product, _exact_norm) if same_bits else (torch.matmul, _norm)
    # Apple's GPUs have no float64.
    device = "cpu" if same_bits and matrix.device.type == "mps" else matrix.device
    values = wide.to(device, _computing_type(matrix, same_bits=same_bits))
    values = values / max(norm(values), EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = product(values, values.T)
        # Products and sums are separate operations here, because torch.addmm may round once where these round twice.
        polynomial = product(gram, gram).mul_(c).add_(gram.mul_(b))
        values = product(polynomial, values).add_(values.mul_(a))
    result = values.T if wide is not matrix else values
    return result.to(matrix.device, matrix.dtype)


def orthogonal_batch(matrices: torch.Tensor) -> torch.Tensor:
    """`orthogonal` for each of several matrices [N, rows, columns] at once, without a wait for the device."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if is_tall else matrices
    values = wide.to(_computing_type(matrices, same_bits=False))
    norms = torch.linalg.matrix_norm(values.to(matrices.dtype), keepdim=True).clamp(min=EPSILON)
    values = values / norms.to(values.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = values @ values.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        values = torch.baddbmm(values, polynomial, values, beta=a)
    return (values.mT if is_tall else values).to(matrices.dtype)


def _computing_type(matrix: torch.Tensor, *, same_bits: bool) -> torch.dtype:
    if same_bits:
        return torch.float64
    return matrix.dtype if matrix.device.type == "cpu" else torch.bfloat16


def _norm(matrix: torch.Tensor) -> float:
    return float(matrix.norm())


def _exact_norm(matrix: torch.Tensor) -> float:
    """The Frobenius norm of a float64 matrix, with the same bits on every machine."""
    values, unit = _integers(matrix, matrix.shape[1])
    return unit * math.sqrt(math.fsum((values * values).sum(dim=1).tolist()))


def exact_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of two float64 matrices, which are first rounded to so few bits that every sum of products is exact.

    For sums of 4,097 to 8,192 products, 20 bits of a matrix's largest element are kept, and for 300 products 22 bits.
    """
    num_terms = left.shape[1]
    (lefts, left_unit), (rights, right_unit) = _integers(left, num_terms), _integers(right, num_terms)
    return torch.matmul(lefts, rights).mul_(left_unit * right_unit)


def _integers(matrix: torch.Tensor, num_terms: int) -> tuple[torch.Tensor, float]:
    """A matrix as integers and their unit, such that sums of `num_terms` products of two of them are exact."""
    bits = (EXACT_BITS - (num_terms - 1).bit_length()) // 2
    _, exponent = math.frexp(float(matrix.abs().max()))
    unit = math.ldexp(1.0, exponent - bits)
    return torch.div(matrix, unit).round_(), unit


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


def round_optimizer(config: RunConfig, outer_memory: Recycler | None = None) -> Optimizer:
    """The optimizer of the step at a round's end, which all members take. Its state is part of the stage's state. For
    `outer_memory` see OuterSgd."""
    if config.rounds.synchronous:
        return gradient_optimizer(config, same_bits=True)
    return OuterSgd(config.outer_step, outer_memory)
