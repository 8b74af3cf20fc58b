"""The path router: it chooses the path of a sequence by the sequence's first 32 tokens (DiPaCo, arXiv 2403.10616).

    FOLDER/router.json           what its features are of: a tokenizer, and perhaps a model
    FOLDER/router.safetensors    its weights and biases

`swarm-model route` makes it, and cuts a dataset into shards of nearly equal size, one for each path. Of the paths it
chooses the one with the largest of weights @ features + biases, as a logistic regression does: it is fitted to find by
a sequence's first tokens in which cluster all of its text is, or which path has the least loss on it. Shape suffixes: N
sequences, P paths, F features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from swarm.data.sources import Source, Text
from swarm.errors import IntegrityError
from swarm.machine import json_file, tensor_file

NUM_TOKENS = 32
"""How many tokens at the beginning of a sequence choose its path: as in the paper."""
ABOUT, WEIGHTS = "router.json", "router.safetensors"
Features = Callable[[Sequence[int]], Tensor]
"""Gives the features [F] of a sequence's first tokens, or of all of them."""
_FORMAT = 1
_LOG2_HASHED = 11
_LONGEST_RUN = 3
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NUM_STARTS = 4
_NUM_EVENED = 10
_NUM_NUDGES = 500
_INVERSE_REGULARIZATION = 10.0

Linear = tuple[Tensor, Tensor]
"""Weights [P, F] and biases [P] of a path router."""


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

    def hashed(self, tokens: Sequence[int]) -> Tensor:
        """The features [F] of tokens without a model, as many as it has weights for: routers of before have fewer."""
        return hashed(tokens, log2_features=self.weights_PF.shape[1].bit_length() - 1)

    def choose(self, tokens: Sequence[int], features: Features) -> int:
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
    tokenizer, model, digest = (str(about.get(name, "")) for name in ("tokenizer", "model", "digest"))
    is_sound = weights.ndim == 2 and biases.shape == weights.shape[:1] and len(biases) > 0
    is_sound = is_sound and (model != "" or weights.shape[1].bit_count() == 1)
    if not (is_sound and weights.isfinite().all() and biases.isfinite().all()):
        raise IntegrityError(f"{folder / WEIGHTS} is no router")
    return PathRouter(weights_PF=weights, biases_P=biases, tokenizer=tokenizer, model=model, model_digest=digest)


def hashed(tokens: Sequence[int], *, log2_features: int = _LOG2_HASHED) -> Tensor:
    """Features of tokens, without a model: how often runs of one to three tokens occur, counted by a hash of these.
    [F], of unit length."""
    counts_F = np.zeros(1 << log2_features, dtype=np.float32)
    numbers = np.array(tokens, dtype=np.uint64) + np.uint64(1)
    runs: npt.NDArray[np.uint64] = np.zeros(len(numbers) + 1, dtype=np.uint64)
    for length in range(1, min(_LONGEST_RUN, len(numbers)) + 1):
        # A run is the run before it, which is one token shorter, and its last token.
        runs = (runs[:-1] + numbers[length - 1 :]) * _GOLDEN
        runs ^= runs >> np.uint64(29)
        np.add.at(counts_F, (runs * _GOLDEN) >> np.uint64(64 - log2_features), 1.0)
    return torch.nn.functional.normalize(torch.from_numpy(counts_F).sqrt(), dim=0)


# -- shards: what a router is learnt from ----------------------------------------------------------------------------


def sequences(source: Source, most_characters: int) -> Iterator[str]:
    """Yield the texts of a source. A longer one is cut into windows, behind the end of a line where there is one in the
    window's second half. Raises ValueError as Source.texts does."""
    for text in source.texts():
        yield from _windows(text, most_characters)


