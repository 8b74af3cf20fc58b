"""Two stages that compute texts side by side, plainly and with recorded steps, on any device."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.benches.shared.common import run_of
from swarm.config import RunConfig
from swarm.generation.decoding import Decoding, NextPositions
from swarm.machine.recording import Recorder
from swarm.model.cache import KeyValueCache
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage

LONGEST, VOCABULARY, NUM_STAGES = 300, 64, 2
TOKENS = torch.randint(VOCABULARY, (5, LONGEST), generator=torch.Generator().manual_seed(0)).tolist()


def make_config(lora_rank: int = 0, **model: Any) -> RunConfig:
    return run_of(
        "decoding", width=32, layers=4, head_width=8, stages=NUM_STAGES, length=LONGEST, microbatch=8,
        model={"vocab_size": VOCABULARY, "init_std": 0.2, **model}, lora={"rank": lora_rank},
    )  # fmt: skip


def make_module(config: RunConfig, stage: int = 0, device: str = "cpu") -> StageModule:
    module = build_stage(config, stage, device=device)
    assert isinstance(module, StageModule)
    return module


def output(result: Tensor | BaseException) -> Tensor:
    """A copy, as a caller would make one before the next step."""
    assert isinstance(result, Tensor), result
    return result.clone()


class Chain:
    """Two stages that compute the sequences of TOKENS.

    Attributes:
        num_forwards: how often Python has run a stage.
    """

    def __init__(
        self, config: RunConfig, device: str, new_recorder: Callable[[], Recorder | None], *, compiles: bool = False
    ) -> None:
        self.num_forwards = 0
        self._modules = [make_module(config, stage, device) for stage in range(NUM_STAGES)]
        for module in self._modules:
            module.register_forward_hook(self._count)
        self._decodings = [
            Decoding(lambda tensor: tensor.to(device), new_recorder(), most_positions=4 * LONGEST)
            for _ in range(NUM_STAGES)
        ]
        for module, decoding in zip(self._modules, self._decodings, strict=True):
            if compiles:
                module.compile_layers()
                decoding.warm_up(module, lambda module=module: module)  # type: ignore[misc]  # mypy knows no defaults
        self._caches: dict[int, list[KeyValueCache]] = {}

    def _count(self, *_: object) -> None:
        self.num_forwards += 1

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
            outputs = [output(result) for result in found]
        return [output[-1] for output in outputs if output is not None]


def assert_recorded_steps_are_plain(
    config: RunConfig, new_recorder: Callable[[], Recorder | None], *, device: str, tolerance: float
) -> None:
    """Sequences of different lengths join and leave between steps, and one passes the length up to which the first
    recordings read. The logits differ by a share of `tolerance` at most."""
    chains = [Chain(config, device, lambda: None), Chain(config, device, new_recorder)]

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
    for _ in range(10):
        compute([3, 4, 0])
    compute([4, 3])
    before = [chain.num_forwards for chain in chains]
    for sequences in ([3, 4], [3, 4, 0], [0, 3], [4, 3, 0]):
        compute(sequences)
    assert [chain.num_forwards - number for chain, number in zip(chains, before, strict=True)] == [4 * NUM_STAGES, 0]
