"""Whether the numbers and lists in a message are such as anybody could mean.

Used by guard for every request, and by whoever reads answers of peers. What passes can be added up and sent on without
overflowing, and lists cost the reader little. Knows nothing of what the fields are for; bytes are not looked at.
"""

import math
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swarm.errors import MalformedMessage

LARGEST = 1 << 48
"""Of rounds, samples, microbatches, attempts and sizes: so far nobody counts."""
LONGEST = 1 << 18
"""Of lists: a byte an entry on the wire is a hundred in memory."""
LONGEST_OF_MESSAGES = 1 << 14
"""Of lists of messages: each entry is looked at by itself, for microseconds, while nothing else is done."""

_INTEGERS = (
    FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)  # fmt: skip


def require_bounds(message: Any, *, finite: bool) -> None:
    """Raise MalformedMessage for a number or a list that is too large, here or in a message inside.

    Args:
        finite: whether NaN and infinity are refused as well.
    """
    for name, kind, is_repeated in _fields(message.DESCRIPTOR):
        values: Any = getattr(message, name) if is_repeated else [getattr(message, name)]
        longest = LONGEST_OF_MESSAGES if kind == "message" else LONGEST
        if len(values) > longest:
            raise MalformedMessage(f"{name} has {len(values)} entries, at most {longest} are taken")
        if kind == "integer":
            if values and not -LARGEST <= min(values) <= max(values) <= LARGEST:
                raise MalformedMessage(f"{name} is beyond {LARGEST}")
        elif kind == "float":
            if finite and not all(map(math.isfinite, values)):
                raise MalformedMessage(f"{name} is not a finite number")
        elif kind == "message" and (is_repeated or message.HasField(name)):
            for value in values:
                require_bounds(value, finite=finite)


@lru_cache(maxsize=256)
def _fields(descriptor: Descriptor) -> list[tuple[str, str, bool]]:
    """Name, kind and whether it is a list, of all fields that are looked at."""
    found = []
    for field in descriptor.fields:
        kind = _kind(field)
        if kind and not (field.message_type is not None and field.message_type.GetOptions().map_entry):
            found.append((field.name, kind, field.is_repeated))
    return found


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return "message"
    if field.cpp_type in _INTEGERS:
        return "integer"
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return "float"
    return "text" if field.is_repeated and field.type == FieldDescriptor.TYPE_STRING else ""
