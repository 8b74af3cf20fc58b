"""All families that are supported; finds the family of a configuration, theirs or ours."""

import dataclasses
import logging
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig
from swarm.interchange.families import gpt2, llama, special_tokens
from swarm.interchange.families.family import Family, Keys
from swarm.machine import json_file

logger = logging.getLogger(__name__)

FAMILIES = (llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, llama.PHI3, gpt2.GPT2)


def read_config(path: Path) -> tuple[Family, ModelConfig]:
    """The family and our configuration of a model, from its config.json. Logs which keys are ignored.

    Raises:
        ValueError: one line. The file is missing or no JSON, the architecture is not supported, or a key is not known
            or has a value that is not supported.
    """
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
    tokens = special_tokens.read(path.parent, values, family.special_tokens, vocab_size=fields["vocab_size"])
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
