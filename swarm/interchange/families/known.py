"""All supported families: finds that of a configuration, theirs or ours, and translates the special tokens of all."""

import dataclasses
import logging
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig
from swarm.data.tokenizers import token_numbers
from swarm.interchange.families import gpt2, llama
from swarm.interchange.families.family import Family, Keys
from swarm.machine import json_file

logger = logging.getLogger(__name__)

FAMILIES = (llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, llama.PHI3, gpt2.GPT2)
GENERATION = "generation_config.json"
_FIELDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_ids", "pad_token_id": "pad_token_id"}
"""Our fields, by the keys of transformers' files."""
_NONE = -1
"""Means "no token", in our configuration and in the files of the first Llamas."""


def read_config(path: Path) -> tuple[Family, ModelConfig]:
    """The family and our configuration of a model, from its config.json. Logs which keys are ignored. Raises
    ValueError, of one line, if the file is missing or no JSON, the architecture is not supported, or a key is not known
    or has a value that is not supported."""
    values = json_file.read_object(path)
    if values.get("quantization_config"):
        raise ValueError(f"{path}: a quantized model cannot be trained; take the one that it was made from")
    try:
        family = _family(values)
        keys = Keys(values)
        fields = family.read(keys)
        ignored = keys.finish()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if ignored:
        logger.warning("%s: ignored, as they are not known and have no value: %s", path, ", ".join(ignored))
    tokens = _special_tokens(path.parent, values, family.special_tokens, vocab_size=fields["vocab_size"])
    return family, ModelConfig(**fields, **tokens)


def _family(values: Mapping[str, Any]) -> Family:
    named = values.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"architectures is {reprlib.repr(named)}, and should be a list of names")
    for family in FAMILIES:
        if family.architecture in named or (not named and values.get("model_type") == family.model_type):
            return family
    what = named[0] if named else values.get("model_type", "nothing")
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(f"the architecture {reprlib.repr(what)} is not supported; these are: {supported}")


def family_of(model: ModelConfig) -> Family:
    """The family whose class in transformers computes the same as `model`.

    An imported Mistral is exported as a Llama: they differ only in how far layers look back, which import resolves. So
    is a Phi-3, whose matrices are only stored in another way. A model that lacks biases of every such family is one of
    the family in which they are zeros (`with_biases`): nanoGPT's models without biases are GPT-2s.

    Raises:
        ValueError: no family does.
    """
    if model.custom_class:
        raise ValueError("a model.custom_class has no counterpart in transformers")
    if model.bottleneck_dim:
        raise ValueError("a model with a model.bottleneck_dim has no counterpart in transformers")
    other = sorted({*model.types_of_blocks} - {"tp"})
    if other:
        raise ValueError(f"a model with {' and '.join(other)} blocks has no counterpart in transformers")
    # A run's model may have no longest sequence, but a config.json always names one.
    model = dataclasses.replace(model, max_positions=model.max_positions or 1)
    for may_have_zeros in (False, True):
        for family in FAMILIES:
            # Write the configuration as this family's, and read it again: a switch that the family lacks is lost.
            try:
                again = type(model)(**family.read(Keys(family.write(model))))
            except ValueError:
                continue
            if again.function == (family.with_biases(model) if may_have_zeros else model).function:
                return family
    raise ValueError("no architecture of transformers has this combination of switches in [model]")


def _special_tokens(
    folder: Path, config: Mapping[str, Any], defaults: Mapping[str, int], *, vocab_size: int
) -> dict[str, Any]:
    """The fields of special tokens in our configuration, from the files of a model's folder.

    Args:
        config: the contents of config.json. Values in generation_config.json take precedence, as in transformers.
        defaults: the values of keys that neither file has. (Null means that there is no such token.) A small model may
            have too few tokens for a default, even if its files name the default, which is then left out.

    Raises:
        ValueError: one line, for a value that is no token's number, or no token of the model.
    """
    generation = json_file.read_object(folder / GENERATION, is_optional=True)
    fields: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        default = defaults.get(key, _NONE)
        in_config = _known(config.get(key, default), f"{folder / 'config.json'}: {key}", default, vocab_size)
        in_generation = _known(generation.get(key), f"{folder / GENERATION}: {key}", default, vocab_size)
        tokens = in_config if generation.get(key) is None else in_generation
        fields[field] = tokens if field == "eos_token_ids" else next(iter(tokens), _NONE)
    return fields


def _known(value: Any, what: str, default: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens that a value names. Raises ValueError for one that the model does not have, unless it is a default."""
    tokens = token_numbers(value, what)
    for token in tokens:
        if not (0 <= token < vocab_size or token in (_NONE, default)):
            raise ValueError(f"{what} names the token {token}, and the model has those from 0 to {vocab_size - 1}")
    return tuple(token for token in tokens if 0 <= token < vocab_size)


def special_token_keys(model: ModelConfig) -> dict[str, Any]:
    """Transformers' keys for the special tokens. "No token" is null: without a key some classes use a default."""
    ends = list(model.eos_token_ids)
    return {
        "bos_token_id": model.bos_token_id if model.bos_token_id >= 0 else None,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": model.pad_token_id if model.pad_token_id >= 0 else None,
    }
