"""The engine of a run with several paths: each piece of a sequence is the work of the path that its past chooses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest
import torch

from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.generation.engine import LocalEngine, Room, RoutedEngine, collect
from swarm.generation.sampling import Sampling, Scores, Scoring
from swarm.model.stages import Transformer, build_transformer

GREEDY, LONGEST, NUM_TOP = Sampling(temperature=0.0), 160, 2
PROMPT = [17 * number % 61 for number in range(75)]


def _model(seed: int) -> Transformer:
    model = ModelConfig(num_layers=1, d_model=16, num_heads=2, vocab_size=64)
    config = RunConfig(model=model, stages=StagesConfig(num_stages=1), data=DataConfig(seed=seed))
    drawn = build_transformer(config, device="cpu")
    with torch.no_grad():
        for parameter in drawn.parameters():
            parameter.mul_(3.0)
    return drawn


MODELS = [_model(seed) for seed in range(3)]


def _choose(tokens: Sequence[int]) -> int:
    return sum(tokens[:32]) % len(MODELS)


@asynccontextmanager
async def _routed(reroute_every: int) -> AsyncIterator[RoutedEngine]:
    room = Room(1, LONGEST)
    engines = [LocalEngine(model, room, longest=LONGEST) for model in MODELS]
    async with asyncio.TaskGroup() as tasks:
        computing = [tasks.create_task(engine.run()) for engine in engines]
        yield RoutedEngine(engines, _choose, reroute_every)
        for task in computing:
            task.cancel()


def _paths(tokens: Sequence[int], every: int) -> list[int]:
    """The path of each position of a sequence, as the option is described."""
    begins = [position // every * every if every else 0 for position in range(len(tokens))]
    return [_choose(tokens[begin - 32 : begin] if begin else tokens[: len(PROMPT)]) for begin in begins]


@torch.no_grad()
def _logprobs(tokens: Sequence[int], every: int) -> torch.Tensor:
    """By position, how likely each token is there, along that position's path: the first one has none."""
    along = [model(torch.tensor([tokens]))[0].log_softmax(-1) for model in MODELS]
    rows = [along[path][position - 1] for position, path in enumerate(_paths(tokens, every))]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("every", "count", "first"),
    [(0, 60, 1), (32, 0, 40), (32, 60, len(PROMPT)), (50, 60, 40), (50, 0, 1), (0, 0, len(PROMPT))],
)
async def test_each_token_and_score_is_that_of_its_piece_s_path(every: int, count: int, first: int) -> None:
    scores, written = Scores(Scoring(first=first, num_top=NUM_TOP)), list[int]()
    async with (
        asyncio.timeout(60),
        _routed(every) as engine,
        aclosing(engine.generate(PROMPT, GREEDY, count, scores)) as stream,
    ):
        async for token in stream:
            written.append(token)
            assert scores.at(len(PROMPT) + len(written) - 1) is not None, "a score comes before its token"
    whole = PROMPT + written
    assert len(written) == count
    assert (len({*_paths(whole, every)}) > 1) == bool(every)
    expected = _logprobs(whole, every)
    assert written == expected[len(PROMPT) :].argmax(-1).tolist()
    assert scores.at(first - 1) is None
    for position in range(first, len(whole)):
        found = scores.at(position)
        assert found is not None
        assert found[0] == pytest.approx(expected[position, whole[position]].item(), abs=1e-4)
        assert [token for token, _ in found[1]] == expected[position].topk(NUM_TOP)[1].tolist()
    assert scores.at(len(whole)) is None or count == 0


async def test_without_scores_only_the_paths_that_write_compute() -> None:
    async with asyncio.timeout(60), _routed(32) as engine:
        written = await collect(engine, PROMPT, GREEDY, 60)
    assert written == _logprobs(PROMPT + written, 32)[len(PROMPT) :].argmax(-1).tolist()


async def test_a_text_that_is_left_early_leaves_room_for_the_next_one() -> None:
    """There is room for a single sequence, which every change of path gives back."""
    async with asyncio.timeout(60), _routed(32) as engine:
        async with aclosing(engine.generate(PROMPT, GREEDY, 60)) as stream:
            begun = [await anext(stream) for _ in range(25)]
        assert await collect(engine, PROMPT, GREEDY, 25) == begun
