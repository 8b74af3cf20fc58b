"""What does a GPU stage gain from copies that it does not wait for?

A middle stage, its compute thread and its staging are the swarm's own code. Only the network is missing: the gradient
of a microbatch's output is there at once. Several microbatches are always under way. The stage takes turns at copying
in two ways: as the swarm does (swarm/stage/staging.py), and in the plain way, in which the compute thread waits for
each copy.
"""

import asyncio
import gc
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from peers.shared import cli
from scripts.benches.shared import paired
from scripts.benches.shared.common import OutputOptions, require_multiple, say
from scripts.benches.shared.judged import MORE
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig, WireConfig
from swarm.model.stages import build_stage
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS, boundary_of
from swarm.stage.graphs import GraphBudget
from swarm.stage.runtime import Runtime
from swarm.stage.settings import weights_of
from swarm.stage.staging import Convert, CudaStaging, Download, Staging
from swarm.stage.task_queue import Priority

IN_FLIGHT = 5
"""Microbatches at once: as many as a peer of three stages takes."""
WARM_UP = 10
"""Microbatches before the first turn of a side."""

JUDGED = {"ratio_to_blocking": MORE}


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Measure a stage on a GPU."""

    d_model: int = 1024
    """Width of the model; a multiple of 64."""
    layers: int = 4
    """Layers of the stage."""
    autocast: Literal["off", "bf16"] = "bf16"
    """What matrix products are computed in."""
    wire: Literal["fp32", "bf16", "int8"] = "bf16"
    """How hidden states and gradients travel."""
    microbatches: int = 100
    """Microbatches of 8 samples of 512 tokens in each turn."""
    repetitions: int = 7
    """Turns of each side."""

    def __post_init__(self) -> None:
        cli.require_at_least(self, {"layers": 1, "microbatches": 1, "repetitions": 1})
        require_multiple("d-model", self.d_model, 64)


class BlockingStaging(Staging):
    """Copies on the compute thread. Each copy waits until the GPU has done all its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def download(self, tensor: torch.Tensor, convert: Convert | None = None) -> Download:
        return super().download(tensor.cpu(), convert)


def run(options: Options) -> dict[str, Any]:
    """Measure both ways in turns, and return the medians. Raises ValueError if there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("this bench needs a GPU, and PyTorch finds none: run it on a machine that has one")
    device, config = torch.device("cuda"), config_of(options)
    stagings = {"swarm": CudaStaging(device), "blocking": BlockingStaging(device)}
    # cuBLAS keeps memory for each thread that has used it. That memory must not count for either side.
    Side(config, device, BlockingStaging(device)).tokens_per_second(1)
    gc.collect()
    sides, device_bytes = {}, {}
    for name, staging in stagings.items():
        # Memory of sides that exist already is not counted.
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        sides[name] = Side(config, device, staging)
        sides[name].tokens_per_second(WARM_UP)
        device_bytes[name] = torch.cuda.max_memory_allocated(device) - before
        say(f"{name}: {device_bytes[name] / 1e6:,.0f} MB")
    rates = paired.in_turns(
        {name: partial(_turn, side, options.microbatches) for name, side in sides.items()},
        options.repetitions,
        what="turns",
        unit="tokens/s",
    )
    medians = paired.medians(rates)
    return {
        **paired.figures({"ratio_to_blocking": paired.ratio(rates["swarm"], rates["blocking"])}),
        "tokens_per_second": medians["swarm"],
        "tokens_per_second_blocking": medians["blocking"],
        "repetitions": rates,
        "device_bytes": device_bytes["swarm"],
        "device_bytes_blocking": device_bytes["blocking"],
        "gpu": torch.cuda.get_device_name(device),
    }


def _turn(side: "Side", num_microbatches: int, number: int) -> float:
    return side.tokens_per_second(num_microbatches)


def config_of(options: Options) -> RunConfig:
    """Three stages, of which one is measured."""
    return RunConfig(
        run="cuda",
        model=ModelConfig(
            num_layers=3 * options.layers,
            d_model=options.d_model,
            num_heads=options.d_model // 64,
            autocast=options.autocast,
        ),
        stages=StagesConfig(num_stages=3),
        data=DataConfig(sequence_length=512, microbatch_size=8),
        rounds=RoundsConfig(setting="synchronous"),
        wire=WireConfig(dtype=options.wire),
    )


class Side:
    """A stage that copies in one way."""

    def __init__(self, config: RunConfig, device: torch.device, staging: Staging) -> None:
        self._config = config
        self._staging = staging
        module = build_stage(config, 1, device=device)
        self.backend = StageBackend(
            config=config,
            stage=1,
            module=module,
            weights=weights_of(config, module, lineage=""),
            staging=staging,
            budget=GraphBudget(limit_bytes=1 << 40),
        )
        shape = (config.data.microbatch_size, config.data.sequence_length)
        tensor_BTR = torch.randn(*shape, config.model.hidden_width)
        self._wire = boundary_of(config).encode(tensor_BTR, Staging()).wait()
        self._gradient = boundary_of(config).encode(1e-4 * tensor_BTR, Staging()).wait()
        self._tokens = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int32)

    def tokens_per_second(self, num_microbatches: int) -> float:
        """Compute this many microbatches, and return the rate."""
        runtime = Runtime(queue_capacity=IN_FLIGHT, stopwatch=self._staging.stopwatch)
        runtime.start()
        try:
            started_at = time.perf_counter()
            asyncio.run(self._work(runtime, num_microbatches))
            seconds = time.perf_counter() - started_at
        finally:
            runtime.stop(timeout_seconds=60.0)
        return num_microbatches * self._tokens[:, 1:].numel() / seconds

    async def _work(self, runtime: Runtime, num_microbatches: int) -> None:
        numbers = iter(range(num_microbatches))

        async def one_after_another() -> None:
            for number in numbers:
                await self._microbatch(runtime, number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(one_after_another())

    async def _microbatch(self, runtime: Runtime, number: int) -> None:
        inputs = {TOKENS: self._tokens, HIDDEN: self._wire}
        forward, _ = await runtime.run(
            lambda: self.backend.forward(number, 0, inputs), priority=Priority.FORWARD, age=number
        )
        assert forward.wire_hidden is not None
        await forward.wire_hidden.arrived()
        (answer, accumulated), _ = await runtime.run(
            lambda: self.backend.backward(forward, self._gradient, accumulate=True),
            priority=Priority.BACKWARD,
            age=number,
        )
        assert answer is not None
        await answer.arrived()
        assert accumulated is not None
        await runtime.control(lambda: self.backend.settle(accumulated))
