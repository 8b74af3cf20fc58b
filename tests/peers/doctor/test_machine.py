"""The findings about a machine: judgements of made-up figures, and checks of this machine."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from peers.doctor import machine
from peers.doctor.finding import State
from peers.shared.devices import Device
from peers.shared.room import Room
from tests.peers.shared.rooms import some_needs

GIB = 1 << 30
CPU = Device(name="cpu", free_bytes=7 * GIB, own_bytes=GIB)


@pytest.mark.parametrize(
    ("gib", "span", "state", "text"),
    [
        ([2.0], range(1), State.FINE, "stage 0 takes 2.0 GiB or more, and 8.0 GiB of cpu are there"),
        (
            [9.0, 4.0, 2.0], None, State.FINE,
            "a stage takes 2.0 GiB to 9.0 GiB or more, and 8.0 GiB of cpu are there: --stage auto takes 1 or 2",
        ),
        (
            [9.0, 4.0], range(1), State.WRONG,
            "stage 0 takes 9.0 GiB or more, and 8.0 GiB of cpu are there: take --stage 1, which fits, or a run with "
            "more stages",
        ),
    ],
)  # fmt: skip
def test_memory(gib: Sequence[float], span: range | None, state: State, text: str) -> None:
    each = dict(enumerate(map(some_needs, gib)))
    room = Room(device=CPU.name, device_bytes=CPU.all_bytes, ram_bytes=CPU.all_bytes, each=each)
    finding = machine.judge_memory(room, span)
    assert (finding.state, finding.text) == (state, text)


def test_disk(tmp_path: Path) -> None:
    assert machine.disk(tmp_path / "not" / "yet", 1, "they").state is State.FINE
    finding = machine.judge_disk(tmp_path, 2 * GIB, GIB, "4 checkpoints")
    assert finding.state is State.WRONG
    assert f"1.0 GiB are free in {tmp_path}, and 4 checkpoints take 2.0 GiB: make room" in finding.text
