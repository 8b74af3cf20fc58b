"""One stage of this peer as it begins: the options of its server, its model on this machine's device, and its state.

A stage that does not fit fails at the start, and not after an hour. The state comes from a checkpoint, or from the
peers that hold the stage.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from peers.shared import devices, process
from peers.shared.devices import Dtype
from peers.shared.network import Membership
from peers.stage_peer import resume
from peers.stage_peer.incarnation import Incarnation
from peers.stage_peer.others import RETURN_SECONDS, SILENT_SECONDS, find_others, named
from peers.stage_peer.resume import ResumeOptions, genesis
from peers.status.exporter import OwnFigures
from swarm.averaging.averager import Averager
from swarm.averaging.downloads import name_of
from swarm.checkpoint.folder import CheckpointFolder
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig
from swarm.content.servicer import Shelves
from swarm.errors import Fatal, NotReady
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
from swarm.rpc.meeting.carrying import MeetingLimits
from swarm.stage.backend import StageBackend
from swarm.stage.generation import SessionLimits
from swarm.stage.graphs import GraphBudget
from swarm.stage.member import StageMember
from swarm.stage.runtime import Runtime
from swarm.stage.settings import weights_of
from swarm.stage.stage import Stage
from swarm.stage.staging import Staging
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of one stage's server."""

    name: str
    device: torch.device
    insecure: bool
    max_in_flight: int
    graph_bytes: int | None
    """Bytes that autograd graphs may take; None for a share of what is free."""
    resume: ResumeOptions
    checkpoints: CheckpointWriter | None
    events: Events
    dtype: Dtype | None = None
    """The type of matrix products; None for that of the run."""
    peak_flops: float = 0.0
    """The floating-point operations in a second that the device manages at best; 0 where that is not known."""
    compiles: bool = False
    """Whether layers are compiled."""
    recorder: Recorder | None = None
    """Records what the peer computes again and again; None: nothing is recorded."""
    sessions: SessionLimits = field(default_factory=SessionLimits)
    """How many texts this peer helps to write at a time, and with how much memory."""
    weights: Weights | None = None
    """The weights with which the run begins, if they are on this machine."""
    shelves: Shelves = field(default_factory=Shelves)
    """The content that this peer gives to others."""
    meeting: MeetingLimits = field(default_factory=MeetingLimits)
    """How much this peer does as a meeting point."""
    movable: bool = False
    """Whether the peer moves to another stage that needs it more."""
    moves: int = 0
    """How often the peer has moved."""
    own_figures: OwnFigures = field(default_factory=OwnFigures)
    """Given the peer's figures, for --metrics-port."""
    incarnation: Incarnation = field(default_factory=Incarnation)
    """This start of the process."""


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


class OwnState:
    """Gets the state of one stage."""

    def __init__(self, membership: Membership, stage: Stage, member: StageMember, options: ServerOptions) -> None:
        self._membership = membership
        self._stage = stage
        self._member = member
        self._options = options
        self._held_at = 0
        """The round of the peers that held the stage when this peer began."""
        self._holders: Sequence[PeerRecord] = ()
        """The records of these peers, as last read from the DHT."""

    async def begin(self) -> None:
        """Take the state of a checkpoint, if there is one and no peer holds this stage; see resume.begin.

        Raises:
            ValueError, Fatal, PeerUnavailable: as of find_others and resume.choose.
        """
        options = self._options.resume
        folder = options.folder
        resumes = folder is not None and not CheckpointFolder(folder, self._membership.config).is_empty
        with self._membership.waits.on(f"word of the other peers, before stage {self._stage.number} begins"):
            others = await find_others(
                self._membership, self._stage.number, patient=options.joins and resumes, gives_up=options.moves,
                needs_holder=not (resumes or options.starts_over or options.moves),
            )  # fmt: skip
        self._held_at = others.held_at or 0
        self._holders = self._membership.known.others(self._stage.number)
        shapes = {name: master.shape for name, master in self._stage.context.backend.weights.masters.items()}
        await resume.begin(
            self._membership.config, self._stage.number, self._member, shapes, others, options,
            checkpoints=self._options.checkpoints,
        )  # fmt: skip

    async def arrive(self, averager: Averager) -> None:
        """Join the group, and wait for the state that others hold: the averager goes on asking them for it.

        If all holders fall silent, wait up to RETURN_SECONDS: they may be frozen, or cut off for a moment. If holders
        are announced and nothing of use comes from them for SILENT_SECONDS, wait no longer: those that have the state
        give it sooner. A peer that moves waits for nobody, because it can go back.

        Raises:
            NotReady: this peer has only initial weights, though the holders have gone on, or a wrong state.
        """

        def awaited(_: float) -> str:
            return f"the state of stage {self._stage.number}" + (f" ({averager.obstacle})" if averager.obstacle else "")

        with self._membership.waits.on(awaited), suppress(TimeoutError):
            async with asyncio.timeout(None) as waiting:
                watching = asyncio.create_task(self._end_in_vain(averager, waiting))
                try:
                    await averager.join()
                    if not self._options.resume.moves:
                        await self._until_here(averager)
                finally:
                    watching.cancel()
        if self._lacks_state(averager):
            raise NotReady(self._missing(averager))

    async def _until_here(self, averager: Averager) -> None:
        clock, silent_since = self._membership.clock, None
        while self._lacks_state(averager):
            if others := self._membership.known.others(self._stage.number):
                self._holders, silent_since = others, None
            elif not self._holders:
                return
            elif silent_since is None:
                silent_since = clock.monotonic()
                logger.warning(
                    "the state of stage %d is with %s: waiting for %.0f s in case they are back",
                    self._stage.number, named(self._holders), RETURN_SECONDS,
                )  # fmt: skip
            elif clock.monotonic() - silent_since >= RETURN_SECONDS:
                return
            await clock.sleep(LOOK_SECONDS)

    async def _end_in_vain(self, averager: Averager, waiting: asyncio.Timeout) -> None:
        while averager.vain_seconds < SILENT_SECONDS or not self._lacks_state(averager):
            await self._membership.clock.sleep(LOOK_SECONDS)
        waiting.reschedule(0.0)

    def _missing(self, averager: Averager) -> str:
        what = f"the state of stage {self._stage.number} could not be downloaded"
        if others := self._membership.known.others(self._stage.number):
            names = ", ".join(map(name_of, others[:3]))
            why = averager.obstacle or "announced, and silent when asked for it"
            return (
                f"{what} from {names}: {why}. Start this peer again when another peer holds the stage, or when {names} "
                "has been started again"
            )
        source = f" from {named(self._holders)}" if self._holders else ""
        return f"{what}{source}: start this peer again when it is back, or when another peer holds the stage"

    def _lacks_state(self, averager: Averager) -> bool:
        """Whether this peer has a wrong state, or only initial weights though the stage's holders have gone on."""
        return not averager.is_sound or self._stage.round == 0 < self._held_at
