"""What the processes of the allreduce bench share: the values that they average, and the orders that they get.

An order is a file with a number in the process's folder, and names a method of the one that obeys; so is its answer.
Shapes: P parameters.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from scripts.benches.shared.common import all_there, write_json

SIDE = 1024  # Rows and columns of the matrices, as a small llama has them
READY_FILE = "ready.json"


def values(member: int, num_parameters: int) -> torch.Tensor:
    """One member's vector, shape (P,): standard normal, with the same values in every process."""
    return torch.randn(num_parameters, generator=torch.Generator().manual_seed(member))


def as_tensors(vector_P: torch.Tensor) -> list[torch.Tensor]:
    """A vector as a model would have it: views that are SIDE x SIDE matrices, and one view of the rest."""
    num_full = vector_P.numel() // (SIDE * SIDE) * SIDE * SIDE
    rest = vector_P[num_full:]
    return [*vector_P[:num_full].view(-1, SIDE, SIDE), *([rest] if rest.numel() else [])]


def exact_mean(members: Sequence[int], num_parameters: int) -> torch.Tensor:
    """The members' average in float64, shape (P,)."""
    sum_P = torch.zeros(num_parameters, dtype=torch.float64)
    for member in members:
        sum_P += values(member, num_parameters)
    return sum_P / len(members)


def distance(held: Sequence[torch.Tensor], mean_P: torch.Tensor) -> float:
    """Norm of the difference over the norm of the mean."""
    difference_P = torch.cat([tensor.flatten() for tensor in held]).double() - mean_P
    return float(torch.linalg.vector_norm(difference_P) / torch.linalg.vector_norm(mean_P))


def digest(held: Sequence[torch.Tensor]) -> str:
    sha256 = hashlib.sha256()
    for tensor in held:
        sha256.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def compare(held: Sequence[torch.Tensor], means: Mapping[str, Sequence[int]], num_parameters: int) -> dict[str, Any]:
    """Describe the tensors that a member holds: their digest, and their distance from the average of each set of
    members."""
    distances = {name: distance(held, exact_mean(members, num_parameters)) for name, members in means.items()}
    return {"digest": digest(held), "distances": distances}


class Obedient(Protocol):
    """One that averages when told to. The other orders are its own."""

    def held(self) -> Sequence[torch.Tensor]: ...


async def obey(folder: Path, averaging: Obedient, num_parameters: int) -> None:
    """Carry out one order after another, until killed. The answer to `compare` describes what is held then."""
    for number in itertools.count():
        (text,) = await all_there([folder / f"{number}.json"])
        order: dict[str, Any] = json.loads(text)
        name = order.pop("name")
        if name == "compare":
            reply = compare(averaging.held(), order["means"], num_parameters)
        else:
            reply = await getattr(averaging, name)(**order)
        write_json(folder / f"{number}.reply.json", reply or {})
