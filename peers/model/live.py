"""Downloads the model of a running swarm: the weights with which one round begins, from peers of every stage.

The weights are downloaded as newcomers do it, in segments, each of which is checked, and written as checkpoints, so
that an export works on files. More than half of the peers asked at a stage have to offer the same bits. Peers keep one
snapshot for this, as they do for a newcomer, and training goes on.
"""

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

from peers.model.options import PROG, ExportModelOptions
from peers.shared.entrance import find_entrance, reading
from peers.shared.lan import with_invite
from peers.shared.named_model import kept_weights
from peers.shared.network import Membership
from peers.shared.process import cache_folder
from peers.shared.tokenizer import have_tokenizer
from swarm.averaging.agreement.timing import Timing
from swarm.averaging.state_transfer import StateTransfer, Wanted
from swarm.averaging.vectors.snapshots import PartialSnapshot
from swarm.averaging.wire.transport import Transport
from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.content.service import Kind
from swarm.content.weights import WeightsCache
from swarm.errors import Fatal, IntegrityError, PeerUnavailable, SwarmError
from swarm.interchange.families.known import family_of
from swarm.interchange.origin import require_path
from swarm.interchange.weights import Weights
from swarm.machine.clock import SystemClock, run_loop
from swarm.machine.waits import patiently
from swarm.machine.words import counted
from swarm.model.stages import parameter_shapes, trained_shapes
from swarm.rpc.ask import address_of
from swarm.rpc.transfers import MAX_SOURCES
from swarm.training.round_member import Snapshot
from swarm.training.run_rounds import RunRounds
from swarm.types import Block

logger = logging.getLogger(__name__)

ANCHOR = "anchor/"
SIZE_FACTOR = 4
"""A stage's snapshot may be this many times as large as its parameters, because it has optimizer state as well."""
MOST_MISSES = 6
"""How many rounds may be missed, because the stages went on before all of them kept the round, until this gives up."""
QUIET_SECONDS = 600.0
"""How long to wait for a stage that is behind the others, while no stage ends a round."""
NEXT_SECONDS = 10.0
"""The same wait after a round was missed and the next one is tried: rounds are then short."""
SAY_SECONDS = 10.0


class Quiet(PeerUnavailable):
    """No stage ends a round any more, because nobody trains, so the wanted round does not come."""


class StageReader:
    def __init__(self, member: Membership, block: Block, transport: Transport) -> None:
        self._member = member
        self.block = block
        config = member.config
        shapes = trained_shapes(config, block.stage)
        self._shapes = shapes
        self._max_bytes = SIZE_FACTOR * sum(4 * shape.numel() for shape in shapes.values())
        address, seconds = address_of(config.run_id, block), Timing().silence_seconds
        self._transfer = StateTransfer(
            transport, address, member.peer_id, member.waits, SystemClock(), silence_seconds=seconds
        )
        self._pinned: PartialSnapshot | None = None

    async def rounds(self) -> list[int]:
        """The rounds of the stage's peers that answer. Raises PeerUnavailable if none does."""
        replies = await self._member.poll().replies(self._member.known.others(self.block))
        if not replies:
            raise PeerUnavailable(f"no peer of stage {self.block} answers")
        return [reply.round for reply in replies]

    async def pin(self, round_number: int) -> None:
        """Have the stage's peers keep the state with which a round begins, or keep it for longer. Raises
        PeerUnavailable if they are not at this round, or no longer, and IntegrityError if no state is offered by more
        than half of the peers that were asked."""
        num_asked = min(MAX_SOURCES, len(await self.rounds()))
        wanted = Wanted(
            max_bytes=self._max_bytes, is_useful=lambda standing: standing.round == round_number,
            round_number=round_number, only=ANCHOR,
        )  # fmt: skip
        pinned = await self._transfer.begin(self._member.known.others(self.block), wanted)
        if 2 * len(pinned.sources) <= num_asked:
            self._transfer.forget()
            raise IntegrityError(
                f"of {counted(num_asked, 'peer')} of stage {self.block} only {len(pinned.sources)} have the same "
                f"weights at round {round_number}: they do not agree, or do not answer"
            )
        if len(pinned.sources) == 1 and self._pinned is None:
            logger.warning("stage %s has a single peer: there is no other to compare its weights with", self.block)
        self._pinned = pinned

    async def fetch(self) -> Snapshot:
        """Download the pinned weights: `anchor/NAME` for each parameter. Raises PeerUnavailable if no peer has them any
        more, and IntegrityError if they are not the parameters of this stage."""
        assert self._pinned is not None
        snapshot = (await self._transfer.fetch(self._pinned)).snapshot
        shapes = {name.removeprefix(ANCHOR): tensor.shape for name, tensor in snapshot.tensors.items()}
        if shapes != self._shapes:
            raise IntegrityError(f"what the peers of stage {self.block} hold is another model")
        return snapshot


