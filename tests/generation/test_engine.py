"""A model in this process continues a prompt as transformers does, with a cache of keys and values."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from swarm.config import DataConfig, RunConfig, StagesConfig
from swarm.generation.engine import LocalEngine, Room, collect
from swarm.generation.sampling import Sampling, Scores, Scoring
from swarm.interchange.source import Source
from swarm.machine.recording import Recorder
from swarm.model.cache import CacheRows, KeyValueCache
from swarm.model.stages import Transformer
from tests.interchange.small_models import POSITIONS, make_tokens, save
from tests.support.tape import TapeRecorder

_Kind = TypeVar("_Kind", bound=Transformer)

GREEDY = Sampling(temperature=0.0)
PROMPT_TOKENS = 5


def _load(folder: Path) -> Transformer:
    return _load_as(Transformer, folder)


def _load_as(kind: type[_Kind], folder: Path) -> _Kind:
    source = Source(folder)
    config = RunConfig(model=source.model, stages=StagesConfig(num_stages=1), data=DataConfig(sequence_length=8))
    model = kind(config)
    model.load_state_dict(dict(source.tensors(set(source.shapes))))
    return model


@asynccontextmanager
async def _running(
    model: Transformer, *, num_sequences: int = 8, capacity: int = 8 * POSITIONS, piece_tokens: int = 256,
    recorder: Recorder | None = None,
) -> AsyncIterator[LocalEngine]:  # fmt: skip
    """An engine that computes inside the block."""
    engine = LocalEngine(
        model, Room(num_sequences, capacity), longest=POSITIONS, piece_tokens=piece_tokens, recorder=recorder
    )
    async with asyncio.TaskGroup() as tasks:
        computing = tasks.create_task(engine.run())
        yield engine
        computing.cancel()


@pytest.mark.parametrize(
    ("name", "recorder"),
    [*((name, None) for name in ("llama-3", "mistral", "qwen3", "gpt2")), ("llama-3", TapeRecorder())],
)  # fmt: skip
async def test_greedy_tokens_are_those_of_transformers(
    name: str, recorder: TapeRecorder | None, tmp_path: Path
) -> None:
    theirs, prompt = save(name, tmp_path), make_tokens()[:1, :PROMPT_TOKENS]
    count = POSITIONS - PROMPT_TOKENS
    expected = theirs.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    for piece_tokens in (2, 256):
        async with _running(_load(tmp_path), piece_tokens=piece_tokens, recorder=recorder) as engine:
            found = await collect(engine, prompt[0].tolist(), GREEDY, count)
        assert found == expected[0, PROMPT_TOKENS:].tolist()
    assert len(set(found)) > 1


@pytest.mark.parametrize(
    ("first", "num_written", "piece_tokens"), [(1, 0, 256), (7, 9, 1), (POSITIONS - 9, 9, 256), (POSITIONS - 9, 0, 1)]
)
async def test_scores_are_those_of_transformers(
    first: int, num_written: int, piece_tokens: int, tmp_path: Path
) -> None:
    """The prompt and what is written have the model's full length together; temperature changes no score."""
    theirs, num_top = save("llama-3", tmp_path), 3
    tokens, scores = make_tokens()[0].tolist() + [7] * POSITIONS, Scores(Scoring(first=first, num_top=num_top))
    prompt = tokens[: POSITIONS - num_written]
    async with (
        _running(_load(tmp_path), piece_tokens=piece_tokens) as engine,
        aclosing(engine.generate(prompt, Sampling(temperature=2.0), num_written, scores)) as stream,
    ):
        written = []
        async for token in stream:
            written.append(token)
            assert scores.at(len(prompt) + len(written) - 1) is not None, "a score comes before its token"
    sequence = torch.tensor([prompt + written])
    expected_TV = theirs(sequence).logits[0].log_softmax(-1)
    assert (len(written), scores.at(first - 1)) == (num_written, None)
    for position in range(first, POSITIONS):
        found = scores.at(position)
        assert found is not None
        logprob, top = found
        assert logprob == pytest.approx(expected_TV[position - 1, sequence[0, position]].item(), abs=1e-4)
        values_K, tokens_K = expected_TV[position - 1].topk(num_top)
        assert [token for token, _ in top] == tokens_K.tolist()
        assert [value for _, value in top] == pytest.approx(values_K.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["llama-3", "gpt2", "qwen3"])
