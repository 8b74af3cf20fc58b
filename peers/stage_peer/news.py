"""What a stage peer tells its user and its launcher: before it serves what may keep it from that, then how others join,
and later that rounds are committed, or why it has nothing to do.

The commands for people are printed once; the file for a launcher is written again after every move.
"""

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.doctor.program import in_passing
from peers.reach.listen import Announced, private_advice
from peers.shared.lan import Announcer
from peers.shared.network import Membership, say_who_may_join
from peers.shared.room import Room, written
from peers.stage_peer.options import PeerOptions
from peers.status.answer import idle_because
from peers.status.view import Joining
from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.machine.words import Repeats, counted
from swarm.rpc.entry import Entry, direct, points_of, where
from swarm.rpc.invite import Invite
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.boundary import boundary_of
from swarm.training.inner_steps import InnerSteps
from swarm.types import Block, PeerId

logger = logging.getLogger(__name__)

EVERY_SECONDS = 10.0
ACCUSED_SECONDS = 60.0
"""The shortest time between two lines about senders that have banned this peer."""
IDLE_SECONDS = 600.0
"""The shortest time between two lines that say why this peer has little to do."""
IDLE_LOOKS = 12
"""After so many looks in a row that find little to do, which take a minute, the log says so: a beginning is slow."""
MOST_ACCUSERS = 3
QUIET_SECONDS = 30.0


async def say_what_is_wrong(options: PeerOptions, member: Membership, room: Room) -> None:
    """Log a line for each thing that is wrong. This takes a few seconds at most, if other peers are silent."""
    blocks = None if options.span == "auto" else options.span.of(member.config)
    for finding in await in_passing(options, room.each, blocks, member):
        logger.warning("%s: %s", finding.what, finding.text)


class Arrival:
    """Tells people, the launcher and the local network that one peer serves."""

    def __init__(
        self, options: PeerOptions, membership: Membership, device: str, *, is_new: bool, announcer: Announcer | None
    ) -> None:
        """Without an `announcer` the local network is told nothing. All runs of the same configuration and text have
        the same id, so nothing but the words "new run" tells a user who forgot the INVITE that this peer begins one."""
        self._options = options
        self._membership = membership
        self._device = device
        self._is_new = is_new
        self._announcer = announcer
        self._has_said = False

    def serves(self, blocks: Sequence[Block], announced: Announced) -> None:
        """Tell that the peer now serves these blocks, and at which addresses. Raises OSError if the ready file cannot
        be written the first time; later on that is a warning."""
        is_first, self._has_said = not self._has_said, True
        if is_first:
            say_who_may_join(self._membership.identity.authority)
            self._say_how_to_join(blocks, announced)
            if self._announcer is not None:
                self._announcer.tell(self._invite(self._entries(announced)))
        if self._options.ready_file is None:
            return
        try:
            self._write(self._options.ready_file, blocks, announced)
        except OSError as error:
            if is_first:
                raise
            logger.warning("%s still names the former stage: %s", self._options.ready_file, error.strerror)

    def _entries(self, announced: Announced) -> list[Entry]:
        """This peer, up to four others, and the meeting points of this one."""
        own_id = PeerId(self._membership.peer_id)
        own = [Entry(own_id, endpoint) for endpoint in direct(announced.endpoints)[:2]]
        points = [*map(Entry.parse, self._options.meet), *points_of(announced.endpoints)]
        return list(dict.fromkeys([*own, *self._membership.known.entries(4), *points]))

    def _invite(self, entries: Sequence[Entry]) -> Invite:
        return Invite.fitting(self._membership.config.run_id, entries, is_locked=bool(self._membership.config.owner))

    def _say_how_to_join(self, blocks: Sequence[Block], announced: Announced) -> None:
        config, known, entries = self._membership.config, self._membership.known, self._entries(announced)
        joining = Joining.at(config, entries, insecure=self._options.insecure)
        last = config.stages.num_stages - 1
        kind = "new run" if self._is_new else "run"
        print(f"Serving stage {written(blocks)} (of 0 to {last}) of {kind} {config.run_id} on {self._device}")
        print(f"  join:   {joining.peer}")
        print(f"  train:  {joining.trainer}")
        print(f"  watch:  {joining.status}", flush=True)
        if self._is_new and not self._options.lan and (advice := private_advice(entry.endpoint for entry in entries)):
            logger.warning(
                "this invite is for one network: %s; or begin the run with --meet, at a machine with one open port on "
                "which swarm-meet runs", advice,
            )  # fmt: skip
        if config.owner:
            print("  TOKEN comes from the run's owner: swarm-keys issue FILE --role peer, or trainer", flush=True)
        addresses = list(dict.fromkeys([*announced.dht_addresses[:2], *known.dht_addresses(4)]))[:5]
        dht = f"addresses for --initial-peers: {' '.join(addresses)}; " if addresses else ""
        logger.info("%sfor swarm-status --peer: %s", dht, entries[0])

    def _write(self, path: Path, blocks: Sequence[Block], announced: Announced) -> None:
        identity = self._membership.identity
        ready = {
            "peer_id": identity.peer_id,
            "stage": blocks[0].stage,
            "stages": [block.label for block in blocks],
            "endpoint": announced.endpoints[0],
            "invite": str(self._invite(self._entries(announced))),
            "other_endpoints": announced.endpoints[1:],
            "dht_addresses": announced.dht_addresses,
            "device": self._device,
            "certificate_pem": "" if self._options.insecure else identity.certificate_pem,
            "time": time.time(),
        }
        temporary = _temporary(path)
        temporary.write_text(json.dumps(ready))
        temporary.rename(path)


