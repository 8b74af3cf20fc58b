"""The state of one stage of this peer: where it comes from when the peer begins, and who writes its checkpoints."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from peers.shared import option_types
from peers.shared.network import Membership
from peers.stage_peer import resume
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.others import RETURN_SECONDS, SILENT_SECONDS, find_others, named
from peers.stage_peer.own_stage import ServerOptions
from swarm.averaging.averager import Averager
from swarm.checkpoint.folder import CheckpointFolder
from swarm.checkpoint.writer import CheckpointWriter
from swarm.errors import NotReady
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.member import StageMember
from swarm.stage.stage import Stage
from swarm.types import Block, PeerRecord

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class OwnState:
    def __init__(self, membership: Membership, stage: Stage, member: StageMember, options: ServerOptions) -> None:
        self._membership = membership
        self._stage = stage
        self._member = member
        self._options = options
        self._held_at = 0
        """The round of the peers that held the stage when this peer began."""
        self._holders: Sequence[PeerRecord] = ()
        """These peers, as last read from the DHT."""

    async def begin(self, own: Mapping[Block, pb.DescribeReply] | None = None) -> None:
        """Take the state of a checkpoint, if there is one and no peer holds this stage; see resume.begin. `own` is as
        for find_others. Raises what that and resume.choose do."""
        options = self._options.resume
        folder = options.folder
        resumes = folder is not None and not CheckpointFolder(folder, self._membership.config).is_empty
        with self._membership.waits.on(f"word of the other peers, before stage {self._stage.block} begins"):
            others = await find_others(
                self._membership, self._stage.block, patient=options.joins and resumes, gives_up=options.moves,
                needs_holder=not (resumes or options.starts_over or options.moves), own=own,
            )  # fmt: skip
        self._held_at = others.held_at or 0
        self._holders = self._membership.known.others(self._stage.block)
        shapes = {name: master.shape for name, master in self._stage.context.backend.weights.masters.items()}
        await resume.begin(
            self._membership.config, self._stage.block, self._member, shapes, others, options,
            checkpoints=self._options.checkpoints,
        )  # fmt: skip

    async def arrive(self, averager: Averager) -> None:
        """Join the group, and wait for the state that others hold: the averager goes on asking them for it.

        If all holders fall silent, wait up to RETURN_SECONDS: they may be frozen, or cut off for a moment. If holders
        are announced and nothing of use comes from them for SILENT_SECONDS, wait no longer: those that have the state
        give it sooner. A peer that moves waits for nobody, because it can go back. Raises NotReady if this peer has
        only initial weights, though the holders have gone on, or a wrong state.
        """

        def awaited(_: float) -> str:
            return f"the state of stage {self._stage.block}" + (f" ({averager.obstacle})" if averager.obstacle else "")

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
            if others := self._membership.known.others(self._stage.block):
                self._holders, silent_since = others, None
            elif not self._holders:
                return
            elif silent_since is None:
                silent_since = clock.monotonic()
                logger.warning(
                    "the state of stage %s is with %s: waiting for %.0f s in case they are back",
                    self._stage.block, named(self._holders), RETURN_SECONDS,
                )  # fmt: skip
            elif clock.monotonic() - silent_since >= RETURN_SECONDS:
                return
            await clock.sleep(LOOK_SECONDS)

    async def _end_in_vain(self, averager: Averager, waiting: asyncio.Timeout) -> None:
        while averager.vain_seconds < SILENT_SECONDS or not self._lacks_state(averager):
            await self._membership.clock.sleep(LOOK_SECONDS)
        waiting.reschedule(0.0)

    def _missing(self, averager: Averager) -> str:
        what = f"the state of stage {self._stage.block} could not be downloaded"
        if others := self._membership.known.others(self._stage.block):
            names = ", ".join(one.display_name for one in others[:3])
            why = averager.obstacle or "announced, and silent when asked for it"
            return (
                f"{what} from {names}: {why}. Start this peer again when another peer holds the stage, or when {names} "
                "has been started again"
            )
        source = f" from {named(self._holders)}" if self._holders else ""
        return f"{what}{source}: start this peer again when it is back, or when another peer holds the stage"

    def _lacks_state(self, averager: Averager) -> bool:
        return not averager.is_sound or self._stage.round == 0 < self._held_at


def open_checkpoints(options: PeerOptions, owner: str) -> CheckpointWriter | None:
    """Make the writer of checkpoints, if they are wanted. Raises ValueError if --resume names no folder."""
    writer = None
    if options.checkpoint is not None:
        writer = CheckpointWriter(options.checkpoint, options.keeping, owner=owner)
    if options.resume is not None:
        option_types.require_folder("--resume", options.resume)
    return writer
