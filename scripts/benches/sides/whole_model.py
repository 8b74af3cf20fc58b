"""A process that trains the whole model by itself, in turns, for the bench `pipeline`.

python -m scripts.benches.sides.whole_model CONFIG FOLDER THREADS ROUNDS SAMPLED
"""

import itertools
import sys
import time
from pathlib import Path

from scripts.benches.shared.common import compute_like_peers, with_corpus
from scripts.benches.shared.paired import take_turns
from scripts.benches.sides.reference import Reference
from swarm import config as configs


def main(config_path: Path, folder: Path, threads: int, num_rounds: int, num_sampled: int) -> None:
    compute_like_peers(threads)
    config, data = with_corpus(configs.load(config_path))
    reference = Reference(config, data)
    reference.warm_up()
    numbers, indices = itertools.count(), itertools.count()

    def work() -> float:
        seconds = 0.0
        for number in itertools.islice(numbers, num_rounds):
            started_at = time.perf_counter()
            for index in itertools.islice(indices, num_sampled):
                reference.accumulate(index, 1 / (num_sampled * config.data.tokens_per_microbatch))
            computed_at = time.perf_counter()
            reference.update(number)
            seconds += (computed_at - started_at) * config.microbatches_per_round / num_sampled
            seconds += time.perf_counter() - computed_at
        return seconds

    take_turns(folder, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6]))