def require_ready_file(path: Path | None) -> None:
    """Make the folder of --ready-file, and raise ValueError if the file cannot be written, which otherwise would show
    only once the peer serves."""
    if path is None:
        return
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = _temporary(path)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise ValueError(f"--ready-file {path}: cannot be written: {error.strerror}") from None


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a stage peer sees of the others.

    Attributes:
        num_calls: how many calls, from any caller, have arrived since this peer began to serve.
        num_others: how many trainers and other peers of its stage there are. All of them would call this peer.
        empty_blocks: the other blocks that no peer serves.
        left_alone_by: the senders that say that they have banned this peer, each with its reason.
        fitting_bottleneck: as the function of this name says.
    """

    endpoint: str
    num_calls: int
    num_others: int
    has_trainer: bool
    empty_blocks: Sequence[Block]
    left_alone_by: Mapping[str, str]
    fitting_bottleneck: str = ""

    @property
    def why_quiet(self) -> str:
        if not self.num_calls and self.num_others:
            return (
                f"no connection has reached this peer yet, though {counted(self.num_others, 'other')} would use it: "
                f"see that they reach it {where(self.endpoint)} (firewall, router, VPN), and that --announce is right"
            )
        if self.empty_blocks:
            stages = ", ".join(map(str, self.empty_blocks))
            return f"stage{'' if len(self.empty_blocks) == 1 else 's'} {stages} without a peer"
        if not self.has_trainer:
            return "no trainer is in the run"
        return "the trainers send none to this peer"


def fitting_bottleneck(config: RunConfig, samples_per_second: float, line_samples_per_second: float) -> str:
    """With how many numbers a token the line to the next stage would be as fast as this peer computes, in words; empty
    if it is already, if its length or nothing is known to be the reason, or if the model can have no bottleneck."""
    model, boundary, data = config.model, boundary_of(config), config.data
    may_have_one = not (model.custom_class or model.weights or model.block_types or config.lora.is_on)
    if not may_have_one or line_samples_per_second >= samples_per_second:
        return ""
    megabytes = boundary.spec(1, data.sequence_length).num_bytes / 1e6
    num_fitting = max(1, int(boundary.width * line_samples_per_second / samples_per_second))
    return (
        f"; {line_samples_per_second * megabytes:.3g} MB/s arrive at the next stage, and this peer computes for "
        f"{samples_per_second * megabytes:.3g} MB/s: {num_fitting} of the {boundary.width} numbers a token would fit "
        "that line (model.bottleneck_dim of a new run)"
    )


class StageNews:
    """Chooses what is worth a line of the log, a few a minute whatever the length of rounds, and logs it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rounds = Repeats(clock, EVERY_SECONDS)
        self._num_tasks = 0
        self._busy_at = clock.monotonic()
        self._is_quiet = False
        self._has_warned = False
        self._told_of: set[str] = set()
        """The senders that have banned this peer and are already named in the log."""
        self._accused = Repeats(clock, ACCUSED_SECONDS)
        self._idle = Repeats(clock, IDLE_SECONDS)
        self._idle_looks = 0

    def committed(self, report: pb.RoundReport, *, samples_per_second: float, is_behind: bool) -> None:
        """Log that a round was committed here, unless this peer `is_behind` and only catches up with its group:
        averaging logs that."""
        fault = InnerSteps.read(report.inner_steps).fault
        if fault and not self._has_warned:
            self._has_warned = True
            logger.warning("%s", fault)
        if is_behind or not self._rounds.count(""):
            return
        logger.info(
            "round %d committed: %s, averaged by %d of %s in %.1f s; this one manages %.3g samples/s",
            report.round, counted(report.num_samples, "sample"), report.num_members,
            counted(report.num_alive, "peer"), report.aggregate_seconds,
            samples_per_second,
        )  # fmt: skip

    def look(self, num_tasks: int, around: Around) -> None:
        """Log once if nothing has come for a while, and once if senders have banned this peer."""
        self._look_for_accusers(around)
        now = self._clock.monotonic()
        if num_tasks != self._num_tasks:
            self._num_tasks, self._busy_at, self._is_quiet = num_tasks, now, False
        elif not self._is_quiet and now - self._busy_at >= QUIET_SECONDS:
            self._is_quiet = True
            logger.info("no microbatch for %d s: %s", QUIET_SECONDS, around.why_quiet)

    def look_at(self, shares: pb.TimeShares, around: Around) -> None:
        """Log why this peer has little to do, if it has, but not often, and what would fit a slow line. While a block
        has no peer, nothing else is the reason."""
        reason = "" if around.empty_blocks else idle_because(shares)
        self._idle_looks = self._idle_looks + 1 if reason else 0
        if self._idle_looks >= IDLE_LOOKS and self._idle.count(""):
            logger.info("this peer is %s%s", reason, around.fitting_bottleneck)

    def _look_for_accusers(self, around: Around) -> None:
        """Warn of senders that say that they have banned this peer. Their claims change nothing else."""
        accusers = around.left_alone_by
        self._told_of &= accusers.keys()
        if accusers.keys() - self._told_of and self._accused.count(""):
            told = ", ".join(f"{name} ({reason})" for name, reason in sorted(accusers.items())[:MOST_ACCUSERS])
            more = f" and {len(accusers) - MOST_ACCUSERS} more" if len(accusers) > MOST_ACCUSERS else ""
            logger.warning(
                "this peer is left alone for a while by %d of its callers, as they say: %s%s. If that goes on, see "
                "that others can reach it %s", len(accusers), told, more, where(around.endpoint),
            )  # fmt: skip
            self._told_of = set(accusers)
