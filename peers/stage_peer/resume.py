"""The state with which a stage peer begins: a checkpoint's, the initial one, or that of the peers that hold the stage.

The state that living peers hold is downloaded afterwards, by the averager.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.stage_peer.others import Others, partners
from swarm import config as configs
from swarm.checkpoint import file
from swarm.checkpoint.folder import CheckpointFolder, Restored
from swarm.checkpoint.writer import CheckpointWriter
from swarm.config import RunConfig, allowed_changes
from swarm.config.schedule import learning_rate
from swarm.config.sizes import sizes_of
from swarm.errors import Fatal, IntegrityError, PeerUnavailable
from swarm.stage.member import StageMember
from swarm.stage.state import digest_of, named, parts
from swarm.training.optim import Optimizer
from swarm.training.optimizers import gradient_optimizer, round_optimizer
from swarm.training.round_member import Snapshot
from swarm.training.tally import EMPTY
from swarm.types import Block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """How a peer may begin, as the command line says.

    Attributes:
        round_number: the only round at which to resume; None for any.
        had_checkpoints: whether the folder to which this peer writes checkpoints already had some at the start.
        joins: whether the command line says that the run exists.
        moves: whether the peer comes from another stage. Such a peer does not bring initial weights to a run that has
            gone on.
        has_weights: whether this machine has the weights with which the run begins, if they are not drawn from the
            seed.
        starts_over: whether the user wants initial weights if the run has gone on, no peer holds the stage, and there
            is no checkpoint.
    """

    folder: Path | None = None
    round_number: int | None = None
    had_checkpoints: bool = False
    joins: bool = False
    moves: bool = False
    has_weights: bool = False
    starts_over: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Beginning:
    """A state that no other peer holds, and the round at which it enters the run. If `restored` is None, it is the
    initial state."""

    restored: Restored | None
    round: int
    run_samples: int
    lineage: str
    highest_microbatch: int
    parent: str | None = None
    """The lineage that the state had before it got a new one; None if it keeps its own."""


def with_sizes_of(folder: Path, config: RunConfig) -> RunConfig:
    """The configuration of a run that goes on from checkpoints: sizes that it leaves out are as they were. Blocks."""
    for name in reversed(file.names(folder)) if config.lacks_sizes else ():
        with suppress(IntegrityError):
            before = file.config_of(folder / str(name))
            settings = [
                f"{section}.{field}={json.dumps(getattr(getattr(before, section), field))}"
                for section, field in sizes_of(config)
                if not getattr(getattr(config, section), field)
            ]
            return configs.with_settings(config, settings)
    return config


def genesis(config: RunConfig, block: Block) -> str:
    return hashlib.sha256(f"{config.run_id} stage {block}".encode()).hexdigest()


async def begin(
    config: RunConfig, block: Block, member: StageMember, shapes: Mapping[str, torch.Size], others: Others,
    options: ResumeOptions, *, checkpoints: CheckpointWriter | None,
) -> None:  # fmt: skip
    """Begin a stage with a checkpoint's state, if there is one and no peer holds the stage, or with its initial state.
    Raises what `choose` does.

    `shapes` are those of the stage's parameters. `checkpoints` writes the stage's from now on, and is told if the run
    goes back to an earlier round.
    """
    # The folder is read only now: a leaving peer may have written its last checkpoint here while `find_others` waited.
    folder = CheckpointFolder(options.folder, config) if options.folder is not None else None
    beginning = await asyncio.to_thread(choose, config, block, shapes, others, folder, options)
    if beginning is None:
        # Peers of this stage that are gone may have granted microbatch ids in this very round. No peer that is alive
        # knows which.
        await member.begin(highest_microbatch=0 if others.has_begun else -1)
        return
    restored = beginning.restored
    tensors = (await member.snapshot()).tensors if restored is None else known(config, shapes, restored)
    snapshot = Snapshot(
        round=beginning.round,
        run_samples=beginning.run_samples,
        lineage=beginning.lineage,
        tensors=tensors,
        digest=await asyncio.to_thread(digest_of, tensors),
        tally=EMPTY if restored is None else restored.tally,
    )
    source = "initial" if restored is None else "checkpoint"
    moments = {} if restored is None else _moments(config, shapes, restored)
    # Those of another run, from whose checkpoints this one goes on, do not count here.
    with suppress(IntegrityError):
        member.timeline.add(restored.amendments if restored is not None else ())
    await member.install(
        snapshot, source=source, parent=beginning.parent, highest_microbatch=beginning.highest_microbatch,
        moments=moments,
    )  # fmt: skip
    if restored is None:
        return
    logger.info("resumes at round %d, from %s", beginning.round, ", ".join(map(str, restored.files)))
    now = member.timeline.at(beginning.round)
    say_changes(restored.config, now, round_number=beginning.round, run_samples=beginning.run_samples)
    if checkpoints is not None:
        checkpoints.went_back(config, beginning.round, block=block if others.rounds else None)


def choose(
    config: RunConfig, block: Block, shapes: Mapping[str, torch.Size], others: Others, folder: CheckpointFolder | None,
    options: ResumeOptions,
) -> Beginning | None:  # fmt: skip
    """Choose the state that a peer brings into the run. Blocks while it reads checkpoints from `folder`. None if it
    brings none: it downloads what others hold, or has the initial state of a run at round 0.

    Raises Fatal, which says what to do, if there is no checkpoint, or none fits the run's round, and the user has not
    given --start-over; PeerUnavailable if a moving peer would bring initial weights; ValueError if the run would begin
    anew beside its own checkpoints.
    """
    if others.held_at is not None:
        if others.held_at == 0:
            require_weights(config, block, options)
        if folder is not None:
            logger.info("peers hold stage %s at round %d: theirs is taken, no checkpoint", block, others.held_at)
        return None
    if folder is None or folder.is_empty:
        if folder is not None and options.round_number is not None:
            raise Fatal(f"{folder.path} has no checkpoint of round {options.round_number}")
        if options.moves and others.latest > 0:
            raise PeerUnavailable(f"nobody holds stage {block} any more, and there is no checkpoint")
        if options.had_checkpoints:
            raise ValueError("--checkpoint names a folder with checkpoints: go on with --resume, or take another one")
        if folder is not None and others.latest == 0:
            logger.info("%s has no checkpoint: the run begins at round 0", folder.path)
        return _start_over(config, block, others, folder, options)
    bound = {other for other in partners(config, block) if other in others.rounds}
    if bound:
        rounds = {others.rounds[partner] for partner in bound}
        ahead = {partner for partner in bound if others.rounds[partner] == max(rounds)}
        can_repeat = config.rounds.synchronous and ahead <= others.repeating
        at_theirs = _at_their_round(block, shapes, rounds, folder, options, can_repeat=can_repeat)
        return _begin_with(at_theirs, block)
    if others.rounds and others.latest == 0:
        raise Fatal("the run begins anew at round 0: start its first peer with --resume as well, or leave --resume out")
    wanted = options.round_number
    restored = None
    if wanted is None and others.rounds:
        restored = folder.restore(block, shapes, round_number=others.latest)
    restored = restored or folder.restore(block, shapes, round_number=wanted)
    if restored is None:
        of_round = "" if wanted is None else f" of round {wanted}"
        why = f": {folder.foreign}" if folder.foreign else ""
        raise Fatal(f"{folder.path} has no sound checkpoint{of_round} with all of stage {block}{why}")
    if others.rounds and restored.round != others.latest:
        return _enter_late(config, block, restored, others)
    return _begin_with(restored, block)


def say_changes(checkpoint: RunConfig, run: RunConfig, *, round_number: int, run_samples: int) -> None:
    """Log every field in which the run differs from the checkpoint, with its old and new value, and the change of the
    learning rate at the round where the state goes on."""
    differing = allowed_changes(checkpoint, run)
    if not differing:
        return
    logger.warning("goes on at round %d with another configuration than the checkpoint's:", round_number)
    for name, (before, now) in differing.items():
        logger.warning("  %s: %r before, %r now", name, before, now)
    if any(name.startswith("optimizer.") for name in differing):
        rates = [learning_rate(config.gradient_step, run_samples) for config in (checkpoint, run)]
        logger.warning("  the learning rate at %d samples: %.4g before, %.4g now", run_samples, *rates)
    if "rounds.setting" in differing:
        logger.warning("  each peer takes inner steps from now on, and the outer step begins without momentum")
    if checkpoint.rounds.synchronous and "optimizer.name" in differing:
        logger.warning(
            "  %s begins with no memory of the parameters that it steps in another way", run.gradient_step.name
        )


def known(config: RunConfig, shapes: Mapping[str, torch.Size], restored: Restored) -> dict[str, torch.Tensor]:
    """A checkpoint's state, without the optimizer state that the run's optimizer does not use."""
    anchor, remembered = parts(restored.tensors)
    # What ended synchronous rounds stepped along gradients, and an outer step does not.
    is_same = restored.config.rounds.setting == config.rounds.setting
    return dict(named(anchor, _used(round_optimizer(config), shapes, remembered) if is_same else {}))


def _moments(config: RunConfig, shapes: Mapping[str, torch.Size], restored: Restored) -> dict[str, torch.Tensor]:
    """What the optimizer of inner steps remembers of a checkpoint's synchronous rounds, by `NAME/KEY`."""
    if config.rounds.synchronous or not restored.config.rounds.synchronous:
        return {}
    _, remembered = parts(restored.tensors)
    return _used(gradient_optimizer(config, same_bits=False), shapes, remembered)


