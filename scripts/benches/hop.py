"""Measures the hop against hivemind.moe: activations to a stage that does no work, and a gradient back.

This process acts as stage 0, in an event loop like a peer's, and hands microbatches to a swarm-peer of the last of two
stages. Its loss, of a vocabulary of two, takes some milliseconds, which count as our time. hivemind's side is an
identity that its Server serves, called through RemoteExpert. Then four microbatches at a time go there and back, in
turns with a pair of TLS sockets: how much does the hop carry, and how much of the cores does it take?
"""

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import hivemind
import torch
from hivemind.moe.client.expert import RemoteExpert, create_remote_experts
from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.p2p import PeerID
from torch import Tensor

from peers.local.supervisor import Supervisor
from scripts.benches.shared import paired, proc
from scripts.benches.shared.common import (
    BenchOptions,
    compute_like_peers,
    run_of,
    say,
    side,
    wait_for_json,
    with_corpus,
    workplace,
)
from scripts.benches.shared.swarm import StageBefore, SwarmProcesses
from scripts.benches.sides.moe import EXPERT
from scripts.benches.sides.paced_stage import VOCABULARY, Identity
from scripts.benches.sides.tls_sockets import IN_FLIGHT, Pair
from swarm.config import RunConfig
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Loop
from swarm.rpc.wire import DTYPES
from swarm.stage.boundary import HIDDEN, TOKENS


@dataclass(frozen=True)
class Shape:
    """The shape of a hidden state, and its type on the wire."""

    num_samples: int
    num_positions: int
    width: int
    encoding: Literal["fp32", "bf16"] = "fp32"

    def hidden(self) -> Tensor:
        sizes = self.num_samples, self.num_positions, self.width
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(DTYPES[self.encoding])


LOAD = Shape(8, 1024, 768, "bf16")  # 12 MiB, of which four are under way at a time
SHAPES = {"8 MiB": Shape(8, 256, 1024), "16 KiB": Shape(1, 16, 256)}
TIMES_AS_MANY = {"8 MiB": 1, "16 KiB": 10}
"""How many calls of each size a turn has, relative to the calls of the largest size."""

LOAD_CALLS = 24  # Calls of a turn with 12 MiB each way, four at a time
WARM_UP = 3  # Calls of each side before the first turn
ATTEMPTS = 3  # The bench fails if this many calls of hivemind.moe in a row fail


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare one hop with hivemind.moe's remote expert."""

    repetitions: int = 7
    """Turns of each side."""
    calls: int = 5
    """Calls of a turn with 8 MiB; ten times as many with 16 KiB."""


def run(options: Options) -> dict[str, Any]:
    compute_like_peers()
    configs = {size: with_corpus(_config(options, shape))[0] for size, shape in SHAPES.items()}
    with workplace("hop") as (folder, children):
        say("hivemind.moe's servers and our peers start")
        # hivemind's side starts first: it forks, and gRPC must not be loaded yet when it does.
        theirs = {size: _connect_expert(shape, children, folder / size) for size, shape in SHAPES.items()}
        with asyncio.Runner(loop_factory=Loop) as runner:
            turns: dict[str, paired.Turns] = {}
            for size, shape in SHAPES.items():
                swarm = SwarmProcesses(configs[size], children, folder / size / "swarm")
                swarm.start_peers([1])
                ours = runner.run(_connect_hop(swarm, shape))
                turns[size] = _measure(options, size, _turn_of(runner, ours), theirs[size].call)
                runner.run(ours.channels.close())
                swarm.stop()
            for expert in theirs.values():
                expert.close()
            load = _measure_load(options, children, folder / "load", runner)
    ratios = {size: paired.ratio(sides["hivemind_moe"], sides["ours"]) for size, sides in turns.items()}
    return {
        **paired.figures(
            {
                "ratio_to_hivemind_moe": ratios["8 MiB"],
                "small_ratio_to_hivemind_moe": ratios["16 KiB"],
                "ratio_to_tls_socket": paired.ratio(load.seconds["tls_sockets"], load.seconds["ours"]),
            }
        ),
        **load.figures(),
        "median_seconds": {size: paired.medians(sides) for size, sides in turns.items()},
        "repetitions": {**turns, "load": load.seconds},
        "hivemind_moe_failed_calls": sum(expert.num_failed for expert in theirs.values()),
    }


def _measure(
    options: Options, size: str, ours: Callable[[], float], theirs: Callable[[], float]
) -> dict[str, list[float]]:
    """For each side, the median seconds of a call in every turn."""
    sides = {"ours": ours, "hivemind_moe": theirs}
    for call in sides.values():
        for _ in range(WARM_UP):
            call()

    def turn(call: Callable[[], float], number: int) -> float:
        return statistics.median(call() for _ in range(options.calls * TIMES_AS_MANY[size]))

    return paired.in_turns({name: partial(turn, call) for name, call in sides.items()}, options.repetitions, what=size)


