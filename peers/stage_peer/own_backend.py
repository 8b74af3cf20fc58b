"""Makes a stage's model on this machine's device, and checks that there is room for what its first step allocates.

Used by server.py. With this check, a stage that does not fit fails at the start, and not after an hour. The model also
computes once before the peer serves, because a first computation may take a minute.
"""

import logging

import torch

from peers.shared import devices, process
from peers.shared.devices import Dtype
from peers.stage_peer.resume import genesis
from swarm.config import RunConfig
from swarm.errors import Fatal
from swarm.events.kinds import Events
from swarm.interchange.weights import Weights
from swarm.machine.clock import Clock
from swarm.machine.out_of_memory import in_words, is_out_of_memory, what_was_asked
from swarm.machine.recording import Recorder
from swarm.model.compiled import go_on_uncompiled
from swarm.model.functions import fuses
from swarm.model.loss import loss_bytes
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage, parameter_shapes
from swarm.stage.backend import StageBackend
from swarm.stage.graphs import GraphBudget
from swarm.stage.runtime import Runtime
from swarm.stage.settings import weights_of
from swarm.stage.staging import Staging

logger = logging.getLogger(__name__)


def own_backend(
    config: RunConfig, stage: int, *, device: torch.device, staging: Staging, given: Weights | None,
    graph_bytes: int | None, events: Events, dtype: Dtype | None = None, compiles: bool = False,
    recorder: Recorder | None = None,
) -> StageBackend:  # fmt: skip
    """Make the model and its weights, at their initial values.

    Args:
        given: the weights with which the run begins; None if they are drawn from the run's seed.
        graph_bytes: the bytes that autograd graphs may take; None for a share of the memory that is free once the model
            is built.
        dtype: the type of matrix products; None for that of the run.
        compiles: whether to compile the layers; StageBackend.warm_up then takes long.
        recorder: as in StageBackend.

    Raises:
        Fatal: the stage does not fit on the device.
    """
    config = devices.computing_in(config, dtype, device)
    devices.warn_of_emulation(config.model, device)
    try:
        tensors = None if given is None else given.load(parameter_shapes(config, stage))
        module = build_stage(config, stage, device=device, weights=tensors)
        del tensors
        if compiles and isinstance(module, StageModule):
            module.compile_layers()
        weights = weights_of(config, module, lineage=genesis(config, stage), events=events)
        # What the first step will allocate is allocated here and freed again: two moments, a second sum, another copy
        # of the weights, and at the last stage the loss. The server's threads need addresses as well.
        first_step = [torch.empty_like(master) for master in weights.masters.values() for _ in range(4)]
        if stage == config.stages.num_stages - 1:
            num_bytes = loss_bytes(config.model, config.data.tokens_per_microbatch, fused=fuses(device))
            first_step.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        first_step_bytes = sum(tensor.nbytes for tensor in first_step)
        process.require_addresses(process.THREAD_BYTES)
        del first_step
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        asked = what_was_asked(error)
        raise Fatal(
            f"stage {stage} does not fit on {device} (no room for {asked}): take more stages, or another --device"
        ) from None
    logger.info("stage %d computes %s and sends %s", stage, devices.in_words(config, device), config.wire.dtype)
    if graph_bytes is None:
        graph_bytes = devices.graph_bytes(devices.here(device), needed_bytes=first_step_bytes)
    return StageBackend(
        config=config,
        stage=stage,
        module=module,
        staging=staging,
        weights=weights,
        budget=GraphBudget(limit_bytes=graph_bytes),
        events=events,
        recorder=recorder,
    )


async def warm_up(
    backend: StageBackend, runtime: Runtime, clock: Clock, *, device: torch.device, compiles: bool
) -> None:
    """Compile and record what is to be, and have a GPU choose its kernels, before others count on this peer.

    On a CPU without compiled layers there is nothing to do. Layers that cannot be compiled run uncompiled.
    """
    if not compiles and device.type != "cuda":
        return
    began_at = clock.monotonic()
    if compiles:
        logger.info("compiling the layers of stage %d, which takes a minute the first time", backend.stage)
    try:
        await runtime.control(backend.warm_up)
    except Exception as error:
        if not compiles or is_out_of_memory(error):
            raise
        go_on_uncompiled(error, device)
        compiles = False
        await runtime.control(backend.warm_up)
    verb, seconds = "compiled" if compiles else "warmed up", clock.monotonic() - began_at
    recorded_bytes = backend.budget.recorded_bytes
    graphs = f"; their CUDA graphs take {in_words(recorded_bytes)}" if recorded_bytes else ""
    logger.info("%s the layers of stage %d in %.0f s%s", verb, backend.stage, seconds, graphs)
