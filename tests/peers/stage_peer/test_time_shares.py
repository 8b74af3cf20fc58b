"""What a stage peer did with the last minute, by made-up seconds, and the operations of a microbatch."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from peers.stage_peer.presence import TimeWatch, microbatch_flops
from swarm.config import LoraConfig, ModelConfig, RunConfig
from swarm.model.stages import build_stage
from swarm.stage.stage import Stage
from tests.stage.backends import CONFIG
from tests.support.manual_clock import ManualClock


@dataclass
class _Peer:
    """A stage of which only what the watch looks at is there."""

    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.runtime = SimpleNamespace(busy_seconds=0.0)
        layers = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Linear(2, 2)})})
        backend = SimpleNamespace(config=CONFIG, module=layers)
        self.context = SimpleNamespace(runtime=self.runtime, is_held_up=False, backend=backend)
        self.stage = SimpleNamespace(number=1, counters=Counter[str](), context=self.context, stands_still=False)
        self.watch = TimeWatch(cast(Stage, self.stage), self.clock, peak_flops=100.0)

    def live(self, seconds: float, *, busy: float = 0.0, tasks: int = 0) -> None:
        self.runtime.busy_seconds += busy
        self.stage.counters["forwards"] += tasks
        self.clock.advance(seconds)
        self.watch.look()


def test_time_goes_to_what_is_waited_for_when_nothing_is_computed() -> None:
    peer = _Peer()
    peer.live(10.0, busy=5.0, tasks=3)
    peer.context.is_held_up = True
    peer.live(4.0, busy=1.0)
    peer.stage.stands_still = True
    peer.live(6.0)
    shares = peer.watch.shares
    assert (shares.computing, shares.waiting_for_input, shares.waiting_for_room, shares.averaging) == (
        0.3, 0.25, 0.15, 0.3,
    )  # fmt: skip
    assert shares.utilisation == shares.flops_per_second / 100.0 > 0.0


GROUPED = ModelConfig(num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=64, tied_embeddings=True)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, model=GROUPED),
        dataclasses.replace(CONFIG, lora=LoraConfig(rank=2, targets=("all-linear",))),
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_operations_are_those_that_torch_counts(config: RunConfig, stage: int) -> None:
    module = build_stage(config, stage, device="cpu", fused=True)
    shape = config.data.microbatch_size, config.data.sequence_length, config.model.d_model
    hidden_BTD = torch.randn(shape, requires_grad=True)
    # torch counts attention only where it is made of products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        outputs = module(hidden_BTD)
        forward = counted.get_total_flops()
        outputs.sum().backward()
    assert microbatch_flops(config, stage, module) == (forward, counted.get_total_flops() - forward)
