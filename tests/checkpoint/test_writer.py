"""Writing checkpoints round after round: which files stay in the folder, also after a kill or on a full disk."""

import asyncio
import dataclasses
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from swarm.checkpoint import file
from swarm.checkpoint.folder import CheckpointFolder
from swarm.checkpoint.keeping import Keeping
from swarm.checkpoint.writer import CheckpointWriter
from swarm.stage.state import digest_of
from swarm.types import Block
from tests.checkpoint import kill_me
from tests.checkpoint.states import cut, header_of, shapes_of, train_round, trained, write_cut
from tests.support.commits import state_tensors


def _writer(folder: Path, *, every: int = 2, keep: int = 3, owner: str = "me") -> CheckpointWriter:
    return CheckpointWriter(folder, Keeping(every, keep), owner=owner)


async def _write(writer: CheckpointWriter, num_rounds: int, stage: int = 0) -> bool:
    weights = trained(cut(2), stage, num_rounds)
    return await writer.write(header_of(cut(2), stage, weights), state_tensors(weights))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _rounds(folder: Path, stage: int = 0) -> list[int]:
    return [name.round for name in file.names(folder) if name.stage == stage]


async def test_the_newest_few_stay_and_those_of_other_stages_are_left_alone(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "new" / "folder", keep=2)
    assert await _write(_writer(writer.folder), 2, stage=1)
    for number in (2, 4, 6, 8):
        assert await _write(writer, number)
    assert _rounds(writer.folder) == [6, 8]
    assert _rounds(writer.folder, stage=1) == [2]
    assert writer.newest_round(Block(0)) == 8


async def test_a_state_of_no_numbers_pushes_out_no_good_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = _writer(tmp_path, keep=1)
    assert await _write(writer, 2)
    weights = trained(cut(2), 0, 4)
    poisoned = state_tensors(weights)
    next(iter(poisoned.values())).view(-1)[0] = float("nan")
    assert not await writer.write(header_of(cut(2), 0, weights), poisoned)
    assert "no checkpoint of round 4: the state holds NaN or infinity" in caplog.text
    assert _names(tmp_path) == ["stage-0-of-2.round-2.safetensors"]
    assert writer.newest_round(Block(0)) == 2


def test_what_nobody_will_finish_is_removed(tmp_path: Path) -> None:
    """A peer removes its own file at once, and another's only if it has not changed for long."""
    names = {owner: tmp_path / f".stage-0-of-2.round-4.safetensors.{owner}.tmp" for owner in ("own", "old", "busy")}
    for path in names.values():
        path.write_text("half")
    os.utime(names["old"], (0, time.time() - file.ABANDONED_SECONDS - 1))
    CheckpointWriter(tmp_path, Keeping(every=1), owner="own")
    assert list(tmp_path.iterdir()) == [names["busy"]]


async def test_those_written_on_leaving_do_not_displace_the_regular_ones(tmp_path: Path) -> None:
    """Otherwise some restarts would leave no round that all stages have."""
    writer = _writer(tmp_path, keep=2)
    for number in (2, 4, 5, 7):
        assert await _write(writer, number)
    assert _rounds(tmp_path) == [2, 4, 7]


async def test_those_from_when_another_number_of_rounds_lay_between_them_stay_until_as_many_are_newer(
    tmp_path: Path,
) -> None:
    for number in (2, 4, 6, 8):
        assert await _write(_writer(tmp_path, keep=4), number)
    writer = _writer(tmp_path, every=10, keep=3)
    assert await _write(writer, 9)
    assert _rounds(tmp_path) == [4, 6, 8, 9]
    for number in (10, 20, 30):
        assert await _write(writer, number)
    assert _rounds(tmp_path) == [9, 10, 20, 30]


async def test_a_round_that_comes_while_one_is_written_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = _writer(tmp_path)
    writing = asyncio.create_task(_write(writer, 2))
    await asyncio.sleep(0)
    assert not writer.is_due(4)
    assert "no checkpoint of round 4: an earlier one is still being written" in caplog.text
    assert await writing
    assert writer.is_due(6)


async def test_a_folder_that_cannot_be_written_to_costs_a_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    writer = _writer(folder)
    assert await _write(writer, 2)
    folder.rename(tmp_path / "away")
    assert not await _write(writer, 4)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.getMessage().startswith(f"no checkpoint of round 4 in {folder}: ")
    assert writer.fault == line.getMessage()
    (tmp_path / "away").rename(folder)
    assert (_rounds(folder), writer.newest_round(Block(0))) == ([2], 2)
    assert await _write(writer, 6)
    assert (_rounds(folder), writer.fault) == ([2, 6], "")


async def test_a_run_that_went_back_leaves_no_later_rounds_to_be_mixed_in(tmp_path: Path) -> None:
    for number in (2, 4, 6, 8):
        write_cut(tmp_path, cut(2), number)
    first, second = _writer(tmp_path), _writer(tmp_path, owner="other")
    first.went_back(cut(2), 4)
    assert _rounds(tmp_path, stage=0) == _rounds(tmp_path, stage=1) == [2, 4]
    second.went_back(cut(2), 4)
    assert len([name for name in _names(tmp_path) if name.endswith(".set-aside")]) == 4


