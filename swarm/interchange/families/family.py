"""What it takes to read and write a family of models: its configuration's keys and its tensors' names, and ours.

A family's file is a table of these. Import reads it in one direction, export in the other. A key of a configuration
that no table knows is refused: it may change what the model computes.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.config import ModelConfig

HARMLESS = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Keys that say nothing of what the model computes. Dropout is the run's own choice."""
_LARGEST = 2**53
"""A number of a configuration; a float has every whole number up to this."""


class Keys:
    """A model's config.json, of which each key has to be read, expected to have a value, or known to be harmless."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._unread = set(values) - HARMLESS

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A value; `default` where it is missing or null, unless that is None.

        Raises:
            ValueError: it is missing and has no default, or is of another type.
        """
        self._unread.discard(name)
        value = self._values.get(name)
        value = default if value is None else value
        if kind in (int, float) and isinstance(value, int) and abs(value) > _LARGEST:
            raise ValueError(f"config.json: {name} is {reprlib.repr(value)}, which is too large")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"config.json: {name} is {reprlib.repr(value)}, and should be of type {kind.__name__}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """How many of something there are, or how wide it is; `default` as in get, whatever that is.

        Raises:
            ValueError: as get does, and for what is there and below 1.
        """
        value: int = self.get(name, int, default)
        if self._values.get(name) is not None and value < 1:
            raise ValueError(f"config.json: {name} is {value}, and should be at least 1")
        return value

    def has(self, name: str) -> bool:
        """Whether a key is there, be it null."""
        return name in self._values

    def expect(self, name: str, *allowed: Any) -> None:
        """Raise ValueError if a key is there and has a value other than these: only so far is it built."""
        self._unread.discard(name)
        value = self._values.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"config.json: {name} = {reprlib.repr(value)} is not supported, only {' or '.join(map(repr, allowed))}"
            )

    def section(self, name: str) -> "Keys | None":
        """An object within the configuration; None if it is missing or null."""
        self._unread.discard(name)
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError(f"config.json: {name} is {reprlib.repr(value)}, and should be an object")
        return Keys(value)

    def finish(self) -> None:
        """Raise ValueError naming a key that nobody has read: what it does to the model is not known here."""
        if self._unread:
            raise ValueError(
                f"config.json: the key {min(self._unread)!r} is not known for this family, and may change what the "
                "model computes"
            )


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """One of their tensors, and which of ours it is.

    Attributes:
        theirs: its name, `{layer}` standing for the number of a layer.
        ours: names of our tensors, which theirs has one below the other (along the first axis of ours).
        transposed: whether theirs is the transpose.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False

    def of_layer(self, layer: int) -> "TensorRule":
        """The rule for one layer."""
        ours = tuple(name.format(layer=layer) for name in self.ours)
        return TensorRule(theirs=self.theirs.format(layer=layer), ours=ours, transposed=self.transposed)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        architecture: the name of its class in transformers.
        model_type: its name in a config.json.
        read: our configuration's fields, from theirs. Raises ValueError for what is not supported.
        write: their keys, from our configuration; what is the same for all models of the family is among them.
        rules: of all tensors that any model of the family has; those of layers have `{layer}` in their names.
        no_tensors: ends of the names of what files may hold and no model needs: masks and tables.
        prefix: what is before all their names but the head's; some files leave it out.
        special_tokens: what transformers takes where a configuration does not have such a key (special_tokens.py).
    """

    architecture: str
    model_type: str
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: tuple[TensorRule, ...]
    no_tensors: tuple[str, ...]
    prefix: str
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def tensors(self, model: ModelConfig, ours: Mapping[str, Any]) -> Iterator[TensorRule]:
        """The rules for the tensors that a model has, layer by layer.

        Args:
            ours: all tensors of the model, by our names.
        """
        for rule in self.rules:
            is_layered = "{layer}" in rule.theirs
            for one in (rule.of_layer(layer) for layer in range(model.num_layers)) if is_layered else (rule,):
                if one.ours[0] in ours:
                    yield one
