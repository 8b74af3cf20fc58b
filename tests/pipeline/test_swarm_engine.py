"""Text from a chain of stages: its tokens are those of a model in one process, whatever happens on the way."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import torch
from torch import nn

from swarm.config import LoraConfig, ModelConfig, RunConfig, WireConfig
from swarm.errors import Overloaded, PeerUnavailable, SwarmError
from swarm.generation import decoding
from swarm.generation.decoding import choose
from swarm.generation.engine import collect
from swarm.generation.sampling import Sampling, Scores, Scoring
from swarm.hop import continuation, session
from swarm.machine.recording import recorder_of
from swarm.model.cache import CacheRows, KeyValueCache
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_transformer
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.stage import decoder
from swarm.stage.generation import SessionLimits
from tests.support.chain import DILOCO, SYNCHRONOUS, Chain, eventually, held, running_chain
from tests.support.chain_rounds import begin_next_round
from tests.support.tape import TapeRecorder

LONGEST = 96
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.5, top_p=0.9, top_k=40, seed=-(1 << 70))
PROMPT = [5, 9, 33, 7, 60]


def _long(config: RunConfig, **model: Any) -> RunConfig:
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, sequence_length=LONGEST),
        model=dataclasses.replace(config.model, init_std=0.2, **model),
    )


CONFIG = _long(SYNCHRONOUS)
LEARNED: dict[str, Any] = {
    "norm": "layer", "positions": "learned", "max_positions": LONGEST, "feed_forward": "gelu", "tied_embeddings": True,
}  # fmt: skip


@torch.no_grad()
def _expected(config: RunConfig, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """The tokens that the whole model writes in one process."""
    model, tokens, cache = build_transformer(config, device="cpu"), list(prompt), KeyValueCache(LONGEST)
    for _ in range(count):
        logits_V = model(torch.tensor([tokens[cache.num_positions :]]), cache=cache)[0, -1]
        tokens.append(choose(logits_V, sampling, len(tokens)))
    return tokens[len(prompt) :]


async def test_prompts_of_any_round_run_what_peers_compile_before_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is really compiled here; tests/generation/test_decoding does that."""
    compiled_layers = list[nn.Module]()
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled_layers.append(self))
    async with running_chain(CONFIG) as chain:
        for peer in chain.peers:
            module = peer.backend.module
            assert isinstance(module, StageModule)
            module.compile_layers()
            await peer.runtime.control(peer.generation.warm_up)
            assert module.compiles_prompts
        engine = SwarmEngine(chain.trainer, CONFIG)
        # A round's weights have a module of their own.
        for num_modules in (3, 4):
            found = await collect(engine, PROMPT, GREEDY, 3)
            assert found == _expected(CONFIG, PROMPT, GREEDY, 3) or num_modules > 3
            assert len(compiled_layers) == num_modules * CONFIG.model.num_layers
            await begin_next_round(chain.peers)


class Pace:
    seconds = 0.1


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    """Make texts slow until the test has interfered. Stages go on writing even if their caller reads slowly."""
    pace = Pace()

    def choose_slowly(logits_V: torch.Tensor, sampling: Sampling, position: int) -> int:
        time.sleep(pace.seconds)
        return choose(logits_V, sampling, position)

    monkeypatch.setattr(decoder, "choose", choose_slowly)
    return pace


def _engine(chain: Chain) -> SwarmEngine:
    return SwarmEngine(chain.trainer, chain.config)


