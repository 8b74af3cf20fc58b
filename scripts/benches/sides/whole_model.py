"""A process that trains the whole model by itself, in turns, for the bench `pipeline`."""

import itertools
import time
from pathlib import Path

from scripts.benches.shared.common import compute_like_peers, with_corpus
from scripts.benches.shared.paired import take_turns
from scripts.benches.sides.reference import Reference
from swarm import config as configs


def main(config_path: Path, folder: Path, threads: int, num_sampled: int) -> None:
    compute_like_peers(threads)
    config, data = with_corpus(configs.load(config_path))
    reference = Reference(config, data)
    reference.warm_up()
    numbers, indices = itertools.count(), itertools.count()

    def work() -> float:
        """The seconds of a round, of which some microbatches are computed."""
        started_at = time.perf_counter()
        for index in itertools.islice(indices, num_sampled):
            reference.accumulate(index, 1 / (num_sampled * config.data.tokens_per_microbatch))
        computed_at = time.perf_counter()
        reference.update(next(numbers))
        seconds = (computed_at - started_at) * config.microbatches_per_round / num_sampled
        return seconds + time.perf_counter() - computed_at

    take_turns(folder, work)
