"""For the bench `gpu`: one stage in the middle without the network, as the swarm computes it and as a bare loop."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.shared.devices import most_device_bytes
from scripts.benches.sides.reference import torch_adamw
from swarm.config import ModelConfig, RunConfig
from swarm.data.microbatches import Microbatches
from swarm.machine.recording import Recorder
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage, build_transformer
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS, boundary_of
from swarm.stage.graphs import GraphBudget
from swarm.stage.runtime import Priority, Runtime
from swarm.stage.stage import weights_of
from swarm.stage.staging import Staging, staging_of


class PlainLayer(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, wide, self.num_heads = model.d_model, model.feed_forward_width, model.num_heads
        self.attention_norm = nn.RMSNorm(width, model.norm_epsilon)
        self.q, self.k, self.v, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.feed_forward_norm = nn.RMSNorm(width, model.norm_epsilon)
        self.gate, self.up = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, hidden_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        normed_BTD = self.attention_norm(hidden_BTD)
        q, k, v = (
            each(normed_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = (heads * cos_TK + _turned(heads) * sin_TK for heads in (q, k))
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        hidden_BTD = hidden_BTD + self.output(mixed.transpose(1, 2).flatten(2))
        normed_BTD = self.feed_forward_norm(hidden_BTD)
        output_BTD: Tensor = self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))
        return hidden_BTD + output_BTD


def _turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainLlama(nn.Module):
    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model, length = config.model, config.data.sequence_length
        self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.d_model, model.norm_epsilon)
        self.head = nn.Linear(model.d_model, model.vocab_size, bias=False)
        width = model.width_of_heads
        frequencies = model.rope_theta ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos_TK", angles.cos())
        self.register_buffer("sin_TK", angles.sin())
        renamed = {_own_name(name): value for name, value in build_transformer(config, device="cpu").named_parameters()}
        self.load_state_dict(renamed, strict=False)
        assert renamed.keys() == dict(self.named_parameters()).keys(), "each weight has its place"

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, self.cos_TK, self.sin_TK)
        logits_BTV = self.head(self.norm(hidden_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def _own_name(name: str) -> str:
    for ours, own in (
        ("attention.", ""), ("feed_forward.", ""), ("head.norm", "norm"), ("head.output", "head"),
    ):  # fmt: skip
        name = name.replace(ours, own)
    return name


@dataclass(frozen=True, kw_only=True)
class PlainFigures:
    tokens_per_second: float
    losses: list[float]
    peak_bytes: int


def train(
    config: RunConfig, data: Microbatches, device: torch.device, *, warm_up: int, steps: int, compiles: bool
) -> PlainFigures:
    """Train a synchronous run: some steps to warm up, and then those whose time counts."""
    cuda, optimizer_config = device.type == "cuda", config.gradient_step
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        torch.set_float32_matmul_precision("high")
    model = PlainLlama(config).to(device)
    compute = torch.compile(model) if compiles else model
    optimizer = torch_adamw(model, optimizer_config, fused=True)
    size, narrow = config.microbatches_per_round, config.model.autocast == "bf16"
    losses, began_at = [], 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            synchronise(device)
            began_at = time.perf_counter()
        total = torch.zeros((), device=device)
        for number in range(step * size, (step + 1) * size):
            tokens = data.samples(number)[TOKENS].to(device, non_blocking=True).long()
            with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                loss = compute(tokens[:, :-1], tokens[:, 1:]) / size
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), optimizer_config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    synchronise(device)
    seconds = time.perf_counter() - began_at
    return PlainFigures(
        tokens_per_second=steps * size * config.data.tokens_per_microbatch / seconds,
        losses=[float(loss) for loss in losses],
        peak_bytes=int(torch.cuda.max_memory_allocated(device)) if cuda else 0,
    )


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
        self._wire, self._gradient = (
            self._received(boundary_of(config).encode(size * tensor_BTR, Staging()).wait()) for size in (1.0, 1e-4)
        )
        self._tokens = self._received(torch.zeros(shape[0], shape[1] + 1, dtype=torch.int32))

    def _received(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the memory into which the network would have written it."""
        return self._staging.host_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

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


@contextmanager
def noting_memory(side: str, device: torch.device, found: dict[str, Any]) -> Iterator[None]:
    """Note as SIDE_device_bytes the most memory that a side takes of a GPU while the block makes it and has it work."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield
    found[f"{side}_device_bytes"] = most_device_bytes(device) - before