async def _assert_freed(chain: Chain) -> None:
    await eventually(lambda: not any(peer.generation.counters().sessions for peer in chain.peers))


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        (CONFIG, GREEDY),
        (CONFIG, DRAWN),
        pytest.param(_long(DILOCO), GREEDY, marks=pytest.mark.slow),
        (_long(SYNCHRONOUS, **LEARNED), GREEDY),
        pytest.param(
            _long(SYNCHRONOUS, block_types=("parallel", "tp", "spd"), num_shards=2), GREEDY, marks=pytest.mark.slow
        ),
        pytest.param(_long(SYNCHRONOUS, bottleneck_dim=8), GREEDY, marks=pytest.mark.slow),
        (_long(SYNCHRONOUS, bottleneck_dim=8, bottleneck="learned", bottleneck_layers=(1, 2)), GREEDY),
        (_long(SYNCHRONOUS, num_kv_heads=1, qk_norm=True, qkv_bias=True, tied_embeddings=True), GREEDY),
        (_long(SYNCHRONOUS, autocast="bf16"), GREEDY),
        pytest.param(dataclasses.replace(CONFIG, lora=LoraConfig(rank=4)), GREEDY, marks=pytest.mark.slow),
    ],
    ids=["llama", "drawn", "diloco", "gpt2", "shards", "bottleneck", "learned", "qwen", "autocast", "lora"],
)
async def test_tokens_are_those_of_one_process(config: RunConfig, sampling: Sampling) -> None:
    expected = _expected(config, PROMPT, sampling, 16)
    async with running_chain(config) as chain:
        assert await collect(_engine(chain), PROMPT, sampling, 16) == expected
        await _assert_freed(chain)
        assert [peer.generation.counters().tokens for peer in chain.peers] == [16, 16, 16]
    assert sampling is GREEDY or len(set(expected)) > 3


@pytest.mark.parametrize(
    "config", [CONFIG, pytest.param(_long(DILOCO), marks=pytest.mark.slow)], ids=["synchronous", "diloco"]
)
async def test_recorded_steps_write_the_same_tokens_in_each_round(config: RunConfig) -> None:
    prompts, recorders = [PROMPT, [1, 2]], [TapeRecorder() for _ in range(3)]
    unused = iter(recorders)
    texts: list[list[list[int]]] = []
    for new_recorder in (recorder_of, lambda _: next(unused)):
        async with running_chain(config, new_recorder=new_recorder) as chain:
            for _ in range(2):
                texts.append(await asyncio.gather(*(collect(_engine(chain), p, GREEDY, 10) for p in prompts)))
                await begin_next_round(chain.peers)
            await _assert_freed(chain)
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    assert all(recorder.num_replays >= 12 for recorder in recorders)


async def test_sessions_that_wait_together_are_computed_together_and_do_not_mix() -> None:
    prompts = [PROMPT, [1, 2], list(range(40))]
    expected = [_expected(CONFIG, prompt, GREEDY, 30) for prompt in prompts]
    async with running_chain(CONFIG) as chain, AsyncExitStack() as stack:
        engine = _engine(chain)
        streams = [await stack.enter_async_context(aclosing(engine.generate(p, GREEDY, 30))) for p in prompts]
        found = [[await anext(stream)] for stream in streams]
        # Again and again, all texts wait at the middle peer at the same time.
        for _ in range(3):
            async with chain.at(1)[0].held():
                await asyncio.sleep(0.05)
            for tokens, stream in zip(found, streams, strict=True):
                tokens.append(await anext(stream))
        for tokens, stream in zip(found, streams, strict=True):
            tokens += [token async for token in stream]
        assert found == expected


@torch.no_grad()
def _assert_scored(config: RunConfig, scores: Scores, tokens: Sequence[int], num_top: int) -> None:
    """The scores are those of the whole model in one process."""
    logprobs_TV = build_transformer(config, device="cpu")(torch.tensor([tokens]))[0].log_softmax(-1)
    for position in range(1, len(tokens)):
        found = scores.at(position)
        if position < scores.scoring.first:
            assert found is None
            continue
        assert found is not None
        logprob, top = found
        values_K, tokens_K = logprobs_TV[position - 1].topk(num_top)
        assert logprob == pytest.approx(logprobs_TV[position - 1, tokens[position]].item(), abs=1e-4)
        assert [token for token, _ in top] == tokens_K.tolist()
        assert [value for _, value in top] == pytest.approx(values_K.tolist(), abs=1e-4)


