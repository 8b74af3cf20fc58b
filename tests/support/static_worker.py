"""Several workers of swarm-static that run many meshes, one after another. They are forked from one process once it has
imported torch, so that this is done only once.

    python tests/support/static_worker.py FOLDER CASES

Each worker writes to FOLDER/worker-NUMBER.log. CASES is a JSON list of lists, which run one after another. Each inner
list has groups of workers that run at the same time, as [first worker, number of workers, port, command line]. If a run
fails, the program ends with its exit code, and so do the other workers.
"""

import contextlib
import functools
import json
import os
import sys
from pathlib import Path

from peers.shared.process import die_with_parent, prepare_environment
from peers.shared.stopping import run_program


def main(folder: Path, cases: list[list[tuple[int, int, int, list[str]]]]) -> int:
    prepare_environment()
    from peers.static import program
    from peers.static.options import PROG

    def work(number: int) -> int:
        for groups in cases:
            for first, size, port, argv in groups:
                if first <= number < first + size:
                    rank = str(number - first)
                    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
                    os.environ.update({**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
                    if code := run_program(PROG, functools.partial(program.main, argv)):
                        return code
        return 0

    # A thread would not be there after a fork, and what it had locked would stay locked.
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread while it was imported"
    parent = os.getpid()
    for number in range(max(first + size for groups in cases for first, size, _, _ in groups)):
        if os.fork() == 0:
            die_with_parent(parent)()
            log = os.open(folder / f"worker-{number}.log", os.O_WRONLY | os.O_CREAT)
            for output in (1, 2):
                os.dup2(log, output)
            return work(number)
    with contextlib.suppress(ChildProcessError):
        while True:
            _, status = os.wait()
            if code := os.waitstatus_to_exitcode(status):
                return code  # This ends the others.
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
