"""scripts/bench NAME [--json] [options]: run a bench and print its figures.

A bench is a module beside this one, with a class `Options`, a function `run(options) -> figures`, and JUDGED, which
figures `compare` judges. The figures of every bench have `others_cpu_share`: the share of this machine's cores that
other processes used during the bench.
"""

import sys

from peers.shared import faults, process
from scripts.benches.catalogue import MEASURING, module_of
from scripts.benches.menu import run_named

PROG = "scripts/bench"
BENCHES = {
    **MEASURING,
    "all": "every bench, into one file (takes hours)",
    "compare": "two files of figures: what changed, and what got worse",
}


def main() -> int:
    """Run the bench that the command line names, and return the exit code."""
    return run_named(PROG, "benches", BENCHES, module_of, measuring=MEASURING)


if __name__ == "__main__":
    process.prepare_environment()
    sys.exit(faults.run_program(PROG, main))
