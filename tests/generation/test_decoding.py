"""Recorded steps compute what plain ones do, whichever sequences come together."""

import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from swarm.config import RunConfig
from swarm.generation.decoding import Decoding, NextPositions
from swarm.machine.recording import Recording
from swarm.model.cache import KeyValueCache
from swarm.model.stage_module import StageModule
from tests.support.decoding import (
    LONGEST,
    NUM_STAGES,
    TOKENS,
    Chain,
    assert_recorded_steps_are_plain,
    make_config,
    make_module,
    output,
)
from tests.support.tape import TapeRecorder

_Result = TypeVar("_Result")

GPT2: dict[str, Any] = {
    "norm": "layer", "positions": "learned", "max_positions": LONGEST, "feed_forward": "gelu", "tied_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        make_config(),
        make_config(num_kv_heads=2, qk_norm=True, qkv_bias=True),
        make_config(**GPT2),
        pytest.param(make_config(bottleneck_dim=8), marks=pytest.mark.slow),
        make_config(bottleneck_dim=8, bottleneck="learned", bottleneck_layers=(2,)),
        pytest.param(make_config(block_types=("parallel", "tp", "spd", "tp"), num_shards=2), marks=pytest.mark.slow),
        pytest.param(make_config(lora_rank=4), marks=pytest.mark.slow),
        make_config(autocast="bf16"),
    ],
    ids=["llama", "qwen", "gpt2", "bottleneck", "learned", "shards", "lora", "bf16"],
)
def test_recorded_steps_give_the_logits_of_plain_ones(config: RunConfig) -> None:
    tolerance = 1e-5 if config.model.autocast == "off" else 2e-2
    assert_recorded_steps_are_plain(config, TapeRecorder, device="cpu", tolerance=tolerance)


# torch.compile makes an instance of autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow  # Each compiles. One kind is in tests/pipeline/test_swarm_engine, too.
@pytest.mark.parametrize(
    "config",
    [
        make_config(num_kv_heads=2, qk_norm=True),
        make_config(**GPT2),
        make_config(bottleneck_dim=8),
        make_config(bottleneck_dim=8, bottleneck="learned", bottleneck_layers=(2,)),
        make_config(block_types=("parallel", "tp", "spd", "tp"), num_shards=2),
        make_config(lora_rank=4),
        make_config(autocast="bf16"),
    ],
    ids=["qwen", "gpt2", "bottleneck", "learned", "shards", "lora", "bf16"],
)
def test_prompts_of_any_length_run_what_the_warm_up_has_compiled(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counter, compile_layer = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_layer(self, backend=counter))
    plain = Chain(config, "cpu", lambda: None)
    compiled = Chain(config, "cpu", TapeRecorder, compiles=True)
    num_compiled = counter.frame_count
    assert num_compiled
    tolerance = 1e-5 if config.model.autocast == "off" else 2e-2
    for sequence, counts in enumerate([(9, 9, 1, 5), (2, 30, 64, 3), (1, 4, 1, 1), (256, 20, 2)]):
        for chain in (plain, compiled):
            chain.begin(sequence, LONGEST)
        for count in counts:
            (expected,), (found,) = (chain.compute([sequence], count) for chain in (plain, compiled))
            assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    assert counter.frame_count == num_compiled


@torch.inference_mode()
def test_a_sequence_for_which_there_is_no_memory_takes_no_others_along() -> None:
    config, recorder = make_config(), TapeRecorder()
    module, decodings = (
        make_module(config),
        [Decoding(lambda tensor: tensor), Decoding(lambda tensor: tensor, recorder)],
    )
    texts = [(decoding, decoding.cache(40)) for decoding in decodings]
    for place in range(12):
        together = [[NextPositions(cache=cache, tokens=[TOKENS[0][place]])] for _, cache in texts]
        if place == 6:
            together[1].append(NextPositions(cache=decodings[1].cache(1 << 50), tokens=[1]))
        found = [decoding.compute(lambda: module, own) for (decoding, _), own in zip(texts, together, strict=True)]
        torch.testing.assert_close(output(found[1][0]), output(found[0][0]), rtol=0, atol=1e-5)
        assert all(isinstance(failed, RuntimeError) for failed in found[1][1:])
    assert recorder.num_replays == 11, "in one step each was computed alone"
    assert len(recorder.tapes) == 2


class _Broken(TapeRecorder):
    """Cannot record, or records what computes nothing."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        self.raises = raises

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        if self.raises:
            raise RuntimeError("operation not permitted")
        return Recording(replay=lambda: None, result=super().record(work, pool).result, num_bytes=0)


@pytest.mark.parametrize("raises", [True, False])
def test_a_recording_that_fails_or_computes_something_else_is_left_out(
    raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    chains = [Chain(config, "cpu", new_recorder) for new_recorder in (lambda: None, partial(_Broken, raises=raises))]
    for chain in chains:
        chain.begin(0, 40)
        chain.compute([0], 5)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            plain, other = (chain.compute([0]) for chain in chains)
            torch.testing.assert_close(other[0], plain[0], rtol=0, atol=1e-5)
    lines = [record.message for record in caplog.records]
    assert len(lines) == NUM_STAGES
    assert all("steps of 1 texts with up to 256 tokens cannot be recorded" in line for line in lines)


@torch.inference_mode()
def test_recordings_take_no_more_memory_than_they_may(caplog: pytest.LogCaptureFixture) -> None:
    module, recorder = make_module(make_config()), TapeRecorder()
    decoding = Decoding(lambda tensor: tensor, recorder, most_positions=100, most_recorded_bytes=1 << 10)
    cache = decoding.cache(20)
    for token in TOKENS[0][:3]:
        output(decoding.compute(lambda: module, [NextPositions(cache=cache, tokens=[token])])[0])
    (line,) = [record.message for record in caplog.records]
    assert "recordings would take" in line
    assert "and may take 1.0 KiB" in line
    assert recorder.num_replays == 0


def test_each_module_has_recordings_of_its_own_which_go_with_it() -> None:
    """As with the rounds of a swarm that texts hold."""
    config, recorder = make_config(), TapeRecorder()
    modules = [make_module(config), make_module(config)]
    with torch.no_grad():
        for parameter in modules[1].parameters():
            parameter.mul_(1.5)
    plain, recorded = Decoding(lambda tensor: tensor), Decoding(lambda tensor: tensor, recorder, most_positions=100)
    caches = [(decoding, [decoding.cache(20) for _ in modules]) for decoding in (plain, recorded)]

    @torch.inference_mode()
    def step(decoding: Decoding, module: StageModule, cache: KeyValueCache) -> Tensor:
        positions = NextPositions(cache=cache, tokens=[TOKENS[0][cache.num_positions]])
        return output(decoding.compute(lambda: module, [positions])[0])

    for _ in range(10):
        for number, module in enumerate(modules):
            one, other = (step(decoding, module, own[number]) for decoding, own in caches)
            torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
    assert recorder.num_replays == 2 * 10
    assert len(recorder.tapes) == 3, "the first module was recorded again because there was no room for two sequences"
    gone = weakref.ref(modules.pop())
    del module
    gc.collect()
    assert gone() is None