def _used(
    optimizer: Optimizer, shapes: Mapping[str, torch.Size], remembered: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    used = {f"{name}/{key}" for name, shape in shapes.items() for key in optimizer.state_shapes(name, shape)}
    return {key: tensor for key, tensor in remembered.items() if key in used}


def _at_their_round(
    block: Block, shapes: Mapping[str, torch.Size], rounds: set[int], folder: CheckpointFolder, options: ResumeOptions,
    *, can_repeat: bool,
) -> Restored:  # fmt: skip
    """The checkpoint of this stage for the round at which the stages are that commit together with it.

    In the synchronous setting a checkpoint of the round before fits as well, if the other stages took part in
    committing that round: they still have its weights, and its microbatches are run again for this stage.
    """
    # If `rounds` has two numbers, some stages have committed a round that other stages, this one included, have not.
    wanted = [max(rounds)] if len(rounds) == 1 else []
    if can_repeat:
        wanted.append(max(rounds) - 1)
    for number in wanted:
        fits = min(rounds) >= number and options.round_number in (None, number)
        if fits and (restored := folder.restore(block, shapes, round_number=number)):
            if number < max(rounds):
                logger.info("the other stages repeat round %d for this one", number)
            return restored
    newest = folder.restore(block, shapes, round_number=options.round_number)
    stand = f"the other stages stand at round {' and '.join(map(str, sorted(rounds)))}"
    if newest is None:
        raise Fatal(f"{stand}, and {folder.path} has no sound checkpoint with all of stage {block}")
    raise Fatal(
        f"{stand}, and stage {block} in {folder.path} at round {newest.round}: to go on from one cut, stop every peer "
        f"and start all with --resume and --resume-round {newest.round}"
    )


def _begin_with(restored: Restored, block: Block) -> Beginning:
    # A synchronous round has microbatches of its own: of later ones some were seen, and none was learnt.
    is_exact = restored.config.rounds.synchronous
    present = restored.config.indices_after(restored.run_samples, block)
    highest = present.start - 1 if is_exact else restored.highest_microbatch
    return Beginning(
        restored=restored, round=restored.round, run_samples=restored.run_samples, lineage=restored.lineage,
        highest_microbatch=highest,
    )  # fmt: skip


def _start_over(
    config: RunConfig, block: Block, others: Others, folder: CheckpointFolder | None, options: ResumeOptions
) -> Beginning | None:
    if others.latest == 0 or options.starts_over:
        require_weights(config, block, options)
    if others.latest == 0:
        return None
    if not options.starts_over:
        if others.silent:
            raise Fatal(
                f"stage {block} was held by {others.silent}: what it has learnt is with them, so start this peer again "
                "when they are back"
            )
        # This raises an error, because another peer may be about to bring a checkpoint of the stage, and would find
        # these initial weights in its place.
        begins = "" if folder is None else f"--resume {folder.path} has no checkpoint, and "
        raise Fatal(
            f"{begins}nobody holds stage {block} any more: if its peers are only frozen or cut off, start this one "
            "again when they are back; if they are gone for good, begin with a checkpoint (--resume DIR). Without one, "
            "--start-over begins with initial weights, and what the stage had learnt is gone"
            + ("; so does a stage whose path has not begun yet" if len(config.paths) > 1 else "")
        )
    logger.warning(
        "nobody holds stage %s any more, and there is no checkpoint: it starts again from its initial weights at "
        "round %d", block, others.latest,
    )  # fmt: skip
    return _late(config, block, None, genesis(config, block), others)


def require_weights(config: RunConfig, block: Block, options: ResumeOptions) -> None:
    """Raise Fatal, or PeerUnavailable if the peer moves, if the weights with which the run begins are not here."""
    if config.model.weights and not options.has_weights:
        raise (PeerUnavailable if options.moves else Fatal)(
            f"no peer that answers has the weights with which stage {block} begins: start a peer where the run's model "
            "is, with --model DIR"
        )


def _enter_late(config: RunConfig, block: Block, restored: Restored, others: Others) -> Beginning:
    logger.warning(
        "nobody holds stage %s any more: it enters at round %d as it was at round %d; what it learnt since, if "
        "anything, is lost",
        block, others.latest, restored.round,
    )  # fmt: skip
    return _late(config, block, restored, restored.lineage, others)


def _late(config: RunConfig, block: Block, restored: Restored | None, lineage: str, others: Others) -> Beginning:
    """A beginning at the others' round with an older state. Peers that begin so with the same state get the same
    lineage."""
    # Rounds may have had another size when the checkpoint was written, and amendments may have changed it since.
    num_samples = others.samples - (restored.run_samples if restored else 0)
    num_rounds = max(
        others.latest - (restored.round if restored else 0), -(-num_samples // config.round_samples_of(block))
    )
    highest = restored.highest_microbatch if restored else -1
    longest = max(c.microbatches_per_round for c in (config, restored.config if restored else config))
    return Beginning(
        restored=restored, round=others.latest, run_samples=others.samples,
        lineage=hashlib.sha256(f"{lineage} again at {others.latest}".encode()).hexdigest(), parent=lineage,
        # It is not known how many microbatches were trained on since then. To leave some out is better than to repeat
        # one.
        highest_microbatch=highest + 2 * max(0, num_rounds) * longest,
    )  # fmt: skip
