"""The workers that torchrun has started, or this process alone, and the mesh that they form."""

import contextlib
import gc
import ipaddress
import logging
import math
import os
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from peers.shared import devices, stopping
from peers.static.options import StaticOptions, is_first_here
from swarm.errors import PeerUnavailable
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.rpc.endpoint import own_host

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
ANYWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way to it is that to any other machine. Nothing is sent there."""
PATIENCE = timedelta(minutes=10)
"""How long a worker waits for others, which may be preparing text or writing a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many workers there are along each axis.

    Attributes:
        dp: groups of workers that compute different microbatches.
        tp: workers that share every layer.
        pp: stages of the pipeline.
    """

    dp: int
    tp: int
    pp: int


def num_threads(environment: Mapping[str, str], num_cores: int) -> int | None:
    """The number of threads with which a worker computes on the CPU: its share of the machine's cores. None if the user
    has set the number in the environment."""
    chosen = environment.get("OMP_NUM_THREADS", "")
    # For several workers torchrun itself sets 1. With that, most cores of a large machine would be idle.
    if chosen and not (chosen == "1" and "TORCHELASTIC_RUN_ID" in environment):
        return None
    return max(1, num_cores // int(environment.get("LOCAL_WORLD_SIZE", "1")))


def shape_of(options: StaticOptions, environment: Mapping[str, str]) -> Shape:
    """The shape of the mesh. Raises ValueError if torchrun has started more or fewer workers than the options need."""
    num_workers = int(environment.get("WORLD_SIZE", "1"))
    others = options.tp * options.pp
    dp = options.dp or max(1, num_workers // others)
    if dp * others != num_workers:
        sizes = f"--dp {dp} --tp {options.tp} --pp {options.pp}"
        here = "there is one" if num_workers == 1 else f"there are {num_workers}"
        raise ValueError(
            f"{sizes} takes {dp * others} workers, and {here}: start it as "
            f"torchrun --nproc-per-node {dp * others} --no-python swarm-static ..."
        )
    if options.fsdp and dp == 1:
        raise ValueError("--fsdp cuts weights over the --dp workers, and there is one: start several with torchrun")
    if options.compress and dp == 1:
        raise ValueError(
            "--compress is for what --dp workers send to each other, and there is one: start several with torchrun"
        )
    return Shape(dp=dp, tp=options.tp, pp=options.pp)


def device_of(name: str, environment: Mapping[str, str]) -> torch.device:
    """The device of this worker. Raises ValueError if its machine lacks the GPUs, or they are for fewer workers."""
    if name == "mps":
        if environment.get("WORLD_SIZE", "1") != "1":
            raise ValueError("--device mps is for one worker: start swarm-static without torchrun, or on the CPU")
        return devices.device_of(name, random.Random())
    num_gpus, needed = torch.cuda.device_count(), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus < needed:
        raise ValueError(
            f"--device {name}: each worker needs a GPU, and this machine has {num_gpus} for {needed}; start fewer, or "
            "give --device cpu"
        )
    return torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))


@dataclass(frozen=True, kw_only=True, eq=False)
class Workers:
    """All workers, as one of them sees them. `is_first_here` says whether that is its machine's first one."""

    shape: Shape
    device: torch.device
    mesh: DeviceMesh
    is_first_here: bool

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one that prints and writes figures for all (rank 0)."""
        return dist.get_rank() == 0

    def place(self, axis: str) -> int:
        """This worker's index on the axis dp, tp or pp."""
        return self.mesh.get_local_rank(axis)

    def one_after_another(self, work: Callable[[], Result]) -> Result:
        """Call `work` in each machine's first worker, and then in the others, which find its files. All call this."""
        if not self.is_first_here:
            self.total()
        result = work()
        if self.is_first_here:
            self.total()
        return result

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over all workers, in float64; all of them call it."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()


@contextlib.contextmanager
def joined(shape: Shape, device: torch.device, environment: Mapping[str, str]) -> Iterator[Workers]:
    """Be connected to the other workers inside the block. Raises PeerUnavailable if one of them is gone."""
    # Small numbers are summed on the CPU (gloo), so that reading them does not wait for a GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if interface := interface_to_others(environment, psutil.net_if_addrs()):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=_store(environment),
        rank=int(environment.get("RANK", "0")),
        world_size=math.prod((shape.dp, shape.tp, shape.pp)),
        timeout=PATIENCE,
    )
    try:
        # On MPS there is one worker, which exchanges nothing, and torch has no such mesh.
        kind = "cuda" if device.type == "cuda" else "cpu"
        mesh = init_device_mesh(kind, (shape.pp, shape.dp, shape.tp), mesh_dim_names=("pp", "dp", "tp"))
        yield Workers(shape=shape, device=device, mesh=mesh, is_first_here=is_first_here(environment))
    except RuntimeError as error:
        # If an exchange fails, NCCL raises a DistError, and gloo a plain RuntimeError.
        may_be_loss = isinstance(error, dist.DistError) or type(error) is RuntimeError
        if dist.get_world_size() == 1 or not may_be_loss or is_out_of_memory(error):
            raise
        raise PeerUnavailable(
            f"this worker cannot go on, most likely because another one is gone: {stopping.first_line(error)}; "
            "--log-level debug shows where"
        ) from error
    finally:
        # Pipelines and FSDP's modules are reference cycles, so they are collected here: freeing them after their
        # process groups would hang.
        gc.collect()
        dist.destroy_process_group()


def interface_to_others(environment: Mapping[str, str], interfaces: Mapping[str, Sequence[Any]]) -> str | None:
    """The network interface by which this machine reaches the others, for gloo; None where it need not be told. gloo
    itself takes the address of the machine's name, which is 127.0.1.1 on many Linux systems."""
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE") or "GLOO_SOCKET_IFNAME" in environment:
        return None
    by_address = {each.address: name for name, addresses in interfaces.items() for each in addresses}
    # The machine of the first worker may know itself by a loopback address: there the way to any other machine counts.
    for host in (environment.get("MASTER_ADDR", ""), ANYWHERE):
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            own = own_host(family, (str(address[0]), 1))
        except OSError:
            continue
        if not ipaddress.ip_address(own).is_loopback:
            return by_address.get(own)
    return None


def _store(environment: Mapping[str, str]) -> Store:
    if "WORLD_SIZE" not in environment:
        return HashStore()
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=PATIENCE))
    if environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun's shared store still has the addresses of dead workers, and machines may count restarts
            # differently.
            logger.warning(
                "if a worker dies, those that are started again will not meet: set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, on every machine"
            )
        return store
    # On one machine torchrun starts workers again with the same store, which still has the addresses of dead workers.
    return PrefixStore(environment.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
