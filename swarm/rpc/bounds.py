"""Bounds on the numbers and lists in a message, beyond which no honest peer's are.

Used by guard for every request, and by callers for answers of peers. What passes can be added up and sent on without
overflowing, and its lists cost the reader little. Knows nothing of what the fields are for. Looks at numbers and lists
alone: every message of every stream passes here, and many have more text and bytes than numbers.
"""

import math
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swarm.errors import MalformedMessage
from swarm.types import LARGEST_COUNT

LONGEST_LIST = 1 << 18
"""Entries of a list: one takes a byte on the wire and a hundred in memory."""
LONGEST_MESSAGE_LIST = 1 << 14
"""Entries of a list of messages: each is looked at by itself, for microseconds, while nothing else is done."""

_INTEGERS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
"""The integers that can be beyond LARGEST_COUNT."""
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)

_Fields = tuple[tuple[str, str, bool, Any], ...]
"""Name and kind of each field that is looked at, whether it is a list, and the fields of the message in it."""


def require_bounds(message: Any, *, finite: bool) -> None:
    """Raise MalformedMessage if a number or a list is too large, in a message or in one inside it.

    Args:
        finite: whether NaN and infinity are refused as well.
    """
    _look(message, looked_at(message.DESCRIPTOR), finite)


def num_entries(request: Any) -> int:
    """Entries of all lists of messages in a request that comes as a whole; messages inside it have no such lists."""
    return sum(
        len(getattr(request, name))
        for name, kind, is_list, _ in looked_at(request.DESCRIPTOR)
        if is_list and kind == "message"
    )


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
        elif finite and not math.isfinite(getattr(message, name)):
            raise MalformedMessage(f"{name} is not a finite number")


def _look_at_list(name: str, kind: str, values: Any, inner: _Fields, finite: bool) -> None:
    longest = LONGEST_MESSAGE_LIST if kind == "message" else LONGEST_LIST
    if len(values) > longest:
        raise MalformedMessage(f"{name} has {len(values)} entries, at most {longest} are taken")
    if kind == "integer":
        if values and not -LARGEST_COUNT <= min(values) <= max(values) <= LARGEST_COUNT:
            raise MalformedMessage(f"{name} is beyond {LARGEST_COUNT}")
    elif kind == "float":
        if finite and not all(map(math.isfinite, values)):
            raise MalformedMessage(f"{name} is not a finite number")
    elif inner:
        for value in values:
            _look(value, inner, finite)


@lru_cache(maxsize=256)
def looked_at(descriptor: Descriptor) -> _Fields:
    """The fields of a kind of message that can be out of bounds."""
    found: list[tuple[str, str, bool, Any]] = []
    for field in descriptor.fields:
        kind = _kind(field)
        inner = looked_at(field.message_type) if kind == "message" else ()
        if (field.is_repeated and kind) or inner or kind in ("integer", "float"):
            found.append((field.name, kind, field.is_repeated, inner))
    return tuple(found)


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return "" if field.message_type.GetOptions().map_entry else "message"
    if field.cpp_type in _INTEGERS:
        return "integer"
    if field.cpp_type in _FLOATS:
        return "float"
    return "other"
