"""Recorded steps compute what plain ones do, whichever sequences come together."""

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from swarm.config import DataConfig, LoraConfig, ModelConfig, RunConfig, StagesConfig
from swarm.generation.decoding import Decoding, NextPositions
from swarm.machine.recording import Recording
from swarm.model.cache import KeyValueCache
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage
from tests.support.tape import TapeRecorder

_Result = TypeVar("_Result")

LONGEST, VOCABULARY, NUM_STAGES = 300, 64, 2
TOKENS = torch.randint(VOCABULARY, (6, LONGEST), generator=torch.Generator().manual_seed(0)).tolist()
GPT2: dict[str, Any] = {
    "norm": "layer", "positions": "learned", "max_positions": LONGEST, "feed_forward": "gelu", "tied_embeddings": True,
}  # fmt: skip


def _config(lora_rank: int = 0, **model: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=4, d_model=32, num_heads=4, vocab_size=VOCABULARY, init_std=0.2, **model),
        stages=StagesConfig(num_stages=NUM_STAGES), data=DataConfig(sequence_length=LONGEST),
        lora=LoraConfig(rank=lora_rank),
    )  # fmt: skip


def _module(config: RunConfig, stage: int = 0) -> StageModule:
    module = build_stage(config, stage, device="cpu")
    assert isinstance(module, StageModule)
    return module


class _Chain:
    """Two stages that compute the sequences of TOKENS."""

    def __init__(self, config: RunConfig, recorders: Sequence[TapeRecorder] = ()) -> None:
        self._modules = [_module(config, stage) for stage in range(NUM_STAGES)]
        self._decodings = [
            Decoding(lambda tensor: tensor, recorders[stage] if recorders else None, most_positions=4 * LONGEST)
            for stage in range(NUM_STAGES)
        ]
        self._caches: dict[int, list[KeyValueCache]] = {}

    def begin(self, sequence: int, capacity: int) -> None:
        self._caches[sequence] = [decoding.cache(capacity) for decoding in self._decodings]

    def end(self, sequence: int) -> None:
        del self._caches[sequence]

    @torch.inference_mode()
    def compute(self, sequences: Sequence[int], count: int = 1) -> list[Tensor]:
        """The logits after the next `count` positions of each."""
        first = [self._caches[sequence][0].num_positions for sequence in sequences]
        tokens = [TOKENS[row][start : start + count] for row, start in zip(sequences, first, strict=True)]
        outputs: list[Tensor | None] = [None] * len(sequences)
        for stage, (module, decoding) in enumerate(zip(self._modules, self._decodings, strict=True)):
            together = [
                NextPositions(
                    cache=self._caches[sequence][stage], tokens=own, hidden_1TR=None if output is None else output[None]
                )
                for sequence, own, output in zip(sequences, tokens, outputs, strict=True)
            ]
            found = decoding.compute(lambda module=module: module, together)  # type: ignore[misc]  # mypy knows no defaults
            outputs = [_output(result) for result in found]
        return [output[-1] for output in outputs if output is not None]


def _output(result: Tensor | BaseException) -> Tensor:
    """A copy, as a caller would make one before the next step."""
    assert isinstance(result, Tensor), result
    return result.clone()


@pytest.mark.parametrize(
    "config",
    [
        _config(),
        _config(num_kv_heads=2, qk_norm=True, qkv_bias=True),
        _config(**GPT2),
        _config(bottleneck_dim=8),
        _config(block_types=("parallel", "tp", "spd", "tp"), num_shards=2),
        _config(lora_rank=4),
        _config(autocast="bf16"),
    ],
    ids=["llama", "qwen", "gpt2", "bottleneck", "shards", "lora", "bf16"],
)
def test_recorded_steps_give_the_logits_of_plain_ones(config: RunConfig) -> None:
    """Sequences of different lengths join and leave between steps, and one passes the length up to which the first
    recordings read."""
    recorders = [TapeRecorder() for _ in range(NUM_STAGES)]
    chains = [_Chain(config), _Chain(config, recorders)]
    tolerance = 1e-5 if config.model.autocast == "off" else 2e-2

    def compute(sequences: Sequence[int], count: int = 1) -> None:
        plain, recorded = (chain.compute(sequences, count) for chain in chains)
        for one, other in zip(plain, recorded, strict=True):
            assert float((other - one).norm()) <= tolerance * float(one.norm())

    def begin(sequence: int, num_tokens: int, capacity: int) -> None:
        for chain in chains:
            chain.begin(sequence, capacity)
        compute([sequence], num_tokens)

    begin(0, 7, 40)
    for _ in range(3):
        compute([0])
    begin(1, 1, 60)
    begin(2, 20, 30)
    for sequences in ([0, 1], [1, 2, 0], [2, 0, 1], [2, 0, 1], [0], [2, 1]):
        compute(sequences)
    for chain in chains:
        chain.end(1)
    gc.collect()
    begin(3, 250, LONGEST)
    begin(4, 11, 25)
    for _ in range(12):
        compute([3, 4, 0, 2][:3])
    compute([4, 3])
    compute([3])
    assert all(recorder.num_replays >= 20 for recorder in recorders)
    assert all(len(recorder.tapes) <= 9 for recorder in recorders)


@torch.inference_mode()
def test_a_sequence_for_which_there_is_no_memory_takes_no_others_along() -> None:
    config, recorder = _config(), TapeRecorder()
    module, decodings = _module(config), [Decoding(lambda tensor: tensor), Decoding(lambda tensor: tensor, recorder)]
    texts = [(decoding, decoding.cache(40)) for decoding in decodings]
    for place in range(12):
        together = [[NextPositions(cache=cache, tokens=[TOKENS[0][place]])] for _, cache in texts]
        if place == 6:
            together[1].append(NextPositions(cache=decodings[1].cache(1 << 50), tokens=[1]))
        found = [decoding.compute(lambda: module, own) for (decoding, _), own in zip(texts, together, strict=True)]
        torch.testing.assert_close(_output(found[1][0]), _output(found[0][0]), rtol=0, atol=1e-5)
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
    config = _config()
    chains = [_Chain(config), _Chain(config, [_Broken(raises=raises) for _ in range(NUM_STAGES)])]
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


def test_each_module_has_recordings_of_its_own_which_go_with_it() -> None:
    """As with the rounds of a swarm that texts hold."""
    config, recorder = _config(), TapeRecorder()
    modules = [_module(config), _module(config)]
    with torch.no_grad():
        for parameter in modules[1].parameters():
            parameter.mul_(1.5)
    plain, recorded = Decoding(lambda tensor: tensor), Decoding(lambda tensor: tensor, recorder, most_positions=100)
    caches = [(decoding, [decoding.cache(20) for _ in modules]) for decoding in (plain, recorded)]

    @torch.inference_mode()
    def step(decoding: Decoding, module: StageModule, cache: KeyValueCache) -> Tensor:
        positions = NextPositions(cache=cache, tokens=[TOKENS[0][cache.num_positions]])
        return _output(decoding.compute(lambda: module, [positions])[0])

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
