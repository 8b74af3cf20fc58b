"""The path router: it chooses the path of a sequence by the sequence's first 32 tokens (DiPaCo, arXiv 2403.10616).

    FOLDER/router.json           what its features are of: a tokenizer, and perhaps a model
    FOLDER/router.safetensors    its weights and biases

`swarm-model route` makes it. Of the paths it chooses the one with the largest of weights @ features + biases. The
nearest of k-means' centroids is found like that, and so is the likeliest class of a logistic regression. Shape
suffixes: N sequences, P paths, F features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarm.errors import IntegrityError
from swarm.machine import json_file, tensor_file

NUM_TOKENS = 32
"""How many tokens at the beginning of a sequence choose its path: as in the paper."""
ABOUT, WEIGHTS = "router.json", "router.safetensors"
Features = Callable[[Sequence[int]], Tensor]
"""Gives the features [F] of at most NUM_TOKENS tokens."""
_FORMAT = 1
_LOG2_HASHED = 9
_LONGEST_RUN = 3
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True, eq=False)
class PathRouter:
    """
    Attributes:
        weights_PF: float32.
        biases_P: float32.
        tokenizer: the identity of the tokenizer of the sequences.
        model: the place of the model whose hidden states are the features; empty if these are `hashed`.
        model_digest: that model's digest.
    """

    weights_PF: Tensor
    biases_P: Tensor
    tokenizer: str
    model: str = ""
    model_digest: str = ""

    @property
    def num_paths(self) -> int:
        return len(self.biases_P)

    def scores(self, features_NF: Tensor) -> Tensor:
        """[N, P]: the path with the largest score is taken."""
        return features_NF.float() @ self.weights_PF.T + self.biases_P

    def choose(self, tokens: Sequence[int], features: Features) -> int:
        """The path of a sequence that begins with these tokens."""
        return int(self.scores(features(tokens[:NUM_TOKENS])[None]).argmax())

    def require(self, num_paths: int, tokenizer: str) -> None:
        """Raise ValueError if this is the router of a run with other paths or another tokenizer."""
        if num_paths != self.num_paths:
            raise ValueError(f"the router chooses among {self.num_paths} paths, and the run has {num_paths}")
        if tokenizer != self.tokenizer:
            raise ValueError(
                f"the router was made with another tokenizer ({self.tokenizer[:12]}) than the run's ({tokenizer[:12]})"
            )

    def write(self, folder: Path) -> None:
        """Write its two files. Blocks. Raises OSError."""
        about = {"format": _FORMAT, "tokenizer": self.tokenizer, "model": self.model, "digest": self.model_digest}
        json_file.write_object(folder / ABOUT, about)
        tensor_file.write(folder / WEIGHTS, {"weights": self.weights_PF, "biases": self.biases_P})


def path_names(num_paths: int, ending: str = "") -> list[str]:
    """The names of files or folders of a run's paths: path-00, path-01, ..."""
    digits = max(2, len(str(num_paths - 1)))
    return [f"path-{path:0{digits}}{ending}" for path in range(num_paths)]


def read(folder: Path) -> PathRouter:
    """Read a router from its folder. Blocks. Raises ValueError if there is none, and IntegrityError if it is damaged or
    of a later release."""
    if not (folder / ABOUT).is_file():
        raise ValueError(f"{folder} has no {ABOUT}: swarm-model route makes one")
    about = json_file.read_object(folder / ABOUT)
    if about.get("format") != _FORMAT:
        raise IntegrityError(f"{folder / ABOUT} is of another release, or damaged")
    with tensor_file.opened(folder / WEIGHTS, IntegrityError) as file:
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 - it is no dict
    weights, biases = tensors.get("weights", torch.zeros(0)), tensors.get("biases", torch.zeros(0))
    is_sound = weights.ndim == 2 and biases.shape == weights.shape[:1] and len(biases) > 0
    if not (is_sound and weights.isfinite().all() and biases.isfinite().all()):
        raise IntegrityError(f"{folder / WEIGHTS} is no router")
    tokenizer, model, digest = (str(about.get(name, "")) for name in ("tokenizer", "model", "digest"))
    return PathRouter(weights_PF=weights, biases_P=biases, tokenizer=tokenizer, model=model, model_digest=digest)


def hashed(tokens: Sequence[int]) -> Tensor:
    """Features of a sequence's first tokens, without a model: how often runs of one to three tokens occur, counted by a
    hash of these. [F], of unit length."""
    counts_F = np.zeros(1 << _LOG2_HASHED, dtype=np.float32)
    numbers = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    runs: npt.NDArray[np.uint64] = np.zeros(len(numbers) + 1, dtype=np.uint64)
    for length in range(1, min(_LONGEST_RUN, len(numbers)) + 1):
        # A run is the run before it, which is one token shorter, and its last token.
        runs = (runs[:-1] + numbers[length - 1 :]) * _GOLDEN
        runs ^= runs >> np.uint64(29)
        np.add.at(counts_F, (runs * _GOLDEN) >> np.uint64(64 - _LOG2_HASHED), 1.0)
    return torch.nn.functional.normalize(torch.from_numpy(counts_F).sqrt(), dim=0)
