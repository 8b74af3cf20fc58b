"""scripts/simulate NAME [--json] [options]: run a study on virtual time and print its figures.

A study is a module of studies/, with a class `Options` and a function `run(options) -> figures`.
"""

import sys
from importlib import import_module

from peers.shared import faults, process
from scripts.benches.menu import run_named

PROG = "scripts/simulate"
STUDIES = {
    "rebalancing": "400 peers that come and go: what each rule keeps of the best throughput",
    "bandwidth": "the line that DiLoCo and its kin need, as Streaming DiLoCo's table has it, and ours",
    "routing": "throughput and tail latency of ways to choose a peer, under failures",
    "utilisation": "how busy peers are over slow lines: SWARM's table, and direct hand-off against the trainer's",
    "validate": "the simulator against a real local swarm (slow)",
}


def main() -> int:
    """Run the study that the command line names, and return the exit code."""
    return run_named(PROG, "studies", STUDIES, lambda name: import_module(f"scripts.benches.simulate.studies.{name}"))


if __name__ == "__main__":
    process.prepare_environment()
    sys.exit(faults.run_program(PROG, main))
