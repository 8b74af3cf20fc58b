"""The blocks of this peer as they begin: the options of each, and their models on this machine's devices.

What does not fit fails at the start, and not after an hour.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from peers.shared import devices, needs, process
from peers.shared.room import named
from peers.stage_peer.incarnation import Incarnation
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.resume import ResumeOptions, genesis
from peers.status.exporter import OwnFigures
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig, Timeline
from swarm.errors import Fatal
from swarm.events import Events
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
from swarm.stage.stage import weights_of
from swarm.stage.staging import Staging
from swarm.stage.weights import StageWeights
from swarm.types import Block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of one served block. Those of a process differ only by the device, and in what belongs to a stage."""

    given: PeerOptions
    """What the user gave, with the name that this peer announces."""
    device: torch.device
    checkpoints: CheckpointWriter | None
    events: Events
    peak_flops: float = 0.0
    """The floating-point operations in a second that the device manages at best; 0 where that is not known."""
    compiles: bool = False
    """Whether layers are compiled; StageBackend.warm_up then takes long."""
    recorder: Recorder | None = None
    """Records what the peer computes again and again; None: nothing is recorded."""
    weights: Weights | None = None
    moves: bool = False
    """Whether the peer comes from another stage."""
    prefix: str = ""
    """What lines of the log about this block begin with: the stage, where the process serves several."""
    own_figures: OwnFigures = field(default_factory=OwnFigures)
    incarnation: Incarnation = field(default_factory=Incarnation)

    @property
    def resume(self) -> ResumeOptions:
        given, moves = self.given, self.moves
        return ResumeOptions(
            folder=given.resume, round_number=None if moves else given.resume_round, moves=moves,
            joins=moves or given.joins, starts_over=given.start_over, has_weights=self.weights is not None,
            had_checkpoints=self.checkpoints is not None and self.checkpoints.had_any,
        )  # fmt: skip


def own_backends(
    timeline: Timeline, blocks: Mapping[Block, ServerOptions], stagings: Mapping[torch.device, Staging],
    beside: Sequence[GraphBudget] = (),
) -> dict[Block, StageBackend]:  # fmt: skip
    """Make the models of the blocks, and their weights, at their initial values: those in the options, or those drawn
    from the run's seed. All of them follow this timeline. Blocks on one device share its memory for graphs; `beside`
    are the budgets of those that are there already, where there is one device. Raises Fatal if those of a device do not
    fit there."""
    backends: dict[Block, StageBackend] = {}
    for device, staging in stagings.items():
        there = {block: options for block, options in blocks.items() if options.device == device}
        backends |= _backends_on(timeline, device, staging, there, beside) if there else {}
    return backends


def _backends_on(
    timeline: Timeline, device: torch.device, staging: Staging, blocks: Mapping[Block, ServerOptions],
    beside: Sequence[GraphBudget],
) -> dict[Block, StageBackend]:  # fmt: skip
    config, given = timeline.config, next(iter(blocks.values())).given
    if given.anchors is not None and config.rounds.synchronous:
        raise Fatal("--anchors is for rounds.setting = 'diloco': a synchronous run has its anchors on the device")
    own = devices.computing_in(config, given.dtype, device)
    devices.warn_of_emulation(own.model, device)
    try:
        made = {block: _weights(own, block, each, timeline) for block, each in blocks.items()}
        # What the first step will allocate is allocated here and freed again. The server's threads need addresses too.
        first_step_bytes = sum(
            needs.first_step_bytes(own, {name: master.shape for name, master in weights.masters.items()})
            for _, weights in made.values()
        )
        if any(block.stage == own.stages.num_stages - 1 for block in blocks):
            first_step_bytes += loss_bytes(own.model, own.data.tokens_per_microbatch, fused=fuses(device))
        first_step = torch.empty(first_step_bytes, dtype=torch.uint8, device=device)
        process.require_addresses(process.THREAD_BYTES)
        del first_step
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise Fatal(_no_room(blocks, device, what_was_asked(error))) from None
    for block in blocks:
        logger.info("stage %s computes %s and sends %s", block, devices.in_words(own, device), own.wire.dtype)
    if given.graph_memory_mib is not None:
        graph_bytes = given.graph_memory_mib << 20
    else:
        # What the graphs of other blocks take is not free now, and is theirs of what may be taken.
        taken_bytes = beside[0].taken_bytes if beside else 0
        graph_bytes = devices.graph_bytes(
            devices.here(device, given.memory), needed_bytes=first_step_bytes - taken_bytes
        )
        logger.info("autograd graphs may take up to %s of %s", in_words(graph_bytes), device)
    budget = beside[0].beside() if beside else GraphBudget(limit_bytes=graph_bytes)
    budget.allow(graph_bytes)
    budgets = [budget, *(budget.beside() for _ in range(len(blocks) - 1))]
    return {
        block: StageBackend(
            config=own, stage=block.stage, module=module, staging=staging, weights=weights, budget=share,
            events=blocks[block].events, recorder=blocks[block].recorder,
        )
        for (block, (module, weights)), share in zip(made.items(), budgets, strict=True)
    }  # fmt: skip


def _weights(
    config: RunConfig, block: Block, options: ServerOptions, timeline: Timeline
) -> tuple[nn.Module, StageWeights]:
    """`timeline` has the configuration that the run's id and lineages follow from, whatever this device computes in."""
    given = options.weights
    tensors = None if given is None else given.load(parameter_shapes(config, block.stage))
    module = build_stage(config, block, device=options.device, weights=tensors)
    del tensors
    if options.compiles and isinstance(module, StageModule):
        module.compile_layers()
    lineage = genesis(timeline.config, block)
    try:
        return module, weights_of(
            config, module, lineage=lineage, events=options.events, anchors=options.given.anchors,
            share=config.share_of(block), timeline=timeline,
        )  # fmt: skip
    except OSError as error:
        raise Fatal(f"--anchors: {error}") from None


def _no_room(blocks: Collection[Block], device: torch.device, asked: str) -> str:
    do, advice = "does", "take more stages, or another --device"
    if len(blocks) > 1:
        do, advice = "do", "serve fewer of them (--stage), take more stages, or another --device, or more of them"
    return f"{named(sorted(blocks))} {do} not fit on {device} (no room for {asked}): {advice}"


async def warm_up(
    backend: StageBackend, runtime: Runtime, clock: Clock, *, device: torch.device, compiles: bool,
    texts: Callable[[], None],
) -> None:  # fmt: skip
    """Compile and record what is to be, and have a GPU choose its kernels, before others count on this peer.

    On a CPU without compiled layers there is nothing to do. Layers that cannot be compiled run uncompiled. `texts`
    compiles what texts need beside that.
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
    if compiles:
        await runtime.control(texts)
    verb, seconds = "compiled" if compiles else "warmed up", clock.monotonic() - began_at
    recorded_bytes = backend.budget.recorded_bytes
    graphs = f"; their CUDA graphs take {in_words(recorded_bytes)}" if recorded_bytes else ""
    logger.info("%s the layers of stage %d in %.0f s%s", verb, backend.stage, seconds, graphs)
