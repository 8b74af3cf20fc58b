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
        ([2.0, 4.0], None, State.FINE, "a stage takes 2.0 GiB to 4.0 GiB or more, and 8.0 GiB of cpu are there"),
        (
            [9.0, 4.0, 2.0], None, State.FINE,
            "a stage takes 2.0 GiB to 9.0 GiB or more, and 8.0 GiB of cpu are there: --stage auto takes 1 or 2",
        ),
        (
            [9.0, 4.0], range(1), State.WRONG,
            "stage 0 takes 9.0 GiB or more, and 8.0 GiB of cpu are there: take --stage 1, which fits, or a run with "
            "more stages",
        ),
        (
            [9.0, 9.0], None, State.WRONG,
            "a stage takes 9.0 GiB or more, and 8.0 GiB of cpu are there: close other programs, take a run with more "
            "stages, or another --device",
        ),
    ],
)  # fmt: skip
def test_memory(gib: Sequence[float], span: range | None, state: State, text: str) -> None:
    finding = machine.judge_memory([some_needs(one) for one in gib], Room.on(CPU), span)
    assert (finding.state, finding.text) == (state, text)


@pytest.mark.parametrize(
    ("limit", "num_peers", "state", "words"),
    [
        (1024, 3, State.FINE, "1024 may be open; about 216 are needed"),
        (None, 3, State.FINE, "any number may be open"),
        (256, 100, State.WRONG, "256 may be open, and about 992 are needed: ulimit -n 1984"),
    ],
)
def test_files(limit: int | None, num_peers: int, state: State, words: str) -> None:
    finding = machine.judge_files(limit, num_peers)
    assert finding.state is state
    assert words in finding.text


def test_disk(tmp_path: Path) -> None:
    assert machine.disk(tmp_path / "not" / "yet", 1, "they").state is State.FINE
    finding = machine.judge_disk(tmp_path, 2 * GIB, GIB, "4 checkpoints")
    assert finding.state is State.WRONG
    assert f"1.0 GiB are free in {tmp_path}, and 4 checkpoints take 2.0 GiB: make room" in finding.text


def test_this_machine_s_own() -> None:
    finding, device = machine.device("cpu")
    assert finding.state is State.FINE
    assert finding.text.startswith("cpu, ")
    assert device is not None
    assert device.free_bytes > 0
    finding, device = machine.device("abacus")
    assert (finding.state, device) == (State.WRONG, None)
    assert "--device abacus cannot be used" in finding.text
    assert machine.files(1).state is State.FINE


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n", "570.124.06"),
        ("", ""),
    ],
)
def test_the_driver_says_what_it_is(text: str, version: str) -> None:
    assert machine.driver_version(text) == version
