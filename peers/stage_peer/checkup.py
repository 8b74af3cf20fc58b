"""Warns of what may keep a peer from serving, before it prepares or downloads anything: some of swarm-doctor's checks.

Used by program.py once the run and its peers are known. The peer goes on, whatever these find.
"""

import logging

import torch

from peers.doctor.examination import in_passing
from peers.doctor.options import DoctorOptions
from peers.shared.devices import here
from peers.shared.network import Membership
from peers.stage_peer.options import PeerOptions

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
