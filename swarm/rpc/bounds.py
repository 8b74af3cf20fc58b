"""Bounds on the numbers and lists in a message; those of an honest peer are always within them.

Every message of every stream is checked here. So texts and bytes, of which many messages consist, are not looked at.
"""

from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swarm.errors import MalformedMessage
from swarm.types import LARGEST_COUNT, LARGEST_NUMBER

LONGEST_LIST = 1 << 18
"""The most entries of a list. An entry may take one byte on the wire and a hundred in memory."""
LONGEST_MESSAGE_LIST = 1 << 14
"""The most entries of a list of messages. Each takes microseconds to look at, and the event loop waits meanwhile."""

CHUNK_BYTES = 1 << 20
"""Most bytes of a tensor in one chunk. A message is sent once it has this many, so it has less than twice as many."""
SMALL_CHUNK_BYTES = 64 << 10
"""The same where the line may be slow, so that each message is a sign of life."""

_INTEGERS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
"""The types of integers whose values can be beyond LARGEST_COUNT."""
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)

_Fields = tuple[tuple[str, str, bool, Any], ...]
"""For each field to look at: its name, its kind, whether it is a list, and the fields of the messages that it holds."""


def require_bounds(message: Any, *, finite: bool) -> None:
    """Raise MalformedMessage if a number or a list is too large, in a message or in one inside it. `finite` says
    whether NaN, infinity and numbers beyond LARGEST_NUMBER are refused as well."""
    _look(message, looked_at(message.DESCRIPTOR), finite)


def num_entries(request: Any) -> int:
    """The number of entries in the lists of messages of a unary request. Its entries themselves have no such lists."""
    inner = [
        (getattr(request, name), many) for name, kind, many, _ in looked_at(request.DESCRIPTOR) if kind == "message"
    ]
    return sum(len(message) if is_list else num_entries(message) for message, is_list in inner)


def _look(message: Any, fields: _Fields, finite: bool) -> None:
    for name, kind, is_list, inner in fields:
        if is_list:
            _look_at_list(name, kind, getattr(message, name), inner, finite)
        elif kind == "message":
            if message.HasField(name):
                _look(getattr(message, name), inner, finite)
        elif kind == "integer":
            if not -LARGEST_COUNT <= getattr(message, name) <= LARGEST_COUNT:
                raise MalformedMessage(f"{name} is beyond {LARGEST_COUNT}")
        elif finite and not abs(getattr(message, name)) <= LARGEST_NUMBER:
            raise MalformedMessage(f"{name} is no number within {LARGEST_NUMBER:g}")


def _look_at_list(name: str, kind: str, values: Any, inner: _Fields, finite: bool) -> None:
    longest = LONGEST_MESSAGE_LIST if kind in ("message", "map") else LONGEST_LIST
    if len(values) > longest:
        raise MalformedMessage(f"{name} has {len(values)} entries, at most {longest} are taken")
    if kind == "map":  # All that there are have counts by name.
        values, kind = list(values.values()), "integer"
    if kind == "integer":
        if values and not -LARGEST_COUNT <= min(values) <= max(values) <= LARGEST_COUNT:
            raise MalformedMessage(f"{name} is beyond {LARGEST_COUNT}")
    elif kind == "float":
        if finite and not all(abs(value) <= LARGEST_NUMBER for value in values):
            raise MalformedMessage(f"{name} has an entry that is no number within {LARGEST_NUMBER:g}")
    elif inner:
        for value in values:
            _look(value, inner, finite)


@lru_cache(maxsize=256)
def looked_at(descriptor: Descriptor) -> _Fields:
    """Those fields of one kind of message that can be out of bounds."""
    found: list[tuple[str, str, bool, Any]] = []
    for field in descriptor.fields:
        kind = _kind(field)
        inner = looked_at(field.message_type) if kind == "message" else ()
        if (field.is_repeated and kind) or inner or kind in ("integer", "float"):
            found.append((field.name, kind, field.is_repeated, inner))
    return tuple(found)


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return "map" if field.message_type.GetOptions().map_entry else "message"
    if field.cpp_type in _INTEGERS:
        return "integer"
    if field.cpp_type in _FLOATS:
        return "float"
    return "other"
