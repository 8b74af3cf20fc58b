"""How the processes of a bench meet: each writes files into one folder, and waits for those of the others.

Used by sides of which several processes run. A file is there at once with all that is in it.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

_POLL_SECONDS = 0.05
"""Time between two looks for files of other processes."""


def put(path: Path, text: str) -> None:
    """Write a file for which other processes wait."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


async def all_there(paths: Iterable[Path]) -> list[str]:
    """Wait for files that other processes write; gives what is in them."""
    paths = list(paths)
    while not all(path.exists() for path in paths):  # noqa: ASYNC110 - what other processes do
        await asyncio.sleep(_POLL_SECONDS)
    return [path.read_text(encoding="utf-8") for path in paths]
