"""The configuration of the run that static workers train, checked against their mesh. Any run of a swarm can be."""

import dataclasses
import logging

import torch

from peers.shared.devices import computing_in
from peers.shared.named_model import open_model
from peers.shared.process import cache_folder
from peers.shared.run_options import begun, named_config
from peers.stage_peer.resume import with_sizes_of
from peers.static.options import StaticOptions
from peers.static.workers import Shape
from swarm.config import ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.interchange.weights import Weights
from swarm.model.compiled import require_compilable

logger = logging.getLogger(__name__)


def trained(options: StaticOptions, shape: Shape, device: torch.device) -> tuple[RunConfig, Weights | None]:
    """The configuration that the command line names, as a synchronous run with the mesh's stages, and the weights with
    which the run begins (None if they are drawn from the seed).

    A DiLoCo run becomes one in which all workers take each inner step together, with the same optimizer.

    Raises:
        ValueError: there is no such configuration or model, or it does not fit the mesh or the options.
        IntegrityError: the weights are not those that the configuration names.
        PeerUnavailable: the model cannot be downloaded.
    """
    model = None if options.model is None else open_model(options.model)
    of_model = None if model is None or options.config else model.config(cache_folder(), num_stages=options.pp)
    config = named_config(options, of_model, preset=options.preset)
    for folder in filter(None, (options.checkpoint, options.resume)):
        config = with_sizes_of(folder, config)
    # A swarm that draws its weights knows no last step, and takes the same steps as this run.
    config = begun(config, options.steps if config.model.weights else None, cache_folder())
    if not config.rounds.synchronous:
        size = config.rounds.inner_batch_samples
        rounds = RoundsConfig(setting="synchronous", round_samples=size)
        averaging = dataclasses.replace(config.averaging, num_fragments=1)
        config = dataclasses.replace(config, rounds=rounds, averaging=averaging, optimizer=config.gradient_step)
        logger.info("the run's setting is diloco: a static run takes a step every %d samples, its inner batch", size)
    if config.model.versions != "fp32":
        raise ValueError(
            f"model.versions = {config.model.versions!r} is for a swarm's peers, which compute with copies of the "
            "weights: take --set model.versions=fp32"
        )
    if config.lora.base != "as-is":
        raise ValueError(
            f"lora.base = {config.lora.base!r} is for a swarm's peers: take --set lora.base=as-is, or one peer a stage"
        )
    config = computing_in(config, options.dtype, device)
    config = _fitted(config, options, shape)
    if not config.model.weights:
        return config, None
    if model is None:
        raise ValueError("the run begins with a model (model.weights): give --model with its folder, or its name")
    model.warn_of_untrained(config, cache_folder())
    weights = model.all_weights(cache_folder())
    weights.require(config.model.weights)
    return config, weights


def _fitted(config: RunConfig, options: StaticOptions, shape: Shape) -> RunConfig:
    """The configuration with as many stages as the mesh has. Raises ValueError if the two do not fit."""
    model = config.model
    if model.custom_class and (shape.pp > 1 or shape.tp > 1):
        raise ValueError("--pp and --tp are for the built-in model, not for a model.custom_class")
    if len(config.own_classes) > 1:
        raise ValueError("model.custom_class names several classes, and swarm-static trains a model of one")
    if len(config.paths) > 1:
        raise ValueError(f"the run has {len(config.paths)} paths (stages.variants), and swarm-static trains one")
    if shape.pp > model.num_layers:
        raise ValueError(f"--pp {shape.pp} needs as many layers, and model.num_layers is {model.num_layers}")
    if "parallel" in model.types_of_blocks and shape.pp != config.stages.num_stages:
        raise ValueError(
            f"parallel blocks meet at the ends of the run's {config.stages.num_stages} stages: give --pp "
            f"{config.stages.num_stages}, or stages.num_stages = {shape.pp} in the configuration"
        )
    if shape.tp > 1 and config.lora.dropout:
        raise ValueError("--tp is not for lora.dropout, which would zero other inputs at each worker: set it to 0")
    if options.compress is not None and model.autocast == "fp16":
        raise ValueError("--compress is not for --dtype fp16, whose gradients may overflow: take bf16")
    in_shards(model, shape.tp)
    if options.compile == "on":
        require_compilable(config)
    if shape.pp == config.stages.num_stages:
        return config
    return dataclasses.replace(config, stages=StagesConfig(num_stages=shape.pp))


def in_shards(model: ModelConfig, num_workers: int) -> ModelConfig:
    """The model with its layers in shards for the workers. Raises ValueError if they cannot share its layers."""
    if num_workers == 1:
        return model
    if model.block_types:
        if model.num_shards % num_workers:
            raise ValueError(f"--tp {num_workers} does not divide model.num_shards, which is {model.num_shards}")
        return model
    try:
        return dataclasses.replace(model, block_types="tp", num_shards=num_workers)
    except ValueError as error:
        raise ValueError(f"--tp {num_workers} cuts layers as model.block_types = 'tp' does, and {error}") from None
