"""Processes of a bench wait for each other's files."""

import asyncio
import os
from pathlib import Path

from scripts.benches.shared import meeting


async def test_who_waits_reads_what_all_have_written(tmp_path: Path) -> None:
    paths = [tmp_path / f"{member}.record" for member in range(2)]
    waiting = asyncio.create_task(meeting.all_there(paths))
    meeting.put(paths[0], "one")
    await asyncio.sleep(0)
    assert not waiting.done()
    meeting.put(paths[1], "two")
    assert await asyncio.wait_for(waiting, timeout=10) == ["one", "two"]
    assert sorted(os.listdir(tmp_path)) == ["0.record", "1.record"], "no unfinished file stays"