@dataclass(frozen=True, kw_only=True)
class _Load:
    num_bytes: int  # Of one turn, there and back
    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]  # Of both processes of a side, in each turn

    def figures(self) -> dict[str, Any]:
        cpu = {name: 1e9 * statistics.median(turns) / self.num_bytes for name, turns in self.cpu_seconds.items()}
        rates = {name: 1e-6 * self.num_bytes / seconds for name, seconds in paired.medians(self.seconds).items()}
        return {
            "megabytes_per_second": rates["ours"],
            "cpu_seconds_per_gigabyte": cpu["ours"],
            "tls_sockets": {
                "megabytes_per_second": rates["tls_sockets"], "cpu_seconds_per_gigabyte": cpu["tls_sockets"],
            },
        }  # fmt: skip


def _measure_load(options: Options, children: Supervisor, folder: Path, runner: asyncio.Runner) -> _Load:
    swarm = SwarmProcesses(with_corpus(_config(options, LOAD))[0], children, folder / "swarm")
    swarm.start_peers([1])
    ours = runner.run(_connect_hop(swarm, LOAD))
    tls = Pair(children, folder / "tls", num_bytes=LOAD.hidden().nbytes)
    works: dict[str, tuple[Callable[[], None], int]] = {
        "ours": (lambda: runner.run(_several(ours, LOAD_CALLS)), swarm.peers[0].child.pid),
        "tls_sockets": (lambda: tls.exchange(LOAD_CALLS), tls.pid),
    }
    cpu_seconds: dict[str, list[float]] = {name: [] for name in works}

    def turn(name: str, number: int) -> float:
        work, pid = works[name]
        start, cpu_start = time.perf_counter(), _cpu_seconds(pid)
        work()
        cpu_seconds[name].append(_cpu_seconds(pid) - cpu_start)
        return time.perf_counter() - start

    for work, _ in works.values():
        work()
    turns = {name: partial(turn, name) for name in works}
    seconds = paired.in_turns(turns, options.repetitions, what="12 MiB, four at a time")
    tls.close()
    runner.run(ours.channels.close())
    swarm.stop()
    num_bytes = 2 * LOAD.hidden().nbytes * LOAD_CALLS
    return _Load(num_bytes=num_bytes, seconds=seconds, cpu_seconds=cpu_seconds)


def _turn_of(runner: asyncio.Runner, ours: StageBefore) -> Callable[[], float]:
    return lambda: runner.run(ours.call())


def _cpu_seconds(pid: int) -> float:
    return proc.cpu_seconds(pid) + proc.cpu_seconds(os.getpid())


def _config(options: Options, shape: Shape) -> RunConfig:
    # No round ends while the bench runs.
    return run_of(
        "hop", width=shape.width, layers=2, head_width=shape.width // 8, stages=2, setting="diloco",
        length=shape.num_positions, microbatch=shape.num_samples, round_samples=shape.num_samples << 20,
        dataset=options.dataset, model={"custom_class": f"{Identity.__module__}:{Identity.__name__}"},
        data={"max_tokens": 1_000_000}, wire={"dtype": shape.encoding},
        rounds={"inner_batch_samples": shape.num_samples},
    )  # fmt: skip


async def _connect_hop(swarm: SwarmProcesses, shape: Shape) -> StageBefore:
    tokens_BT1 = torch.randint(VOCABULARY, (shape.num_samples, shape.num_positions + 1), dtype=torch.int32)
    return StageBefore(*swarm.hop(1), {TOKENS: tokens_BT1, HIDDEN: shape.hidden()})


async def _several(ours: StageBefore, number: int) -> None:
    async with asyncio.TaskGroup() as tasks:
        room = asyncio.Semaphore(IN_FLIGHT)

        async def call() -> None:
            await ours.call()
            room.release()

        for _ in range(number):
            await room.acquire()
            tasks.create_task(call())


@dataclass(eq=False)
class TheirExpert:
    expert: RemoteExpert
    dht: hivemind.DHT
    hidden_BTD: Tensor
    gradient_BTD: Tensor
    num_failed: int = 0

    def call(self) -> float:
        """Forward, then backward, and return the seconds. Sometimes hivemind loses the second half of a stream: such a
        call is counted and repeated."""
        for _ in range(ATTEMPTS):
            try:
                return self._call()
            except RuntimeError as error:
                self.num_failed += 1
                say(f"a call of hivemind.moe failed: {error}")
        raise PeerUnavailable(f"hivemind.moe failed {ATTEMPTS} times in a row")

    def _call(self) -> float:
        inputs_BTD = self.hidden_BTD.clone().requires_grad_()
        start = time.perf_counter()
        self.expert(inputs_BTD).backward(self.gradient_BTD)
        seconds = time.perf_counter() - start
        assert inputs_BTD.grad is not None
        return seconds

    def close(self) -> None:
        RemoteExpertWorker.run_coroutine(self.expert.p2p.shutdown())
        self.dht.shutdown()


def _connect_expert(shape: Shape, children: Supervisor, folder: Path) -> TheirExpert:
    folder.mkdir()
    ready_file = folder / "moe.json"
    command = side("moe", "identity", ready_file, shape.num_positions, shape.width)
    children.start(f"moe-server-{shape.width}", command)
    addresses = wait_for_json(ready_file, children)["addresses"]
    dht = hivemind.DHT(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    server_id = PeerID.from_base58(addresses[0].rsplit("/", 1)[1])
    (expert,) = create_remote_experts([ExpertInfo(EXPERT, server_id)], dht)
    return TheirExpert(expert, dht, shape.hidden(), torch.ones_like(shape.hidden()))
