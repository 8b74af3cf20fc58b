"""The loss on held-out text, which peers of all stages compute along the paths of the run.

A sample may change its path every so many tokens (DiPaCo, arXiv 2403.10616, section 2.4: routing more often at
evaluation). Peers know nothing of that. What a window of a sample costs along a path is the loss of all tokens up to
the window's end there, less the loss of all up to its beginning, so that two shorter samples tell it.

Shape suffixes: B samples, T tokens, T1 = T + 1.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from torch import Tensor

from swarm.data.microbatches import HeldOut, HeldOutLoss, Microbatches, averaged
from swarm.data.path_router import NUM_TOKENS
from swarm.errors import Fatal, Overloaded
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.training import samples
from swarm.training.samples import TOKENS

CONCURRENCY = 4
"""How many chains of peers hold the round and compute at the same time."""


@dataclass(frozen=True)
class Along:
    """A path to evaluate along: the hop to its first block, and who hears where it waits."""

    path: int
    hop: Hop
    listener: HopListener


@dataclass(frozen=True)
class Rerouting:
    """How the samples of an evaluation change their paths.

    Attributes:
        choose: gives the number of the path of a sequence that begins with these tokens; it may compute for a while.
        every: so many targets, at least NUM_TOKENS, are a window, all of which has one path. That of a sample's first
            window is the path of its batch; that of a later one is chosen by the NUM_TOKENS before its first target.
    """

    choose: Callable[[Sequence[int]], int]
    every: int


@dataclass(frozen=True)
class _Term:
    """A sum of such terms is the mean loss of a batch: `weight` times the mean loss of these samples along a path."""

    batch: int
    samples: dict[str, Tensor]
    weight: float = 1.0


async def held_out_loss(
    alongs: Sequence[Along], data: Microbatches, *, round_number: int, num_samples: int,
    rerouting: Rerouting | None = None, evaluated: Callable[[int, int], None] = lambda done, of_all: None,
) -> HeldOutLoss:  # fmt: skip
    """Compute losses over about `num_samples` held-out samples, equally many of each dataset.

    Each dataset of `data.paths` is evaluated along its own paths, and left out if none of these is given; any other
    along all paths, batch by batch in turn. With `rerouting` a window whose chosen path is not given has the path of
    the window before it. Peers hold the round's weights meanwhile, so that the evaluation may take longer than a round.
    `evaluated` hears how many parts of the work are done, and how many there are. Raises Fatal if no chain of peers can
    hold that round, or not any more.
    """
    by_path = {along.path: along for along in alongs}
    sources, batches = list[HeldOut](), list[tuple[int, dict[str, Tensor]]]()
    for source in data.held_out_by_source(num_samples):
        if paths := [path for path in source.paths or by_path if path in by_path]:
            sources.append(source)
            batches += [(paths[number % len(paths)], batch) for number, batch in enumerate(source.batches)]
    if rerouting is None:
        terms = [(path, _Term(number, batch)) for number, (path, batch) in enumerate(batches)]
    else:
        terms = await asyncio.to_thread(lambda: list(_rerouted(batches, rerouting, by_path)))
    waiting: dict[int, list[_Term]] = {}
    for path, term in terms:
        waiting.setdefault(path, []).append(term)
    losses, room, done = [0.0] * len(batches), asyncio.Semaphore(CONCURRENCY), itertools.count(1)

    async def work(along: Along, own: Iterator[_Term]) -> None:
        async with room:
            with closing(await along.hop.hold(round_number, along.listener, path=along.path)) as hold:
                for term in own:
                    loss = await along.hop.evaluate(term.samples, hold.held, along.listener, path=along.path)
                    losses[term.batch] += term.weight * loss
                    evaluated(next(done), len(terms))

    try:
        async with asyncio.TaskGroup() as group:
            for path, own in waiting.items():
                remaining = iter(own)
                for _ in range(min(max(1, CONCURRENCY // len(waiting)), len(own))):
                    group.create_task(work(by_path[path], remaining))
    except* (Fatal, Overloaded) as failures:
        raise Fatal(f"evaluation at round {round_number}: {failures.exceptions[0]}") from None
    return averaged(sources, losses)


def _rerouted(
    batches: Sequence[tuple[int, dict[str, Tensor]]], rerouting: Rerouting, paths: Collection[int]
) -> Iterator[tuple[int, _Term]]:
    """The terms of all batches, each with its path. Samples of a batch that end at one place are computed together."""
    for number, (first, batch) in enumerate(batches):
        rows_by_term: dict[tuple[int, int, int], list[int]] = {}
        for row, tokens_T1 in enumerate(batch[TOKENS].tolist()):
            for path, begin, end in _pieces(tokens_T1, first, rerouting, paths):
                rows_by_term.setdefault((path, end, 1), []).append(row)
                if begin:
                    rows_by_term.setdefault((path, begin, -1), []).append(row)
        num_targets = max(1, samples.amount(batch).targets)
        for (path, num_columns, sign), rows in rows_by_term.items():
            shorter = {name: tensor_BT1[rows, : num_columns + 1] for name, tensor_BT1 in batch.items()}
            if own_targets := samples.amount(shorter).targets:
                yield path, _Term(number, shorter, sign * own_targets / num_targets)


def _pieces(
    tokens_T1: Sequence[int], first: int, rerouting: Rerouting, paths: Collection[int]
) -> Iterator[tuple[int, int, int]]:
    """The path of each piece of a sample, and which columns it has, from the first to behind the last. Windows that
    follow each other along one path are one piece."""
    path, begin, length = first, 0, len(tokens_T1) - 1
    for border in range(rerouting.every, length, rerouting.every):
        chosen = rerouting.choose(tokens_T1[max(0, border + 1 - NUM_TOKENS) : border + 1])
        if chosen != path and chosen in paths:
            yield path, begin, border
            path, begin = chosen, border
    yield path, begin, length
