"""Which stages fit into the memory that one process may have."""

from collections.abc import Mapping

import pytest

from peers.shared.needs import PROGRAM_BYTES, Needs
from peers.shared.room import Room
from tests.peers.shared.rooms import GIB, some_needs

EACH = {stage: some_needs(gib, turns_gib=1.0) for stage, gib in enumerate((4.0, 2.0, 3.0))}


def _room(each: Mapping[int, Needs], gib: float, ram_gib: float = 64.0) -> Room:
    return Room(device="cuda:0", device_bytes=int(gib * GIB), ram_bytes=int(ram_gib * GIB), each=each)


@pytest.mark.parametrize(
    ("gib", "spans"),
    [
        (1.9, []),
        (2.0, [range(1, 2)]),
        (4.0, [range(1), range(1, 2), range(1, 3), range(2, 3)]),
        (5.0, [range(1), range(2), range(1, 2), range(1, 3), range(2, 3)]),
        (7.0, [range(1), range(2), range(3), range(1, 2), range(1, 3), range(2, 3)]),
    ],
)
def test_spans_that_fit_are_adjacent_and_take_turns(gib: float, spans: list[range]) -> None:
    assert _room(EACH, gib).spans == spans


def test_a_gpu_needs_ram_beside_it_and_the_program_is_there_once() -> None:
    each = {stage: some_needs(1.0, 2.0) for stage in range(2)}
    both = 4.0 - PROGRAM_BYTES / GIB
    assert _room(each, 8.0, both).spans == [range(1), range(2), range(1, 2)]
    assert _room(each, 8.0, both - 0.1).spans == [range(1), range(1, 2)]
    assert _room(each, 8.0, 1.0).fault(range(2)) == (
        "stages 0 to 1 take 2.0 GiB or more, and 8.0 GiB of cuda:0 are there; beside it 3.5 GiB of RAM, and 1.0 GiB "
        "are there: close other programs, take a run with more stages, or another --device"
    )
