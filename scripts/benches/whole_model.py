"""A process that trains the whole model by itself: what the pipeline bench compares a swarm with.

    python -m scripts.benches.whole_model CONFIG FOLDER THREADS STEPS

Trains a step to warm up, and stops itself (SIGSTOP) whenever it has nothing to do, so that it takes no time from the
others. Each time the bench continues it, it trains STEPS steps and writes FOLDER/N.json with their seconds.
"""

import itertools
import signal
import sys
import time
from pathlib import Path

import torch

from scripts.benches.common import with_corpus, write_json
from scripts.benches.reference import Reference
from swarm import config as configs


def main(config_path: Path, folder: Path, threads: int, steps: int) -> None:
    """Train on request, until killed."""
    torch.set_num_threads(threads)
    reference = Reference(*with_corpus(configs.load(config_path)))
    reference.step(0)
    numbers = itertools.count(1)
    for repetition in itertools.count():
        signal.raise_signal(signal.SIGSTOP)
        start = time.perf_counter()
        for _ in range(steps):
            reference.step(next(numbers))
        write_json(folder / f"{repetition}.json", {"seconds": time.perf_counter() - start})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