class LiveModel:
    def __init__(
        self, member: Membership, *, transport: Transport | None = None, path: int | None = None
    ) -> None:  # fmt: skip
        """Raises ValueError if no architecture of transformers computes this model, or the run has no such path, before
        anything is downloaded. Without a path it is all blocks of the run."""
        family_of(member.config.model)
        if path is not None:
            require_path(member.config, path)
        blocks = member.blocks if path is None else member.config.blocks_of(path)
        self._member = member
        self._clock = member.clock
        transport = transport or Transport(member.channels)
        self._readers = [StageReader(member, block, transport) for block in blocks]

    async def write_checkpoints(self, folder: Path, round_number: int | None = None) -> int:
        """Write the weights of one round, a file for each stage, and return the round. One stage is in memory at a
        time.

        Args:
            round_number: wait for this round; None for the present one.

        Raises:
            Fatal: the swarm is past this round.
            PeerUnavailable: no peer of a stage answers, or stages get past every round before all could keep it.
            IntegrityError: a stage's peers do not agree.
            OSError: the files cannot be written.
        """
        chosen = await self._pin_all(round_number)
        async with asyncio.TaskGroup() as tasks:
            for number, reader in enumerate(self._readers):
                keeping = [tasks.create_task(self._keep(later, chosen)) for later in self._readers[number + 1 :]]
                snapshot = await reader.fetch()
                for task in keeping:
                    task.cancel()
                await asyncio.to_thread(self._write, folder, reader.block, snapshot)
                logger.info("stage %s of 0 to %s is here", reader.block, self._readers[-1].block)
        return chosen

    async def _pin_all(self, round_number: int | None) -> int:
        """Make all stages keep the state of one round, and return the round's number."""
        lead, faults = 0, list[SwarmError]()
        for _ in range(MOST_MISSES):
            rounds = await self._present()
            chosen = max(rounds) + lead if round_number is None else round_number
            if round_number is not None and max(rounds) > chosen:
                raise Fatal(
                    f"the swarm is at round {max(rounds)} and keeps no earlier one: export round {chosen} from "
                    "checkpoints, or a later one from here"
                )
            if round_number is not None and min(rounds) < chosen:
                logger.info("the swarm is at round %d: waiting until it is at %d", min(rounds), chosen)
            try:
                await self._pin(chosen, quiet_seconds=NEXT_SECONDS if lead else QUIET_SECONDS)
                return chosen
            except (PeerUnavailable, IntegrityError) as error:
                if round_number is not None and isinstance(error, Quiet):
                    raise
                faults.append(error)
                logger.info("round %d was missed: %s", chosen, error)
                # Every second attempt asks for the next round: where rounds are short, the present one ends too soon.
                lead = 0 if lead else 1
        # If any attempt failed because peers do not agree, report that: it is a worse fault than a missed round.
        raise next((fault for fault in faults if isinstance(fault, IntegrityError)), faults[-1])

    async def _pin(self, chosen: int, *, quiet_seconds: float) -> None:
        """Pin every stage at a round. Wait for stages that have not reached it, while the others keep their state.
        Raises PeerUnavailable if a stage is past the round, and Quiet if a stage does not reach it."""
        pinned = set[Block]()
        quiet_since, said_at, before = self._clock.monotonic(), self._clock.monotonic(), list[int]()
        while True:
            outcomes = await asyncio.gather(*(r.pin(chosen) for r in self._readers), return_exceptions=True)
            for reader, outcome in zip(self._readers, outcomes, strict=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, PeerUnavailable):
                    raise outcome
                if outcome is None:
                    pinned.add(reader.block)
                elif reader.block in pinned:
                    raise outcome
            if len(pinned) == len(self._readers):
                return
            rounds, now = await self._present(), self._clock.monotonic()
            behind = [f"stage {r.block}" for r, number in zip(self._readers, rounds, strict=True) if number < chosen]
            if len(behind) + len(pinned) < len(rounds):
                raise PeerUnavailable("a stage is past it")
            if rounds != before:
                quiet_since, before = now, rounds
            if now - quiet_since > quiet_seconds:
                raise Quiet(f"{behind[0]} stays at round {min(rounds)}: nobody trains")
            if now - said_at >= SAY_SECONDS:
                said_at = now
                logger.info("waiting until %s is at round %d", ", ".join(behind), chosen)

    async def _keep(self, reader: StageReader, chosen: int) -> None:
        """Until cancelled, ask a stage again and again to keep its state, which is fetched later."""
        while True:
            await self._clock.sleep(SAY_SECONDS)
            with suppress(PeerUnavailable):
                await reader.pin(chosen)

    async def _present(self) -> list[int]:
        """The round of each stage. If no peer of a stage answers, look for others for a while."""

        async def ask() -> list[int]:
            await self._member.known.look(self._member.directory, [reader.block for reader in self._readers])
            rows = await asyncio.gather(*(reader.rounds() for reader in self._readers))
            said = {reader.block: row for reader, row in zip(self._readers, rows, strict=True)}
            return list(RunRounds.of(said).blocks.values())

        return await patiently(ask, self._clock, "an answer from a peer of every stage")

    def _write(self, folder: Path, block: Block, snapshot: Snapshot) -> None:
        header = Header(
            config=self._member.config, stage=block.stage, variant=block.variant, round=snapshot.round,
            run_samples=snapshot.run_samples, lineage=snapshot.lineage, highest_microbatch=-1,
            state_digest=snapshot.digest,
        )  # fmt: skip
        file.write(folder, header, snapshot.tensors, owner="export")


