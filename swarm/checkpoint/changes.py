"""Which fields of the configuration may change when a run goes on from a checkpoint, and which of them did."""

import dataclasses
from typing import Any

from swarm import config as configs
from swarm.config import RunConfig

Difference = tuple[Any, Any]
"""The checkpoint's value of a field, and that of the run which goes on from it."""

_FREE_SECTIONS = ("stages", "optimizer", "outer", "averaging", "wire")
_FREE_FIELDS = (
    "owner",
    # These change how gradients are computed, but neither the parameters nor the optimizers' state.
    "model.dropout",
    "model.autocast",
    "model.gradient_checkpointing",
    # These matter only to texts that the model writes. Earlier releases did not have them.
    "model.bos_token_id",
    "model.eos_token_ids",
    "model.pad_token_id",
    "lora.dropout",
    "rounds.inner_batch_samples",
)
_DILOCO_FIELDS = ("rounds.round_samples",)
"""These may change only with DiLoCo. In the synchronous setting a round's number determines its microbatches."""
_NO_CHANGE = (
    "data.dataset",
    "data.validation",
    "data.dataset_digests",
    "data.tokenizer",
    "data.tokenizer_identity",
    "data.tokenizer_files",
)
"""These fields may change freely: they only say where the text and the tokenizer are, and `data.digest` covers the
contents of both. Earlier releases did not write all of them."""


def forbidden(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    """The differences that make the checkpoint one of another run, by field."""
    return {name: pair for name, pair in _differences(checkpoint, run).items() if not _is_free(name, pair, run)}


def allowed(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    """All differences that are not forbidden, by field."""
    return {name: pair for name, pair in _differences(checkpoint, run).items() if _is_free(name, pair, run)}


def _differences(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    # Values that [outer] leaves out, and `auto`, are replaced by what they stand for, because earlier releases wrote
    # the actual values.
    whole = (
        dataclasses.replace(each, outer=each.outer_step, optimizer=each.gradient_step) for each in (checkpoint, run)
    )
    differing = configs.differences(*whole)
    return {name: pair for name, pair in differing.items() if name not in _NO_CHANGE}


def _is_free(name: str, pair: Difference, run: RunConfig) -> bool:
    if name == "rounds.setting":
        # The way back is closed: a synchronous round's number determines its microbatches, and would repeat some.
        return pair == ("synchronous", "diloco")
    if name in _DILOCO_FIELDS:
        return not run.rounds.synchronous
    if "parallel" in run.model.types_of_blocks and name.startswith("stages."):
        # The shards of such blocks are added up at the ends of stages, so another cut would make another model.
        return False
    return name in _FREE_FIELDS or name.partition(".")[0] in _FREE_SECTIONS
