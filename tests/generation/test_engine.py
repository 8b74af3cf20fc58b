"""A model in this process continues a prompt as transformers does, with a cache of keys and values."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from swarm.config import DataConfig, RunConfig, StagesConfig
from swarm.generation.engine import LocalEngine, collect
from swarm.generation.sampling import Sampling
from swarm.interchange.source import Source
from swarm.model.attention import KeyValueCache
from swarm.model.transformer import Transformer
from tests.interchange.small_models import MODELS, POSITIONS, make_tokens, save

GREEDY = Sampling(temperature=0.0)
PROMPT_TOKENS = 5


def _load(folder: Path) -> Transformer:
    source = Source(folder)
    config = RunConfig(model=source.model, stages=StagesConfig(num_stages=1), data=DataConfig(sequence_length=8))
    model = Transformer(config)
    model.load_state_dict(dict(source.tensors(set(source.shapes))))
    return model


@pytest.mark.parametrize("name", MODELS)
async def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs, prompt = save(name, tmp_path), make_tokens()[:1, :PROMPT_TOKENS]
    count = POSITIONS - PROMPT_TOKENS
    expected = theirs.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    engine = LocalEngine(_load(tmp_path), longest=POSITIONS)
    found = await collect(engine, prompt[0].tolist(), GREEDY, count)
    assert found == expected[0, PROMPT_TOKENS:].tolist()
    assert len(set(found)) > 1


@pytest.mark.parametrize("name", ["llama-3", "gpt2", "qwen3"])
@torch.no_grad()
def test_positions_may_come_in_any_pieces(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    model, tokens_BT = _load(tmp_path), make_tokens()
    whole = model(tokens_BT)[:, -1]
    for sizes in ([1] * 60, [60], [7, 1, 20, 32]):
        cache = KeyValueCache(60)
        for piece in torch.split(tokens_BT, sizes, dim=1):
            last = model(piece, cache=cache)
        torch.testing.assert_close(last[:, -1], whole, rtol=1e-4, atol=1e-4)
        assert cache.num_positions == 60


async def test_sequences_take_turns_and_do_not_mix(tmp_path: Path) -> None:
    save("llama-2", tmp_path)
    engine, prompts = LocalEngine(_load(tmp_path), longest=POSITIONS), make_tokens()[:, :9].tolist()
    sampling = Sampling(temperature=1.0, seed=3)
    alone = [await collect(engine, prompt, sampling, 20) for prompt in prompts]
    assert alone[0] != alone[1]
    assert await asyncio.gather(*(collect(engine, prompt, sampling, 20) for prompt in prompts)) == alone


async def test_a_broken_off_text_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    save("llama-2", tmp_path)
    engine, prompt = LocalEngine(_load(tmp_path), longest=POSITIONS), make_tokens()[0, :9].tolist()
    sampling = Sampling(temperature=1.3, top_p=0.9, seed=5)
    whole = await collect(engine, prompt, sampling, 30)
    async with aclosing(engine.generate(prompt, sampling, 30)) as stream:
        begun = [await anext(stream) for _ in range(11)]
    assert begun + await collect(engine, prompt + begun, sampling, 19) == whole


@pytest.mark.parametrize(("prompt", "count"), [([], 3), ([1] * 60, 5)])
async def test_what_does_not_fit_is_refused(prompt: list[int], count: int, tmp_path: Path) -> None:
    save("llama-2", tmp_path)
    with pytest.raises(ValueError, match=r"no tokens|longer than the model's 64"):
        await collect(LocalEngine(_load(tmp_path), longest=POSITIONS), prompt, GREEDY, count)


def test_a_cache_takes_memory_once() -> None:
    cache = KeyValueCache(100)
    assert cache.num_bytes == 0
    heads = torch.randn(1, 2, 3, 4)
    for _ in range(4):
        k, v = cache.extend("layers.0", heads, heads)
        cache.num_positions += 3
    assert k.shape == v.shape == (1, 2, 12, 4)
    assert cache.num_bytes == 2 * 2 * 100 * 4 * 4
