"""scripts/simulate NAME [--json] [options]: run a study on virtual time and print its figures.

A study is a module of studies/, with a class `Options` and a function `run(options) -> figures`.
"""

import sys
from importlib import import_module

from peers.shared import process, stopping
from scripts.benches.menu import run_named

PROG = "scripts/simulate"
STUDIES = {
    "averaging": "how a stage's rounds end while its members die: in one group, as now, and in groups",
    "rebalancing": "400 peers that come and go: what each rule keeps of the best throughput",
    "routing": "throughput and tail latency of ways to choose a peer, under failures",
    "spans": "peers of capacities 1 : 4 : 16 that choose their stages: what is used, and how soon after a change",
}


def main() -> int:
    return run_named(PROG, "studies", STUDIES, lambda name: import_module(f"scripts.benches.simulate.studies.{name}"))


if __name__ == "__main__":
    process.prepare_environment()
    sys.exit(stopping.run_program(PROG, main))