async def test_no_checkpoint_is_replaced_by_one_of_another_branch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost stage began anew. Its former checkpoint is still there, under another name."""
    path, _ = write_cut(tmp_path, cut(2), 4)
    learnt = path.read_bytes()
    anew = trained(cut(2), 0, 4)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in state_tensors(anew).items()}
    for lineage in ("anew", "anew", "and once more"):
        header = dataclasses.replace(header_of(cut(2), 0, anew), lineage=lineage)
        assert await _writer(tmp_path).write(header, tensors)
        assert file.read_header(path, cut(2)).lineage == lineage
    aside = path.with_name(f"{path.name}.set-aside")
    assert aside.read_bytes() == learnt
    assert file.lineage(path.with_name(f"{path.name}.2.set-aside")) == "anew"
    assert len(_names(tmp_path)) == 4, "the same one once more takes its own place"
    assert f"{path} is of another branch of the run: it is kept, as {aside.name}" in caplog.text


async def test_what_lies_ahead_of_the_first_one_written_is_no_future_of_this_run(tmp_path: Path) -> None:
    """A peer that had been at a later round is back, and has downloaded the state of the others."""
    for number in (2, 6, 8):
        write_cut(tmp_path, cut(2), number)
    writer = _writer(tmp_path, keep=3)
    assert await _write(writer, 4)
    assert _rounds(tmp_path, stage=0) == [2, 4]
    assert _rounds(tmp_path, stage=1) == [2, 6, 8], "nothing is known of another stage"
    assert await _write(writer, 6)
    assert await _write(writer, 8)
    assert _rounds(tmp_path, stage=0) == [4, 6, 8]


async def test_peers_that_share_a_folder_write_the_same_file(tmp_path: Path) -> None:
    writers = [_writer(tmp_path, owner=owner) for owner in ("one", "two", "three")]
    for number in (2, 4):
        assert all(await asyncio.gather(*(_write(writer, number) for writer in writers)))
    assert _names(tmp_path) == ["stage-0-of-2.round-2.safetensors", "stage-0-of-2.round-4.safetensors"]
    restored = CheckpointFolder(tmp_path, cut(2)).restore(Block(0), shapes_of(trained(cut(2), 0, 0)))
    assert restored is not None
    assert digest_of(restored.tensors) == digest_of(trained(cut(2), 0, 4).state())


async def test_the_copy_that_is_written_is_not_touched_by_training(tmp_path: Path) -> None:
    weights = trained(cut(2), 0, 2)
    header, tensors = header_of(cut(2), 0, weights), state_tensors(weights)
    writing = asyncio.create_task(_writer(tmp_path).write(header, tensors))
    while not writing.done():
        train_round(weights)
        await asyncio.sleep(0)
    assert writing.result()
    restored = CheckpointFolder(tmp_path, cut(2)).restore(Block(0), shapes_of(weights))
    assert restored is not None
    assert digest_of(restored.tensors) == digest_of(trained(cut(2), 0, 2).state())


@pytest.mark.parametrize(
    ("num_kills", "least_half_written"),
    # On a busy machine, a few kills may all miss the right moment.
    [(6, 0), pytest.param(200, 20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
    ids=["some", "many"],
)
def test_a_death_at_any_moment_leaves_all_that_was_acknowledged(
    tmp_path: Path, num_kills: int, least_half_written: int
) -> None:
    """After kill -9 at random moments, every start finds a whole file, no older than the last acknowledged one."""
    chance = random.Random(num_kills)
    acknowledged = num_half_written = 0
    write_seconds = 0.02
    command, root = [sys.executable, "-m", "tests.checkpoint.kill_me"], Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        for _ in range(num_kills):
            print(tmp_path, file=host.stdin, flush=True)
            said: dict[str, int] = {}
            least = {"child": 1, "found": acknowledged, "wrote": acknowledged + chance.randrange(3)}
            while not all(said.get(word, -1) >= number for word, number in least.items()):
                began_at = time.perf_counter()
                word, number = host.stdout.readline().split()
                if word == "wrote":
                    write_seconds = 0.5 * (write_seconds + time.perf_counter() - began_at)
                said[word] = int(number)
                said["wrote"] = max(said.get("wrote", -1), said.get("found", -1))
            assert said["found"] >= acknowledged
            time.sleep(chance.uniform(0.0, 1.5 * write_seconds))
            os.kill(said["child"], signal.SIGKILL)
            while (line := host.stdout.readline().split()) != ["dead"]:
                said[line[0]] = int(line[1])
            acknowledged = said["wrote"]
            num_half_written += bool(list(tmp_path.glob(".*.tmp")))
        host.stdin.close()
        assert host.wait() == 0
    restored = CheckpointFolder(tmp_path, kill_me.CONFIG).restore(Block(0), kill_me.SHAPES)
    assert restored is not None
    assert restored.round >= acknowledged > num_kills // 2, num_half_written
    assert num_half_written >= least_half_written, "it was killed in the middle of writing, too"


_HANGS = """
import asyncio, sys, threading
from contextlib import suppress
from pathlib import Path
from swarm.checkpoint import file
from swarm.checkpoint.keeping import Keeping
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig
from swarm.types import Block

async def write():
    header = file.Header(
        config=RunConfig(), stage=0, round=2, run_samples=0, lineage="", highest_microbatch=0, state_digest=""
    )
    with suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await CheckpointWriter(Path(sys.argv[1]), Keeping(every=2), owner="me").write(header, {})
    print("gave up")

file.write = lambda *_, **__: threading.Event().wait()
asyncio.run(write())
"""


def test_a_process_whose_disk_hangs_ends_when_it_wants_to(tmp_path: Path) -> None:
    command, root = [sys.executable, "-c", _HANGS, str(tmp_path)], Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=True)
    assert result.stdout == "gave up\n"


async def test_another_run_s_checkpoints_are_neither_deleted_nor_mixed_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_cut(tmp_path, dataclasses.replace(cut(2), run="another"), 2)
    before = _names(tmp_path)
    writer = _writer(tmp_path, keep=1)
    writer.went_back(cut(2), 0)
    assert not await _write(writer, 4)
    assert _names(tmp_path) == before
    assert "is of another run (run is 'another' in it" in caplog.text
