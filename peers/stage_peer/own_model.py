"""What a run that this process begins is made of: its configuration, the model that --model names, and the text."""

import dataclasses
import logging
from pathlib import Path

from peers.shared.named_model import OwnModel
from peers.shared.process import kept_tokenizer
from peers.shared.run_options import begun, named_config
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_room import require_blocks
from peers.stage_peer.resume import with_sizes_of
from swarm.config import RunConfig
from swarm.config.schedule import in_words
from swarm.credentials.token import Token
from swarm.data import corpora, tokenizer_files, tokenizers
from swarm.data.corpora import Corpus
from swarm.data.microbatches import Microbatches
from swarm.machine.words import counted

logger = logging.getLogger(__name__)


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
    of_model = None if model is None else model.config(cache, num_stages=options.stages or 0)
    config = named_config(options, of_model, preset=options.preset)
    if options.lora_options:
        config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, **options.lora_options))
        if not config.lora.is_on and options.lora_options.keys() != {"rank"}:
            raise ValueError("--lora-alpha, --lora-dropout and --lora-targets need a --lora-rank above 0")
    require_blocks(options, config, config)
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
        what = "adapters" if config.lora.is_on else "a model further" if config.model.weights else "a new model"
        logger.info("trains %s at a learning rate of %s", what, in_words(config.optimizer))
    return config


def _sizes_in_words(config: RunConfig, num_samples: int) -> str:
    """The sizes of a new run, of which an epoch has so many samples, for its user, who may have chosen none."""
    data, rounds = config.data, config.rounds
    told = f"a step is a round of {counted(rounds.round_samples, 'sample')} of {counted(data.sequence_length, 'token')}"
    told += f", in microbatches of {data.microbatch_size}"
    if not rounds.synchronous:
        told += f" and inner steps of {rounds.inner_batch_samples}"
    steps = num_samples / rounds.round_samples
    return f"{told}; {f'{steps:,.0f}' if steps >= 100 else f'{steps:.3g}'} steps are one pass through the text"
