"""Makes the configuration of a new run from swarm-peer's options, and checks that of a run that the peer joins."""

import dataclasses
import logging
import shlex
from pathlib import Path
from typing import assert_never

from peers.shared.run_options import with_named_text
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_model import OwnModel, text_size, with_text
from peers.stage_peer.resume import with_sizes_of
from swarm import config as configs
from swarm.config import RunConfig
from swarm.credentials.identity import Token
from swarm.data.microbatches import Microbatches
from swarm.machine.words import counted

logger = logging.getLogger(__name__)


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
    if options.first_stage != "auto":
        require_stage(config, options.first_stage)
    owner = token.authority.fingerprint if token is not None else ""
    if config.owner not in ("", owner):
        raise ValueError(f"the run is locked by owner {config.owner[:16]}: give a token of that owner's with --token")
    config = dataclasses.replace(config, owner=owner)
    if options.resume is not None:
        config = with_sizes_of(options.resume, config)
    config = (
        config.begun(options.steps, text_size(config, cache)) if config.lacks_sizes else config.begun(options.steps)
    )
    if model is not None:
        model.warn_of_untrained(config, cache)
    config, corpus = with_text(config, cache)
    if not options.joins:
        logger.info("%s", _sizes_in_words(config, Microbatches(corpus, config.data).num_windows))
        logger.info("%s", _rate_in_words(config))
    return config


def _sizes_in_words(config: RunConfig, num_samples: int) -> str:
    """The sizes of a new run, for its user, who may have chosen none.

    Args:
        num_samples: the samples of an epoch.
    """
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


def require_stage(config: RunConfig, stage: int) -> None:
    """Raise ValueError if the run has no such stage."""
    last = config.stages.num_stages - 1
    if stage > last:
        stages = f"the stages 0 to {last}" if last else "stage 0 alone"
        raise ValueError(f"--stage {stage} does not exist: this run has {stages}")


def require_allowed_class(config: RunConfig, own: RunConfig | None, allowed: str | None) -> None:
    """Raise ValueError if the run has a custom class that our user has named neither in a file nor in an option."""
    name = config.model.custom_class
    # If the user has named a configuration, `agree_on_config` has made sure that the run's is the same.
    if name and own is None and name != allowed:
        raise ValueError(
            f"this run would have this machine import and run {name!r}, its model.custom_class: "
            f"if you trust that code, add --allow-class {shlex.quote(name)}"
        )
