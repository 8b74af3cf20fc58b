"""What a run that this process begins is made of: its configuration, the model that --model names, and the text.

A model's folder is read once as a whole, to compute digests of its weights, which are kept in the user's cache: two
machines with the same folder begin the same run.
"""

import dataclasses
import hashlib
import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from peers.shared.environment import kept_tokenizer
from peers.shared.run_options import begun, with_named_text
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.resume import with_sizes_of
from swarm import config as configs
from swarm.config import RunConfig
from swarm.credentials.identity import Token
from swarm.data import chat, corpora, tokenizer_files, tokenizers
from swarm.data.corpora import Corpus
from swarm.data.microbatches import Microbatches
from swarm.errors import IntegrityError
from swarm.interchange import origin, run_folder, weights
from swarm.interchange.run_folder import ImportOptions
from swarm.interchange.source import Source, located
from swarm.interchange.weights import Index, Weights
from swarm.machine.disk import write_private
from swarm.machine.words import counted

logger = logging.getLogger(__name__)

Say = Callable[[str], object]
_UNTRAINED = 0.1
"""A row is taken for untrained if it is closer to zero, or to the mean of all rows, than this part of what is usual."""
SAY_SECONDS = 10.0


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


def hidden_features(place: str, cache: Path, say: Say = logger.info) -> tuple[Callable[[Sequence[int]], Tensor], str]:
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


def with_text(config: RunConfig, cache: Path) -> tuple[RunConfig, Corpus]:
    """The configuration with the digests of text and tokenizer, and the text. Blocks while the text is prepared. Raises
    ValueError if there is no such text or tokenizer, and CorpusMismatch if the configuration has the digest of another
    text."""
    tokenizers.load_for_run(config.data, vocab_size=config.model.vocab_size)
    corpus = corpora.prepare(config.data, cache_dir=cache / "corpora")
    corpora.check_digest(config.data, corpus)
    files = None
    if tokenizer_files.has_files(config.data.tokenizer):
        files = tokenizer_files.read(tokenizer_files.located(config.data.tokenizer))
        # A peer gives the tokenizer to others from this folder.
        files.keep(kept_tokenizer(cache, files.digest))
    return dataclasses.replace(config, data=corpora.published(config.data, corpus, files)), corpus


def own_config(
    options: PeerOptions, token: Token | None, cache: Path, *, model: OwnModel | None = None
) -> RunConfig | None:
    """The configuration that the options name, with its text's digest and its owner; None if they name none."""
    if not options.names_a_run:
        return None
    if model is not None:
        config = model.config(cache, num_stages=options.stages or 0)
    else:
        config = configs.load(options.config) if options.config else configs.load_preset(options.preset or "")
    # --set data.format=chat is checked against the dataset, so that comes first.
    config = with_named_text(config, options)
    config = configs.with_settings(config, options.set)
    if options.stages is not None:
        stages = dataclasses.replace(config.stages, num_stages=options.stages, layers_per_stage=())
        config = dataclasses.replace(config, stages=stages)
    if options.lora_options:
        config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, **options.lora_options))
        if not config.lora.is_on and options.lora_options.keys() != {"rank"}:
            raise ValueError("--lora-alpha, --lora-dropout and --lora-targets need a --lora-rank above 0")
    require_blocks(options, config)
    owner = token.authority.fingerprint if token is not None else ""
    if config.owner not in ("", owner):
        raise ValueError(f"the run is locked by owner {config.owner[:16]}: give a token of that owner's with --token")
    config = dataclasses.replace(config, owner=owner)
    if options.resume is not None:
        config = with_sizes_of(options.resume, config)
    config = begun(config, options.steps, cache)
    if model is not None:
        model.warn_of_untrained(config, cache)
    config, corpus = with_text(config, cache)
    if not options.joins:
        logger.info("%s", _sizes_in_words(config, Microbatches(corpus, config.data).num_windows))
        logger.info("%s", _rate_in_words(config))
    return config


def require_blocks(options: PeerOptions, config: RunConfig) -> None:
    """Raise ValueError if the run has not all that the peer is to serve."""
    if options.span != "auto":
        options.span.of(config)


def _sizes_in_words(config: RunConfig, num_samples: int) -> str:
    """The sizes of a new run, of which an epoch has so many samples, for its user, who may have chosen none."""
    data, rounds = config.data, config.rounds
    told = f"a step is a round of {counted(rounds.round_samples, 'sample')} of {counted(data.sequence_length, 'token')}"
    told += f", in microbatches of {data.microbatch_size}"
    if not rounds.synchronous:
        told += f" and inner steps of {rounds.inner_batch_samples}"
    steps = num_samples / rounds.round_samples
    return f"{told}; {f'{steps:,.0f}' if steps >= 100 else f'{steps:.3g}'} steps are one pass through the text"


def _rate_in_words(config: RunConfig) -> str:
    """The learning rate of a new run, for its user, who may have chosen none."""
    optimizer = config.optimizer
    what = "a model further" if config.model.weights else "a new model"
    told = f"trains {'adapters' if config.lora.is_on else what} at a learning rate of {optimizer.learning_rate:g}"
    if optimizer.warmup_samples:
        told += f", reached after {optimizer.warmup_samples} samples"
    match optimizer.schedule:
        case "linear" | "cosine":
            return f"{told}; it falls until {optimizer.total_samples} samples"
        case "constant":
            return f"{told}, which stays: --steps N would let it fall over N steps"
        case "cosine-restarts" | "auto":
            return told
        case other:
            assert_never(other)


def require_allowed_class(config: RunConfig, own: RunConfig | None, allowed: str | None) -> None:
    """Raise ValueError if the run has a custom class that our user has named neither in a file nor in an option."""
    name = config.model.custom_class
    # If the user has named a configuration, `agree_on_config` has made sure that the run's is the same.
    if name and own is None and name != allowed:
        raise ValueError(
            f"this run would have this machine import and run {name!r}, its model.custom_class: "
            f"if you trust that code, add --allow-class {shlex.quote(name)}"
        )
