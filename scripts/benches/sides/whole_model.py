"""A process that trains the whole model by itself: what the pipeline bench compares a swarm with.

    python -m scripts.benches.sides.whole_model CONFIG FOLDER THREADS STEPS

Warms up with a microbatch and a step; then each turn (see ../shared/turns.py) trains STEPS steps.
"""

import itertools
import sys
from pathlib import Path

from scripts.benches.shared.common import compute_like_peers, with_corpus
from scripts.benches.shared.turns import take_turns
from scripts.benches.sides.reference import Reference
from swarm import config as configs


def main(config_path: Path, folder: Path, threads: int, steps: int) -> None:
    """Train on request, until killed."""
    compute_like_peers(threads)
    reference = Reference(*with_corpus(configs.load(config_path)))
    reference.warm_up()
    numbers = itertools.count()

    def work() -> None:
        for number in itertools.islice(numbers, steps):
            reference.step(number)

    take_turns(folder, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