@pytest.mark.parametrize("config", [CONFIG, _long(SYNCHRONOUS, **LEARNED)], ids=["llama", "gpt2"])
async def test_scores_are_those_of_one_process(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and texts, in pieces, and of a prompt of the model's full length, after which nothing is written."""
    monkeypatch.setattr(session, "PIECE_TOKENS", 7)
    long = [(7 * number) % 64 for number in range(LONGEST)]
    async with running_chain(config) as chain:
        engine = _engine(chain)
        for prompt, first, num_top, count in (
            (long[:20], 1, 3, 10), (long[:20], 20, 0, 10), (long[:20], 17, 20, 3), (long, 1, 1, 0), ([5], 1, 1, 0)
        ):  # fmt: skip
            scores = Scores(Scoring(first=first, num_top=num_top))
            async with aclosing(engine.generate(prompt, DRAWN, count, scores)) as stream:
                written = [token async for token in stream]
            assert len(written) == count
            _assert_scored(config, scores, [*prompt, *written], num_top)
        await _assert_freed(chain)


async def test_scores_come_once_though_a_peer_dies(pace: Pace) -> None:
    """It is a peer of the last stage, which gives the scores."""
    scores = Scores(Scoring(first=1, num_top=2))
    async with running_chain(CONFIG, num_peers=(1, 2, 2)) as chain:
        tokens = list(PROMPT)
        async with aclosing(_engine(chain).generate(PROMPT, DRAWN, 20, scores)) as stream:
            async for token in stream:
                tokens.append(token)
                if len(tokens) == 8:
                    pace.seconds = 0.0
                    await max(chain.at(2), key=lambda peer: peer.generation.counters().tokens).server.stop(0)
        assert len(scores) == len(tokens) - 1
        _assert_scored(CONFIG, scores, tokens, 2)


async def test_one_session_that_fails_takes_no_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for sessions side by side, and none at all for the choice of one of them."""

    class TooMany(CacheRows):
        def advance(self, count: int) -> None:
            super().advance(count)
            raise MemoryError("no room for the logits")

    failing = Sampling(temperature=1.0, seed=13)

    def choose_or_fail(logits_V: torch.Tensor, sampling: Sampling, position: int) -> int:
        if sampling == failing and position > 15:
            raise MemoryError("no room for this one")
        return choose(logits_V, sampling, position)

    monkeypatch.setattr(continuation, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(decoding, "CacheRows", TooMany)
    monkeypatch.setattr(decoder, "choose", choose_or_fail)
    prompts = [PROMPT, [1, 2]]
    expected = [_expected(CONFIG, prompt, GREEDY, 24) for prompt in prompts]
    async with running_chain(CONFIG) as chain:
        asked = [collect(_engine(chain), prompt, GREEDY, 24) for prompt in prompts]
        *texts, failed = await asyncio.gather(
            *asked, collect(_engine(chain), PROMPT, failing, 24), return_exceptions=True
        )
        assert texts == expected
        assert isinstance(failed, SwarmError)
        await _assert_freed(chain)


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (1, "int8")])
async def test_a_text_goes_on_when_a_peer_dies(stage: int, dtype: Any) -> None:
    """Also where what travels is rounded on its way."""
    config, sampling = dataclasses.replace(CONFIG, wire=WireConfig(dtype=dtype)), DRAWN if dtype == "fp32" else GREEDY
    async with running_chain(config, num_peers=(2, 2, 2)) as chain:
        whole = await collect(_engine(chain), PROMPT, sampling, 16)
        before = {peer.peer_id: peer.generation.counters().tokens for peer in chain.peers}
        found = []
        async with aclosing(_engine(chain).generate(PROMPT, sampling, 16)) as stream:
            async for token in stream:
                found.append(token)
                if len(found) == 8:
                    written = lambda peer: peer.generation.counters().tokens - before[peer.peer_id]  # noqa: E731
                    await max(chain.at(stage), key=written).server.stop(0)
        assert found == whole
        await eventually(lambda: sum(peer.generation.counters().sessions for peer in chain.peers) == 0)
    assert dtype != "fp32" or whole == _expected(config, PROMPT, sampling, 16)


async def test_a_text_keeps_its_round_while_training_goes_on_also_at_a_peer_that_takes_over(
    pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second peer has to stand by from the beginning, however soon the next rounds come.
    monkeypatch.setattr(continuation, "STANDBY_SECONDS", 1e6)
    expected = _expected(CONFIG, PROMPT, GREEDY, 40)
    async with running_chain(CONFIG, num_peers=(1, 2, 1)) as chain:
        engine, found = _engine(chain), []
        async with aclosing(engine.generate(PROMPT, GREEDY, 40)) as stream:
            found += [await anext(stream) for _ in range(5)]
            # The second peer of the middle stage stands by.
            async with held(chain.at(0)[0].runtime):
                await eventually(lambda: all(peer.generation.counters().sessions for peer in chain.peers))
            for _ in range(4):
                await begin_next_round(chain.peers)
            found += [await anext(stream) for _ in range(5)]
            await max(chain.at(1), key=lambda peer: peer.generation.counters().tokens).server.stop(0)
            pace.seconds = 0.0
            found += [token async for token in stream]
        assert (found, engine.round) == (expected, 0)
        later = await collect(engine, PROMPT, GREEDY, 40)
        assert (later != expected, engine.round) == (True, 4)


@pytest.mark.parametrize("behind", [0, 1, 2])
async def test_with_diloco_a_text_begins_though_a_stage_is_rounds_behind(behind: int) -> None:
    """The other stages no longer keep the round that this stage is at."""
    config = _long(DILOCO)
    async with running_chain(config, num_peers=(1, 1, 1)) as chain:
        for _ in range(3):
            await begin_next_round([peer for peer in chain.peers if peer not in chain.at(behind)])
        assert [chain.at(stage)[0].stage.round for stage in range(3)] == [
            0 if stage == behind else 3 for stage in range(3)
        ]
        assert len(await collect(_engine(chain), PROMPT, GREEDY, 10)) == 10


async def test_a_text_goes_on_with_the_newest_round_where_its_own_is_gone(
    pace: Pace, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_chain(CONFIG, num_peers=(1, 2, 1)) as chain:
        first, second = chain.at(1)
        chain.update([peer.record for peer in chain.peers if peer is not second])
        engine, found = _engine(chain), []
        async with aclosing(engine.generate(PROMPT, GREEDY, 30)) as stream:
            found += [await anext(stream) for _ in range(5)]
            for _ in range(3):
                await begin_next_round(chain.peers)
            await first.server.stop(0)
            chain.update([peer.record for peer in chain.peers if peer is not first])
            pace.seconds = 0.0
            found += [token async for token in stream]
        assert (len(found), engine.round) == (30, 3)
        assert "goes on with the newest weights" in caplog.text


@pytest.mark.usefixtures("pace")
async def test_if_the_only_peer_of_a_stage_has_died_the_error_names_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "PATIENCE_SECONDS", 0.2)
    async with running_chain(CONFIG) as chain:
        await chain.at(0)[0].server.stop(0)
        with pytest.raises(PeerUnavailable, match=r"the peer of stage 0 failed just now \(.*: nothing listens there\)"):
            await collect(_engine(chain), PROMPT, GREEDY, 3)


async def test_who_goes_away_leaves_nothing_behind() -> None:
    async with running_chain(CONFIG, num_peers=(1, 2, 1)) as chain:
        async with aclosing(_engine(chain).generate(PROMPT, GREEDY, 80)) as stream:
            await anext(stream)
            assert sum(peer.generation.counters().sessions for peer in chain.peers) >= 3
        await _assert_freed(chain)


async def test_sessions_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "PATIENCE_SECONDS", 0.2)
    async with running_chain(CONFIG, session_limits=SessionLimits(max_sessions=2)) as chain:
        engine = _engine(chain)
        async with aclosing(engine.generate(PROMPT, GREEDY, 80)) as stream:
            await anext(stream)
            # The text does not come to its end meanwhile.
            async with chain.at(2)[0].held():
                with pytest.raises(Overloaded, match="no room for more sessions beside this caller's 1"):
                    await collect(engine, PROMPT, GREEDY, 80)


def test_a_class_of_ones_own_generates_no_text() -> None:
    config = dataclasses.replace(CONFIG, model=ModelConfig(custom_class="some:Class"))
    with pytest.raises(ValueError, match=r"no text from a run with model\.custom_class"):
        SwarmEngine(None, config)  # type: ignore[arg-type]


async def test_a_token_outside_the_vocabulary_is_refused() -> None:
    async with running_chain(CONFIG) as chain:
        with pytest.raises(ValueError, match="outside the vocabulary of 64"):
            await collect(_engine(chain), [64], GREEDY, 3)
