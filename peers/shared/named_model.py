"""The model that a user names (a run folder, a folder of Hugging Face, or a name on the hub), and the paths it chooses.

A model's folder is read once as a whole, to compute digests of its weights, which are kept in the user's cache: two
machines with the same folder begin the same run.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data import chat, path_router, tokenizers
from swarm.data.path_router import NUM_TOKENS, Features
from swarm.data.tokenizers import ByteTokenizer, Tokenizer
from swarm.errors import IntegrityError
from swarm.interchange import origin, run_folder, weights
from swarm.interchange.run_folder import ImportOptions
from swarm.interchange.source import Source, located
from swarm.interchange.weights import Index, Weights
from swarm.machine.disk import write_private

logger = logging.getLogger(__name__)

Say = Callable[[str], object]
_UNTRAINED = 0.1
"""A row is taken for untrained if it is closer to zero, or to the mean of all rows, than this part of what is usual."""
SAY_SECONDS = 10.0
_MOST_KEPT = 1 << 16
"""The most beginnings of sequences whose path is remembered."""
_MOST_SEEN = 256
"""The most tokens of which features are made."""


@dataclass(frozen=True)
class OwnModel:
    """The user's model: a run folder, or one of Hugging Face if it has a `source`."""

    folder: Path
    source: Source | None
    name: str = ""
    say: Say = logger.info

    def config(self, cache: Path, *, num_stages: int) -> RunConfig:
        """The configuration of a run that begins with this model. Blocks while a folder is read for the first time.
        Raises ValueError if no run can begin with this model, and what `all_weights` does."""
        if self.source is None:
            return run_folder.load_config(self.folder)
        options = ImportOptions(run=self.name, num_stages=num_stages)
        config = run_folder.config_of(self.source, options, tokenizer=self.folder)
        return run_folder.with_weights(config, _index(self.source, cache, self.say))

    def all_weights(self, cache: Path) -> Weights:
        """The weights that a run would begin with. Blocks while a folder is read for the first time. Raises
        IntegrityError if a weight is no finite number, or the run folder's index is damaged, and OSError if the digests
        cannot be written to the cache."""
        if self.source is None:
            return weights.open_folder(self.folder / run_folder.WEIGHTS)
        return Weights(_index(self.source, cache, self.say), self.source.tensors, place=self.folder)

    def warn_of_untrained(self, config: RunConfig, cache: Path) -> None:
        """Log a warning if a run would teach a chat by adapters, and the chat template has tokens whose rows of the
        embedding look as if they had never been trained: adapters do not train these. Blocks. Raises ValueError if
        there is no such tokenizer or chat template, and what `all_weights` does."""
        if not config.lora.is_on or config.data.format != "chat":
            return
        tokenizer = tokenizers.load(config.data.tokenizer)
        with closing(chat.beside(config.data.tokenizer, now=lambda: chat.TRAINING_DATE)) as template:
            tokens = sorted(set(map(int, tokenizer.encode(template.render(chat.ORDINARY)))))
        weights = self.all_weights(cache)
        for name in {"embedding.weight", "head.output.weight"} & weights.index.entries.keys():
            rows_VD = weights.load({name})[name]
            tokens = [token for token in tokens if token < len(rows_VD)]
            some_ND, own_ND = rows_VD[:: max(1, len(rows_VD) // 1000)].float(), rows_VD[tokens].float()
            mean_D = rows_VD.mean(0, dtype=torch.float32)
            # What was added to a vocabulary begins as zeros, or as the mean of all rows.
            distances_N = torch.minimum(own_ND.norm(dim=1), (own_ND - mean_D).norm(dim=1))
            is_untrained_N = distances_N < _UNTRAINED * (some_ND - mean_D).norm(dim=1).median()
            named = [repr(tokenizer.decode([tokens[int(place)]])) for place in is_untrained_N.nonzero()]
            if named:
                logger.warning(
                    "%s looks as if it had never been trained for %s of the chat template, and adapters leave it so: "
                    "begin with a model that was trained to chat, or train all weights", name, ", ".join(named),
                )  # fmt: skip

    def weights(self, config: RunConfig) -> Weights | None:
        """The weights in a run folder; None for a model's folder. Raises IntegrityError if the run's are others."""
        return run_folder.open_weights(self.folder, config) if self.source is None else None


def open_model(spec: str, say: Say = logger.info) -> OwnModel:
    """Find the model that --model names, and read its headers. Blocks while the model is downloaded, and tells with
    `say` what takes long. Raises ValueError if something is wrong with the folder, and PeerUnavailable."""
    folder, name = located(spec, say)
    if (folder / run_folder.CONFIG).is_file():
        return OwnModel(folder, source=None, say=say)
    return OwnModel(folder, Source(folder), name=name, say=say)


def kept_weights(cache: Path, digest: str) -> Path:
    """The folder for the weights with this digest: their index, and what was fetched of them."""
    return cache / "weights" / digest


def _index(source: Source, cache: Path, say: Say) -> Index:
    """The index of a model's folder. A folder that has not changed since the last time is not read again."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.files]
    config = (source.folder / "config.json").read_text(encoding="utf-8")
    key = hashlib.sha256(json.dumps([str(source.folder.resolve()), config, stats]).encode()).hexdigest()
    known = cache / "models" / key
    try:
        return weights.open_folder(kept_weights(cache, known.read_text(encoding="utf-8"))).index
    except (OSError, IntegrityError):
        pass
    index = Index.of(_told(source, say))
    folder = kept_weights(cache, index.digest)
    folder.mkdir(parents=True, exist_ok=True)
    weights.write_index(folder, index)
    write_private(known, index.digest)
    return index


def _told(source: Source, say: Say) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the model, and log meanwhile how much has been read."""
    total, done, said_at = sum(path.stat().st_size for path in source.files), 0, time.monotonic()
    say(f"reading {source.folder} once, to digest its weights: {total / 1e6:,.1f} MB")
    for name, tensor in source.tensors(set(source.shapes)):
        yield name, tensor
        done += tensor.nbytes
        if time.monotonic() - said_at >= SAY_SECONDS:
            said_at = time.monotonic()
            say(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB are read")


# -- the paths of a run with several, which a router chooses -----------------------------------------------------------


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
    features: Features = router.hashed
    if router.model:
        features, digest = hidden_features(router.model, cache, say)
        if digest != router.model_digest:
            raise IntegrityError(f"the router was made with {router.model}, which has other weights now")
    kept = lru_cache(_MOST_KEPT)(lambda beginning: router.choose(beginning, features))
    return lambda tokens: kept(tuple(tokens[:NUM_TOKENS]))


def hidden_features(place: str, cache: Path, say: Say) -> tuple[Callable[[Sequence[int]], Tensor], str]:
    """What makes features of a sequence's tokens, for a path router: the mean of the hidden states [F] that a model has
    after its last layer of the first tokens, as many as it takes, up to 256. Returns it with the digest of the
    model's weights. Blocks. Raises what `open_model` and `all_weights` raise."""
    own = open_model(place, say)
    digest = own.all_weights(cache).index.digest
    found = origin.from_folder(own.folder)
    module = origin.transformer(found, found.config, torch.device("cpu")).eval()
    module.head = None
    most = min(found.config.model.max_positions or _MOST_SEEN, _MOST_SEEN)

    @torch.inference_mode()
    def features(tokens: Sequence[int]) -> Tensor:
        if not tokens:
            return torch.zeros(found.config.model.d_model)
        hidden_BTR: Tensor = module(torch.tensor([tokens[:most]], dtype=torch.int64))
        return hidden_BTR[0].mean(0)

    return features, digest