def _windows(text: Text, most_characters: int) -> Iterator[str]:
    rest = ""
    for piece in text:
        rest += piece
        while len(rest) > most_characters:
            end = rest.rfind("\n", most_characters // 2, most_characters) + 1 or most_characters
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def clustered(
    features_NF: npt.NDArray[np.float32], sizes_N: Sequence[float], num_paths: int, most_over_mean: float, *, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:  # fmt: skip
    """Find as many clusters as there are paths by k-means, of which none is larger than `most_over_mean` times the
    mean, if that can be: so shards have to be, and a cluster that is cut apart afterwards is spread over paths of other
    text. Blocks.

    Returns:
        The cluster of each sequence [N], and the centroids [P, F].
    """
    from sklearn.cluster import KMeans

    found = KMeans(num_paths, n_init=_NUM_STARTS, random_state=seed % 2**32).fit(features_NF)
    clusters_N, centroids_PF = found.labels_.astype(np.int64), found.cluster_centers_
    for _ in range(_NUM_EVENED):
        before_N = clusters_N
        # |f - c|^2 is least where 2 f c - |c|^2 is largest.
        scores_NP = 2 * features_NF @ centroids_PF.T - np.square(centroids_PF).sum(1)
        _, clusters_N = balanced(torch.from_numpy(scores_NP), sizes_N, most_over_mean)
        if np.array_equal(clusters_N, before_N):
            break
        weights_PN = np.eye(num_paths)[clusters_N].T * np.array(sizes_N)
        sizes_P1 = weights_PN.sum(1, keepdims=True)
        # A cluster that nothing was left for stays where it is.
        centroids_PF = np.where(sizes_P1 > 0, weights_PN @ features_NF / sizes_P1.clip(1e-9), centroids_PF)
    return clusters_N, centroids_PF.astype(np.float32)


def arranged(
    centroids_PF: npt.NDArray[np.float32], paths: Sequence[Sequence[int]], *, seed: int
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Which of the clusters with these centroids each path takes, so that paths with common blocks have clusters that
    are alike, and each block sees alike text; the paper's product k-means is for the same. From several random starts,
    the two paths swap their clusters whose swap gains most, until none gains. Blocks.

    Of the stages with variants each counts twice as much as the next. Counted alike, the blocks of all may see somewhat
    alike text, of which none can make use; so those of one see text that is as alike as can be.

    Args:
        paths: the variants that each path leads through.
    """
    variants_PS = np.array(paths)
    variants_PS = variants_PS[:, (variants_PS != variants_PS[0]).any(0)]
    common_PP = (variants_PS[:, None] == variants_PS[None]) @ 0.5 ** np.arange(variants_PS.shape[1])
    np.fill_diagonal(common_PP, 0.0)
    centroids = torch.from_numpy(centroids_PF).double()
    apart_PP = torch.cdist(centroids, centroids).square().numpy()
    generator = np.random.RandomState(seed % 2**32)
    found = list[tuple[float, npt.NDArray[np.int64]]]()
    for _ in range(_NUM_STARTS):
        order = generator.permutation(len(paths))
        while True:
            own_PP = apart_PP[np.ix_(order, order)]
            # What the swap of two paths saves of sum(common * own) / 2.
            product_PP = common_PP @ own_PP
            kept_P = np.diagonal(product_PP)
            gains_PP = kept_P[:, None] + kept_P - product_PP - product_PP.T - 2 * common_PP * own_PP
            one, other = divmod(int(gains_PP.argmax()), len(paths))
            if gains_PP[one, other] <= 1e-9 * apart_PP.max() * common_PP.max():
                break
            order[[one, other]] = order[[other, one]]
        found.append((float((common_PP * own_PP).sum()), order))
    return min(found, key=lambda each: each[0])[1]


def classified(
    features_NF: npt.NDArray[np.float32], best_N: npt.NDArray[np.int64], counts_N: npt.NDArray[np.float64],
    num_paths: int,
) -> Linear:  # fmt: skip
    """Fit a logistic regression that finds the path of each beginning of a sequence by its features (discriminative
    routing, section 2.4 of the paper). A path that is nowhere the best is not chosen. Blocks.

    Args:
        best_N: the path in whose cluster the sequence is, or that has the least loss on it.
        counts_N: how much each beginning counts.
    """
    from sklearn.linear_model import LogisticRegression

    weights_PF, biases_P = torch.zeros(num_paths, features_NF.shape[1]), torch.full((num_paths,), -1e4)
    classes = np.unique(best_N)
    if len(classes) == 1:
        biases_P[classes[0]] = 0.0
        return weights_PF, biases_P
    found = LogisticRegression(C=_INVERSE_REGULARIZATION, max_iter=1000).fit(features_NF, best_N, counts_N)
    coefficients, intercepts = found.coef_, found.intercept_
    if len(classes) == 2:
        # Of two classes the library gives the difference.
        coefficients = np.concatenate([np.zeros_like(coefficients), coefficients])
        intercepts = np.concatenate([np.zeros_like(intercepts), intercepts])
    weights_PF[classes] = torch.from_numpy(coefficients.astype(np.float32))
    biases_P[classes] = torch.from_numpy(intercepts.astype(np.float32))
    return weights_PF, biases_P


def balanced(
    scores_NP: Tensor, sizes_N: Sequence[float], most_over_mean: float
) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """Assign sequences to paths by their scores, so that no shard is larger than `most_over_mean` times the mean, but
    for a sequence that fits nowhere.

    First biases are added, the same for all sequences, that make popular paths less so: a router has them too. What is
    still too much (many sequences may begin alike) goes to the next best path, the least decided sequences first.

    Args:
        most_over_mean: above 1.

    Returns:
        The biases [P], and the path of each sequence [N].
    """
    num_paths, sizes = scores_NP.shape[1], np.array(sizes_N, dtype=np.float64)
    most = most_over_mean * sizes.sum() / num_paths
    scores = scores_NP.numpy().astype(np.float64)
    ranked = np.sort(scores, axis=1)
    # How far the two best paths of a sequence are apart tells how large a bias must be to matter.
    step = float(np.median(ranked[:, -1] - ranked[:, -2])) if num_paths > 1 else 0.0
    biases = np.zeros(num_paths)
    for number in range(_NUM_NUDGES):
        shares = np.bincount(np.argmax(scores + biases, axis=1), sizes, num_paths) * num_paths / sizes.sum()
        if shares.max() <= most_over_mean and shares.min() > 0:
            break
        biases -= step / (1 + number / 50) * np.clip(shares - 1, -1, 1)
    scores += biases
    ranked = np.sort(scores, axis=1)
    decided = np.argsort(ranked[:, -2] - ranked[:, -1], kind="stable") if num_paths > 1 else range(len(scores))
    paths, loads = np.zeros(len(scores), dtype=np.int64), np.zeros(num_paths)
    for sequence in decided:
        order = np.argsort(-scores[sequence], kind="stable")
        with_room = order[loads[order] + sizes[sequence] <= most]
        paths[sequence] = with_room[0] if len(with_room) else int(np.argmin(loads))
        loads[paths[sequence]] += sizes[sequence]
    return torch.from_numpy(biases.astype(np.float32)), paths
