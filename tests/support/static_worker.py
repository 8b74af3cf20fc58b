"""One of several workers of swarm-static that run many meshes, one after another, so that torch is imported only once.

    python tests/support/static_worker.py NUMBER CASES

CASES is a JSON list of lists, which run one after another. Each inner list has groups of workers that run at the same
time, as [first worker, number of workers, port, command line]. If a run fails, the program ends with its exit code.
"""

import functools
import json
import os
import sys

from peers.shared.faults import run_program
from peers.shared.process import prepare_environment


def main(number: int, cases: list[list[tuple[int, int, int, list[str]]]]) -> None:
    prepare_environment()
    from peers.static import program
    from peers.static.options import PROG

    for groups in cases:
        for first, size, port, argv in groups:
            if first <= number < first + size:
                rank = str(number - first)
                world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
                os.environ.update({**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
                if code := run_program(PROG, functools.partial(program.main, argv)):
                    sys.exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
