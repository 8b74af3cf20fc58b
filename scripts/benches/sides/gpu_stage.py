"""For the bench `gpu`: one stage in the middle without the network, as the swarm computes it and as a bare loop."""

import asyncio
import time
from collections.abc import Callable

import torch

from swarm.config import RunConfig
from swarm.machine.recording import Recorder
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS, boundary_of
from swarm.stage.graphs import GraphBudget
from swarm.stage.runtime import Runtime
from swarm.stage.settings import weights_of
from swarm.stage.staging import Staging, staging_of
from swarm.stage.task_queue import Priority

IN_FLIGHT = 5  # Microbatches at once: as many as a peer of three stages takes
GRAPH_WARM_UP = 3  # Passes before a graph is captured, as torch asks for


class StageSide:
    """The swarm's stage 1 of a run."""

    def __init__(
        self, config: RunConfig, device: torch.device, *, compiles: bool, recorder: Recorder | None = None
    ) -> None:
        self._config = config
        self._staging = staging_of(device)
        module = build_stage(config, 1, device=device)
        if compiles:
            assert isinstance(module, StageModule)
            module.compile_layers()
        self.backend = StageBackend(
            config=config, stage=1, module=module, weights=weights_of(config, module, lineage=""),
            staging=self._staging, budget=GraphBudget(limit_bytes=1 << 40), recorder=recorder,
        )  # fmt: skip
        # As a peer does before it serves.
        self.backend.warm_up()
        shape = (config.data.microbatch_size, config.data.sequence_length)
        tensor_BTR = torch.randn(*shape, config.model.hidden_width)
        self._wire = boundary_of(config).encode(tensor_BTR, Staging()).wait()
        self._gradient = boundary_of(config).encode(1e-4 * tensor_BTR, Staging()).wait()
        self._tokens = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int32)

    def tokens_per_second(self, num_microbatches: int) -> float:
        runtime = Runtime(queue_capacity=IN_FLIGHT, stopwatch=self._staging.stopwatch)
        runtime.start()
        try:
            started_at = time.perf_counter()
            asyncio.run(self._work(runtime, num_microbatches))
            seconds = time.perf_counter() - started_at
        finally:
            runtime.stop(timeout_seconds=60.0)
        return num_microbatches * self._config.data.tokens_per_microbatch / seconds

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


class BareSide:
    """The forward and backward of that stage's layers, again and again."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._num_tokens = config.data.tokens_per_microbatch
        self._device = device
        module = build_stage(config, 1, device=device)
        shape = (config.data.microbatch_size, config.data.sequence_length, config.model.hidden_width)
        inputs_BTR = torch.randn(shape, device=device, requires_grad=True)
        gradient_BTR = torch.randn(shape, device=device)
        wanted = [inputs_BTR, *module.parameters()]

        def compute() -> None:
            torch.autograd.grad(module(inputs_BTR), wanted, grad_outputs=gradient_BTR)

        self._run: Callable[[], None] = _captured(compute) if device.type == "cuda" else compute

    def tokens_per_second(self, num_microbatches: int) -> float:
        synchronise(self._device)
        started_at = time.perf_counter()
        for _ in range(num_microbatches):
            self._run()
        synchronise(self._device)
        return num_microbatches * self._num_tokens / (time.perf_counter() - started_at)


def _captured(compute: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(GRAPH_WARM_UP):
            compute()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    replay: Callable[[], None] = graph.replay
    return replay


def synchronise(device: torch.device) -> None:
    """Wait for all work of a GPU; on a CPU nothing waits."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
