"""Writes checkpoints of a run in a child process, until test_writer kills it.

For every line on stdin, which names a folder, a child goes on from the folder's newest checkpoint, as a peer would. The
child prints `child PID`, `found ROUND`, and then `wrote ROUND` for each checkpoint that it has written. After its death
`dead` is printed.
"""

import asyncio
import os
import sys
from pathlib import Path

import torch

from swarm.checkpoint.file import Header
from swarm.checkpoint.folder import CheckpointFolder
from swarm.checkpoint.keeping import Keeping
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig, StagesConfig
from swarm.types import Block

CONFIG = RunConfig(stages=StagesConfig(num_stages=1))
SHAPES = {name: torch.Size([200_000]) for name in ("layers.0.weight", "layers.1.weight")}


def tensors_of(round_number: int) -> dict[str, torch.Tensor]:
    """The state of a round."""
    return {f"anchor/{name}": torch.full(shape, float(round_number)) for name, shape in SHAPES.items()}


def say(text: str) -> None:
    """Write a line at once, in one piece."""
    os.write(1, f"{text}\n".encode())


async def write_for_ever(folder: Path) -> None:
    """Write checkpoints until the process is killed."""
    restored = CheckpointFolder(folder, CONFIG).restore(Block(0), SHAPES)
    number = 0 if restored is None else restored.round
    if restored is not None:
        assert all(torch.equal(restored.tensors[name], value) for name, value in tensors_of(number).items())
    say(f"found {number}")
    writer = CheckpointWriter(folder, Keeping(every=1), owner="me")
    while True:
        number += 1
        header = Header(
            config=CONFIG, stage=0, round=number, run_samples=number, lineage="", highest_microbatch=-1,
            state_digest="",
        )  # fmt: skip
        assert await writer.write(header, tensors_of(number))
        say(f"wrote {number}")


def main() -> None:
    """Run one child after another."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            asyncio.run(write_for_ever(Path(line.strip())))
        say(f"child {child}")
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main()
