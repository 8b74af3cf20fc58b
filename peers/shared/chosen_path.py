"""The path that a router chooses for a text in a run with several paths: swarm-model route makes routers."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from peers.shared.named_model import Say, open_model
from swarm.data import path_router
from swarm.data.path_router import NUM_TOKENS, Features
from swarm.data.tokenizers import ByteTokenizer, Tokenizer
from swarm.errors import IntegrityError
from swarm.interchange import origin

_MOST_KEPT = 1 << 16


def chooser(
    folder: Path, num_paths: int, tokenizer: Tokenizer, cache: Path, say: Say
) -> Callable[[Sequence[int]], int]:  # fmt: skip
    """The router in a folder, as what chooses the path of a sequence by its first tokens. It blocks while the features
    of a model are computed, once for each beginning. Raises ValueError, IntegrityError, or PeerUnavailable if the
    router is not for these paths and this tokenizer, or cannot be read."""
    router = path_router.read(folder)
    # An export of a run on bytes has a tokenizer.json, whose tokens are the bytes as well.
    is_bytes = router.tokenizer == ByteTokenizer.identity and tokenizer.vocab_size == ByteTokenizer.vocab_size
    router.require(num_paths, router.tokenizer if is_bytes else tokenizer.identity)
    features: Features = path_router.hashed
    if router.model:
        features, digest = hidden_features(router.model, cache, say)
        if digest != router.model_digest:
            raise IntegrityError(f"the router was made with {router.model}, which has other weights now")
    kept = lru_cache(_MOST_KEPT)(lambda beginning: router.choose(beginning, features))
    return lambda tokens: kept(tuple(tokens[:NUM_TOKENS]))


def hidden_features(place: str, cache: Path, say: Say) -> tuple[Callable[[Sequence[int]], Tensor], str]:
    """What makes features of a sequence's first tokens, for a path router: the mean of the hidden states [F] that a
    model has of them after its last layer. Returns it with the digest of the model's weights. Blocks. Raises what
    `open_model` and `all_weights` raise."""
    own = open_model(place, say)
    digest = own.all_weights(cache).index.digest
    found = origin.from_folder(own.folder)
    module = origin.transformer(found, found.config, torch.device("cpu")).eval()
    module.head = None

    @torch.inference_mode()
    def features(tokens: Sequence[int]) -> Tensor:
        hidden_BTR: Tensor = module(torch.tensor([tokens], dtype=torch.int64))
        return hidden_BTR[0].mean(0)

    return features, digest
