"""Says before a peer serves what may keep it from that, and once it serves, how others join.

The commands for people are printed once; the file for a launcher is written again after every move.
"""

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from peers.doctor.examination import in_passing
from peers.doctor.options import DoctorOptions
from peers.reach.listen import Announced, private_advice
from peers.shared.devices import here
from peers.shared.lan import Announcer
from peers.shared.network import Membership, say_who_may_join
from peers.stage_peer.options import PeerOptions
from peers.status.joining import Joining
from swarm.rpc.entry import Entry, direct, points_of
from swarm.rpc.invite import Invite
from swarm.types import PeerId

logger = logging.getLogger(__name__)


async def say_what_is_wrong(options: PeerOptions, member: Membership, device: torch.device) -> None:
    """Log a line for each thing that is wrong. This takes a few seconds at most, if other peers are silent."""
    plan = DoctorOptions(
        stage=options.first_stage,
        device=str(device),
        checkpoint=options.checkpoint,
        keep_checkpoints=options.keep_checkpoints or 3,
    )
    for finding in await in_passing(plan, member, here(device)):
        logger.warning("%s: %s", finding.what, finding.text)


class Arrival:
    """Tells people, the launcher and the local network that one peer serves."""

    def __init__(
        self, options: PeerOptions, membership: Membership, device: str, *, is_new: bool, announcer: Announcer | None
    ) -> None:
        """
        Args:
            is_new: whether this peer begins the run. All runs of the same configuration and text have the same id, so
                nothing but the words "new run" tells a user who forgot the INVITE.
            announcer: announces the invite in the local network; None if that is not wanted.
        """
        self._options = options
        self._membership = membership
        self._device = device
        self._is_new = is_new
        self._announcer = announcer
        self._has_said = False

    def serves(self, stage: int, announced: Announced) -> None:
        """Tell that the peer now serves a stage, and at which addresses.

        Raises:
            OSError: the ready file cannot be written the first time; later on that is a warning.
        """
        is_first, self._has_said = not self._has_said, True
        if is_first:
            say_who_may_join(self._membership.identity.authority)
            self._say_how_to_join(stage, announced)
            if self._announcer is not None:
                self._announcer.tell(self._invite(self._entries(announced)))
        if self._options.ready_file is None:
            return
        try:
            self._write(self._options.ready_file, stage, announced)
        except OSError as error:
            if is_first:
                raise
            logger.warning("%s still names the former stage: %s", self._options.ready_file, error.strerror)

    def _entries(self, announced: Announced) -> list[Entry]:
        """The peers that an invite names: this one, up to four others, and the meeting points of this one."""
        own_id = PeerId(self._membership.peer_id)
        own = [Entry(own_id, endpoint) for endpoint in direct(announced.endpoints)[:2]]
        points = [*map(Entry.parse, self._options.meet), *points_of(announced.endpoints)]
        return list(dict.fromkeys([*own, *self._membership.known.entries(4), *points]))

    def _invite(self, entries: Sequence[Entry]) -> Invite:
        return Invite.fitting(self._membership.config.run_id, entries, is_locked=bool(self._membership.config.owner))

    def _say_how_to_join(self, stage: int, announced: Announced) -> None:
        """Print the command lines with which others join."""
        config, known, entries = self._membership.config, self._membership.known, self._entries(announced)
        joining = Joining.at(config, entries, insecure=self._options.insecure)
        last = config.stages.num_stages - 1
        kind = "new run" if self._is_new else "run"
        print(f"Serving stage {stage} (of 0 to {last}) of {kind} {config.run_id} on {self._device}")
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

    def _write(self, path: Path, stage: int, announced: Announced) -> None:
        identity = self._membership.identity
        ready = {
            "peer_id": identity.peer_id,
            "stage": stage,
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
    """Make the folder of --ready-file, and raise ValueError if the file cannot be written.

    Otherwise that would show only once the peer serves.
    """
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