def fetch_model(options: ExportModelOptions, folder: Path) -> tuple[str, Weights | None]:
    """Write what a running swarm has learnt into a folder, as checkpoints. Blocks.

    Returns:
        The run's tokenizer on this machine (`bytes`, a folder or a name), and the frozen weights to which the adapters
        belong (None if the export does not need them from the swarm).

    Raises:
        ValueError, SwarmError: as joining a run does.
        SwarmError, OSError: as LiveModel.write_checkpoints and have_tokenizer do.
    """
    clock = SystemClock()
    entrance = find_entrance(with_invite(options), os.environ, prog=PROG, clock=clock)

    async def fetch() -> tuple[str, Weights | None]:
        async with reading(entrance, clock) as member:
            config = member.config
            await LiveModel(member, path=options.path).write_checkpoints(folder, options.round)
            has_base = config.lora.is_on and config.model.weights and not (options.adapter or options.base)
            base = await _base(member) if has_base else None
            tokenizer = options.tokenizer or await have_tokenizer(member, cache_folder())
            return tokenizer, base

    return run_loop(fetch())


async def _base(member: Membership) -> Weights:
    """All weights that the run begins with, from its peers. Raises what WeightsCache.of raises."""
    digest = member.config.model.weights
    cache = WeightsCache(kept_weights(cache_folder(), digest), digest, member.fetcher(Kind.WEIGHTS), member.waits)
    return await cache.of(parameter_shapes(member.config.uncut, 0))
