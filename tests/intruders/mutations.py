"""Random changes of valid messages and bytes. The same seed gives the same changes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -1.0, 1e30, -1e30, 1e308, 5e-324, float("nan"), float("inf"), -float("inf"))
TEXTS = ("", "0", "x" * 5000, "\x00", "ä" * 40, "../../etc/passwd", "NaN")


def changed_message(message: Message, chance: random.Random) -> bytes:
    """A message with some fields set to wrong values."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(chance.randint(1, 3)):
        _change_field(changed, chance)
    return changed.SerializeToString()


def _change_field(message: Message, chance: random.Random) -> None:
    field: FieldDescriptor = chance.choice(message.DESCRIPTOR.fields)  # type: ignore[assignment]  # The stubs are vague.
    if field.is_repeated:
        _change_list(message, field, chance)
    elif field.message_type is not None:
        if chance.random() < 0.2:
            message.ClearField(field.name)
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            if inner.DESCRIPTOR.fields:
                _change_field(inner, chance)
    else:
        _set(message, field, chance)


def _change_list(message: Message, field: FieldDescriptor, chance: random.Random) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    values: Any = getattr(message, field.name)
    match chance.randrange(3):
        case 0:
            message.ClearField(field.name)
        case 1 if field.message_type is not None:
            _change_field(values.add(), chance)
        case _ if field.message_type is None:
            values.extend(_scalar(field, chance) for _ in range(chance.choice((1, 3, 1000))))


def _set(message: Message, field: FieldDescriptor, chance: random.Random) -> None:
    setattr(message, field.name, _scalar(field, chance))


def _scalar(field: FieldDescriptor, chance: random.Random) -> Any:
    kinds = FieldDescriptor
    match field.cpp_type:
        case kinds.CPPTYPE_STRING:
            text = chance.choice(TEXTS)
            return text.encode() if field.type == kinds.TYPE_BYTES else text
        case kinds.CPPTYPE_DOUBLE | kinds.CPPTYPE_FLOAT:
            return chance.choice(FLOATS)
        case kinds.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case kinds.CPPTYPE_UINT64:
            low, high = 0, 2**64 - 1
        case kinds.CPPTYPE_UINT32:
            low, high = 0, 2**32 - 1
        case kinds.CPPTYPE_INT64:
            low, high = -(2**63), 2**63 - 1
        case _:
            low, high = -(2**31), 2**31 - 1
    return chance.choice([number for number in NUMBERS if low <= number <= high])


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    """The bytes with flipped bits, or with a piece cut out, doubled or overwritten."""
    changed = bytearray(data or b"\x00")
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(changed))
        end = min(len(changed), start + chance.choice((1, 2, 8, 64)))
        match chance.randrange(5):
            case 0:
                changed[start] ^= 1 << chance.randrange(8)
            case 1:
                changed[start:end] = chance.randbytes(end - start)
            case 2:
                del changed[start:end]
            case 3:
                changed[start:start] = changed[start:end]
            case _:
                changed = changed[: start + 1]
        changed = changed or bytearray(b"\x00")
    return bytes(changed)


def mutant(message: Message, chance: random.Random) -> bytes:
    """A changed message, changed bytes, or both."""
    kind: Sequence[Callable[[], bytes]] = (
        lambda: changed_message(message, chance),
        lambda: changed_bytes(message.SerializeToString(), chance),
        lambda: changed_bytes(changed_message(message, chance), chance),
    )
    return chance.choice(kind)()
