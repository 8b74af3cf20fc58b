"""The state of a stage at the beginning of a round, in the form for others: its tensors' names, its digest, and a check
of its values.

A state is named tensors: `anchor/NAME` for each parameter, and `outer/NAME/KEY` for what the optimizer that ends rounds
remembers of the parameter.
"""

from collections.abc import Mapping
from functools import partial

import torch
from blake3 import blake3

from swarm.errors import IntegrityError
from swarm.stage.staging import HostReader
from swarm.training import optim

LARGEST_WEIGHT = 1e15
"""No weight and no moment of an honest peer is larger: contributions to an average are bounded by it as well."""


def named(anchor: Mapping[str, torch.Tensor], remembered: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Make a state from an anchor and an optimizer's state, in the order of the names. The tensors are not copied."""
    makers = {f"anchor/{name}": partial(anchor.__getitem__, name) for name in anchor}
    makers |= {f"outer/{key}": partial(remembered.__getitem__, key) for key in remembered}
    return optim.Views(dict(sorted(makers.items())))


def parts(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    anchor = {name.removeprefix("anchor/"): t for name, t in tensors.items() if name.startswith("anchor/")}
    remembered = {name.removeprefix("outer/"): t for name, t in tensors.items() if name.startswith("outer/")}
    return anchor, remembered


def check(
    tensors: Mapping[str, torch.Tensor], digest: str, *, masters: Mapping[str, torch.Tensor],
    optimizer: optim.Optimizer, round_number: int,
) -> None:  # fmt: skip
    """Raise IntegrityError unless `tensors` are a whole and possible state of a stage, with that digest.

    The names, shapes and types must be those of the stage's parameters and of its optimizer's state. All numbers must
    be finite and at most LARGEST_WEIGHT, and no optimizer may have taken more steps than there were rounds.
    """
    shapes = dict[str, torch.Size]()
    for name, master in masters.items():
        shapes[f"anchor/{name}"] = master.shape
        of_parameter = optimizer.state_shapes(name, master.shape)
        remembered = {f"outer/{name}/{key}": shape for key, shape in of_parameter.items()}
        if not tensors.keys().isdisjoint(remembered):
            shapes |= remembered
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise IntegrityError("the state is of another model or stage")
    for name, tensor in tensors.items():
        low, high = _bounds(name, round_number)
        least, largest = map(float, torch.aminmax(tensor)) if tensor.numel() else (low, high)
        if tensor.dtype is not torch.float32 or not low <= least <= largest <= high:
            raise IntegrityError(
                f"{name} of the state is not of numbers between {low:g} and {high:g} in float32, but of "
                f"{least:g} to {largest:g} in {str(tensor.dtype).removeprefix('torch.')}"
            )
    if digest_of(tensors) != digest:
        raise IntegrityError("the state does not match its digest")


def _bounds(name: str, round_number: int) -> tuple[float, float]:
    """The bounds between which the numbers of a state's tensor lie; NaN lies between none."""
    # A parameter's name has no slash, but it may equal a key, which stands behind the second slash.
    match name.split("/"):
        case ["outer", _, "step"]:
            return 0.0, round_number
        case ["outer", _, "exp_avg_sq"]:
            return 0.0, LARGEST_WEIGHT**2
    return -LARGEST_WEIGHT, LARGEST_WEIGHT


def digest_of(tensors: Mapping[str, torch.Tensor], reader: HostReader | None = None) -> str:
    """BLAKE3 over a state's names and values, in hexadecimal, with as many threads as torch computes with.

    It is taken at every round's end, and SHA-256 took two and a half times as long, on a processor that has
    instructions for it. `reader` brings tensors from a device to the CPU; None if all are on the CPU.
    """
    digest = StateDigest(reader or HostReader())
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.hexdigest


class StateDigest:
    """That digest, of tensors that are given one by one in the order of their names."""

    def __init__(self, reader: HostReader) -> None:
        self._reader = reader
        self._digest = blake3(max_threads=torch.get_num_threads())

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add the next tensor. Blocks."""
        self._digest.update(name.encode())
        for piece in self._reader.pieces(value):
            self._digest.update(piece.view(torch.uint8).numpy().data)

    @property
    def hexdigest(self) -> str:
        return self._digest.hexdigest()
