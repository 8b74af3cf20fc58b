"""Which blocks this peer may take: those that its user allows, and for which its devices have room."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence

import torch

from peers.shared import devices, needs
from peers.shared.network import Membership
from peers.shared.room import Room
from peers.shared.stage_choice import not_allowed
from peers.stage_peer.options import PeerOptions
from swarm.config import RunConfig
from swarm.types import Block


def require_blocks(options: PeerOptions, config: RunConfig, own: RunConfig | None) -> None:
    """Raise ValueError if the run has not all that the peer is to serve, or would have it run a custom class that our
    user has named neither in a configuration of their own nor in an option."""
    blocks = config.blocks if options.span == "auto" else options.span.of(config)
    # If the user has named a configuration, `agree_on_config` has made sure that the run's is the same.
    if own is None and (fault := not_allowed(config, blocks, options.allow_class)):
        raise ValueError(fault)


def room_on(device: torch.device, member: Membership, options: PeerOptions) -> Room:
    """The room for the blocks that the options name, or for all. Blocks and raises as Room.of does."""
    config = devices.computing_in(member.config, options.dtype, device)
    blocks = None if options.span == "auto" else options.span.of(member.config)
    has_anchors = options.anchors is not None
    return Room.of(devices.here(device, options.memory), member, config, blocks, anchors_on_disk=has_anchors)


def deal(sizes: Sequence[int], num_devices: int) -> list[int]:
    """The device of each block of a span, by its number: neighbours stay together, the largest share is as small as it
    can be, and no device is left out if there are enough blocks. `sizes` are the blocks' numbers of parameters."""
    shares = min(num_devices, len(sizes))
    limits = range(sum(sizes))
    least = bisect_left(limits, True, max(sizes), key=lambda limit: max(_dealt(sizes, shares, limit)) < shares)
    return _dealt(sizes, shares, least)


def _dealt(sizes: Sequence[int], num_devices: int, limit: int) -> list[int]:
    """Deal so that no device but the last gets more than `limit`."""
    dealt, device, taken = [], 0, 0
    for number, size in enumerate(sizes):
        must_move = len(sizes) - number <= num_devices - 1 - device
        if taken and (taken + size > limit or must_move):
            device, taken = device + 1, 0
        dealt.append(device)
        taken += size
    return dealt


def dealt(config: RunConfig, blocks: Sequence[Block], num_devices: int) -> list[int]:
    if num_devices == 1:
        return [0] * len(blocks)
    sizes = [max(1, needs.num_own_parameters(needs.of_class(config, block), block.stage)) for block in blocks]
    return deal(sizes, num_devices)


async def require_room(options: PeerOptions, member: Membership, on: Sequence[torch.device]) -> Room:
    """The room on the first device. Raises ValueError if a device has no room for the stages that it gets."""
    rooms = [await asyncio.to_thread(room_on, device, member, options) for device in on]
    blocks = () if options.span == "auto" else options.span.of(member.config)
    numbers = dealt(member.config, blocks, len(rooms)) if blocks else []
    for number, room in enumerate(rooms[: max(numbers, default=0) + 1]):
        own = [block for block, where in zip(blocks, numbers, strict=True) if where == number]
        if fault := room.fault(own or None):
            raise ValueError(fault)
    return rooms[0]