@torch.no_grad()
def test_positions_may_come_in_any_pieces(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    model, tokens_BT = _load(tmp_path), make_tokens()[:1]
    whole = model(tokens_BT)[:, -1]
    for sizes in ([1] * 60, [60], [7, 1, 20, 32]):
        cache = KeyValueCache(60)
        for piece in torch.split(tokens_BT, sizes, dim=1):
            last = model(piece, cache=cache)
        torch.testing.assert_close(last[:, -1], whole, rtol=1e-4, atol=1e-4)
        assert cache.num_positions == 60


@pytest.mark.parametrize("name", ["llama-3", "gpt2", "qwen3"])
@torch.no_grad()
def test_sequences_of_different_lengths_can_be_computed_side_by_side(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    model, tokens_BT = _load(tmp_path), make_tokens()
    lengths, num_more = [5, 31, 17], 3
    caches = [KeyValueCache(60) for _ in lengths]
    for row, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
        model(tokens_BT[row % 2, None, :length], cache=cache)
    for step in range(num_more):
        new = torch.stack([tokens_BT[row % 2, length + step, None] for row, length in enumerate(lengths)])
        last = model(new, cache=CacheRows(caches))
    for row, length in enumerate(lengths):
        alone = model(tokens_BT[row % 2, None, : length + num_more])[0, -1]
        torch.testing.assert_close(last[row, -1], alone, rtol=1e-4, atol=1e-4)


SAMPLING = Sampling(temperature=1.0, seed=3)


class _Watched(Transformer):
    """A model that tells how many sequences it was given at once, and may fail, before it begins or at one token."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.shapes: list[tuple[int, ...]] = []
        self.fault: Exception | None = None
        self.fails_at = -1

    @property
    def largest_batch(self) -> int:
        """The most sequences that were computed together."""
        return max(shape[0] for shape in self.shapes)

    def forward(self, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.fault is not None:
            raise self.fault
        self.shapes.append(tuple(inputs.shape))
        outputs = super().forward(inputs, **options)
        if self.fails_at in inputs:
            raise MemoryError(f"no room for {tuple(inputs.shape)}")
        return outputs


@pytest.fixture
def model(tmp_path: Path) -> _Watched:
    save("llama-2", tmp_path)
    return _load_as(_Watched, tmp_path)


async def test_sequences_are_computed_together_and_do_not_mix(model: _Watched) -> None:
    prompts = [make_tokens()[row, :length].tolist() for row, length in ((0, 9), (1, 20), (0, 1), (1, 40))]
    async with _running(model, piece_tokens=8) as engine:
        alone = [await collect(engine, prompt, SAMPLING, 20) for prompt in prompts]
        assert alone[0] != alone[1]
        model.shapes.clear()
        assert await asyncio.gather(*(collect(engine, prompt, SAMPLING, 20) for prompt in prompts)) == alone
    # The prompt is computed in pieces, together with the texts that go on.
    assert max(shape[1] for shape in model.shapes) == 8
    num_together = sum(shape[0] for shape in model.shapes if shape[1] == 1)
    assert num_together >= 4 * 19
    assert len(model.shapes) < 0.6 * num_together


async def test_recorded_steps_serve_all_texts_that_come_together_or_one_after_the_other(model: _Watched) -> None:
    recorder = TapeRecorder()
    prompts = [make_tokens()[row, :length].tolist() for row, length in ((0, 9), (1, 20), (0, 2), (1, 40))]
    async with _running(model) as engine:
        alone = [await collect(engine, prompt, SAMPLING, 20) for prompt in prompts]
    async with _running(model, recorder=recorder) as engine:
        for _ in range(2):
            assert await asyncio.gather(*(collect(engine, prompt, SAMPLING, 20) for prompt in prompts)) == alone
        num_tapes = len(recorder.tapes)
        model.shapes.clear()
        for _ in range(2):
            assert [await collect(engine, prompt, SAMPLING, 20) for prompt in prompts] == alone
            assert await asyncio.gather(*(collect(engine, prompt, SAMPLING, 20) for prompt in prompts)) == alone
    # Each text gives its memory to later ones. So nothing is recorded again, and Python runs for prompts alone.
    assert len(recorder.tapes) == num_tapes
    assert len(model.shapes) == 4 * len(prompts)


async def test_a_broken_off_text_goes_on_with_the_same_tokens(model: _Watched) -> None:
    prompt, sampling = make_tokens()[0, :9].tolist(), Sampling(temperature=1.3, top_p=0.9, seed=5)
    async with _running(model) as engine:
        whole = await collect(engine, prompt, sampling, 30)
        async with aclosing(engine.generate(prompt, sampling, 30)) as stream:
            begun = [await anext(stream) for _ in range(11)]
        model.shapes.clear()
        assert begun + await collect(engine, prompt + begun, sampling, 19) == whole
    assert model.largest_batch == 1, "the broken-off text is not computed any more"


async def test_who_finds_no_room_waits_and_a_caller_that_goes_frees_its_place(model: _Watched) -> None:
    prompt = make_tokens()[0, :9].tolist()
    async with _running(model, num_sequences=2, capacity=POSITIONS) as engine:
        alone = await collect(engine, prompt, SAMPLING, 20)
        stream = engine.generate(prompt, SAMPLING, 40)
        await anext(stream)
        model.shapes.clear()
        # 15 positions are left. The first of these needs 29, so it waits. The second needs 11, which are there, and
        # waits all the same, because it is behind the first.
        waiting = [asyncio.create_task(collect(engine, prompt, SAMPLING, count)) for count in (20, 2)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.wait(waiting)), 0.2)
        assert model.largest_batch == 1
        waiting.pop().cancel()
        await stream.aclose()
        assert await waiting[0] == alone
        assert await collect(engine, prompt, SAMPLING, 20) == alone
        assert model.largest_batch == 1


async def test_a_caller_that_does_not_read_holds_nobody_up(model: _Watched) -> None:
    prompt = make_tokens()[0, :9].tolist()
    async with _running(model) as engine:
        alone = await collect(engine, prompt, SAMPLING, 40)
        async with aclosing(engine.generate(prompt, SAMPLING, 40)) as slow:
            begun = [await anext(slow)]
            model.shapes.clear()
            assert await collect(engine, prompt, SAMPLING, 40) == alone
            # The engine was a few tokens ahead of its caller, and not at the end of the text.
            assert sum(shape[0] for shape in model.shapes if shape[1] == 1) < 39 + 10
            assert begun + [token async for token in slow] == alone


async def test_what_goes_wrong_is_told_to_all_that_it_concerns_and_no_others(model: _Watched) -> None:
    prompt = make_tokens()[0, :9].tolist()
    async with _running(model) as engine:
        alone = await collect(engine, prompt, SAMPLING, 5)
        model.fault = MemoryError("no room for 4 GiB")
        results = await asyncio.gather(
            *(collect(engine, prompt, SAMPLING, 5) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(result, MemoryError) for result in results)
        model.fault = None
        assert await collect(engine, prompt, SAMPLING, 5) == alone


@pytest.mark.parametrize("place", [3, 8], ids=["prompt", "text"])
async def test_one_sequence_that_fails_takes_no_others_along(model: _Watched, place: int) -> None:
    """It fails while its prompt is computed, or side by side with the others."""
    prompt, count = make_tokens()[0, :9].tolist(), 12
    async with _running(model, piece_tokens=4) as engine:
        model.fails_at = 258
        poisoned = [*prompt[:place], model.fails_at, *prompt[place + 1 :]]
        alone = [await collect(engine, prompt, SAMPLING, number) for number in (count, 20)]
        assert model.fails_at not in (*prompt, *alone[0], *alone[1])
        model.shapes.clear()
        *texts, failed = await asyncio.gather(
            collect(engine, prompt, SAMPLING, count),
            collect(engine, prompt, SAMPLING, 20),
            collect(engine, poisoned, SAMPLING, count),
            return_exceptions=True,
        )
        assert texts == alone
        assert isinstance(failed, MemoryError)
        assert model.largest_batch >= 2


@pytest.mark.parametrize(("prompt", "count"), [([], 3), ([1] * 60, 5)])
async def test_what_does_not_fit_is_refused(prompt: list[int], count: int, model: _Watched) -> None:
    async with _running(model) as engine:
        with pytest.raises(ValueError, match=r"no tokens|longer than the model's 64"):
            await collect(engine, prompt, GREEDY, count)
