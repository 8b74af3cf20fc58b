"""A family of models: how the keys of its configuration and the names of its tensors correspond to ours.

Each family has such a table, and relatives share a file. To add another family, write its `Family` beside its nearest
relative, or in a file of its own, and name it in known.py's FAMILIES, of which export takes the first that fits. If its
users know its matrices by names that config/lora.py's `targets_of` does not have, add these there for lora.targets.

Import uses a table in one direction, export in the other. A configuration with a key that the table does not know is
refused, because the key may change what the model computes. If the key is there without a value, nothing can depend on
it, and it is ignored.
"""

import dataclasses
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.config import ModelConfig

_HARMLESS = re.compile(
    r"""
    architectures | auto_map | model_type | name_or_path | problem_type | (torch_)?dtype | transformers_version
    | attention_dropout | initializer_range | is_(decoder|encoder_decoder|llama_config) | max_window_layers
    | chunk_size_feed_forward | pretraining_tp | quantization_config | torchscript | use_(bfloat16|cache)
    | (bos|eos|pad|sep|unk|cls|mask|decoder_start)_token_id | tokenizer_class | prefix
    | (num|_num)_labels | id2label | label2id | finetuning_task | task_specific_params
    | output_(attentions|hidden_states|past|scores) | return_dict(_in_generate)? | n_special | predict_special_tokens
    | gradient_checkpointing | neftune_noise_alpha | unsloth_\w+ | transformers\.js_config
    | max_(sequence_)?length | min_length | do_sample | num_beams | early_stopping | temperature | top_[kp] | typical_p
    | (length|repetition)_penalty | no_repeat_ngram_size | num_return_sequences | cache_implementation
    | _\w+  # what transformers and its users note for themselves
    """,
    re.VERBOSE,
)
"""Keys that do not change what the model computes: notes, and what other software trains, writes or shows with it.
(Dropout is the run's own choice.)"""
_LARGEST = 2**53
"""The largest number that a configuration may have: a float can hold every whole number up to this."""

BIASES = ("qkv_bias", "attention_output_bias", "feed_forward_bias")


class Keys:
    """A model's config.json. `finish` refuses a key that has a value and was neither read, nor expected, nor harmless.

    Its errors do not name the file: `known.read_config`, which knows the path, does so.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._unread = {name for name in values if not _HARMLESS.fullmatch(name)}

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a key. If it is missing or null, `default`, unless that is None. Raises ValueError if the value
        is missing and there is no default, or it is of another type."""
        self._unread.discard(name)
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{name} is missing")
        if kind in (int, float) and isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"{name} is {reprlib.repr(value)}, which is too large")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name} is {reprlib.repr(value)}, and should be of type {kind.__name__}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """The value of a key that counts something, or is a width. `default` is as in get, and may be below 1. Raises
        ValueError as get does, or if the value is below 1."""
        value: int = self.get(name, int, default)
        if self._values.get(name) is not None and value < 1:
            raise ValueError(f"{name} is {value}, and should be at least 1")
        return value

    def has(self, name: str) -> bool:
        return name in self._values

    def expect(self, name: str, *allowed: Any) -> None:
        """Raise ValueError if a key has a value that is not among `allowed`, because other values are not supported."""
        self._unread.discard(name)
        value = self._values.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"{name} = {reprlib.repr(value)} is not supported, only {' or '.join(map(repr, allowed))}")

    def section(self, name: str) -> "Keys | None":
        """An object within the configuration; None if it is missing or null."""
        self._unread.discard(name)
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {reprlib.repr(value)}, and should be an object")
        return Keys(value)

    def finish(self) -> list[str]:
        """The keys that were not read and are ignored, because they have no value: false, null, or empty. Raises
        ValueError if a key with a value was not read. The error names it."""
        for name in sorted(self._unread):
            value = self._values[name]
            if value is not None and value is not False and value not in ("", [], {}):
                raise ValueError(
                    f"{name} = {reprlib.repr(value)} is not known for this family, and may change what the model "
                    "computes; if it does not, take it out"
                )
        return sorted(self._unread)


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """A tensor of transformers' model, and the tensors of ours that it holds.

    Attributes:
        theirs: transformers' name, in which `{layer}` stands for the number of a layer.
        ours: the names of our tensors that it holds, one below the other (along the first axis of ours).
        transposed: whether it is stored as the transpose of ours.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def of_layer(self, layer: int) -> "TensorRule":
        ours = tuple(name.format(layer=layer) for name in self.ours)
        return TensorRule(theirs=self.theirs.format(layer=layer), ours=ours, transposed=self.transposed)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        architecture: the name of its class in transformers.
        model_type: its name in a config.json.
        read: gives our configuration's fields, from transformers' keys. Raises ValueError for what is not supported.
        write: gives transformers' keys, from our configuration, with those that are the same for all of the family.
        rules: a rule for each tensor that a model of the family may have, with `{layer}` in the names of layers'.
        no_tensors: name endings of tensors that files may hold and no model needs: masks and tables.
        prefix: the beginning of all transformers' names except the head's; some files leave it out.
        special_tokens: transformers' defaults for keys that a configuration does not have (known.py).
    """

    architecture: str
    model_type: str
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: tuple[TensorRule, ...]
    no_tensors: tuple[str, ...]
    prefix: str
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def with_biases(self, model: ModelConfig) -> ModelConfig:
        """The model with all biases that this family would have in its place. Those that it lacks stand for zeros."""
        own = self.read(Keys(self.write(dataclasses.replace(model, max_positions=model.max_positions or 1))))
        biases: dict[str, Any] = {name: True for name in BIASES if own.get(name)}
        return dataclasses.replace(model, **biases)

    def tensors(self, model: ModelConfig, ours: Mapping[str, Any]) -> Iterator[TensorRule]:
        """The rules for the tensors that a model has, layer by layer. `ours` are all tensors of the model, by our
        names; rules for others are left out."""
        for rule in self.rules:
            is_layered = "{layer}" in rule.theirs
            for one in (rule.of_layer(layer) for layer in range(model.num_layers)) if is_layered else (rule,):
                if one.ours[0] in ours:
                    yield one
