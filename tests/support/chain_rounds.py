"""Rounds of a chain that pass without averaging."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from swarm.stage.buckets import GradientBucket
from swarm.stage.member import StageMember
from swarm.training.samples import Amount
from swarm.training.scaling import squared_norm_of
from tests.support.chain import Chain, Peer
from tests.support.commits import end_round


async def commit_round(chain: Chain) -> None:
    """Do by hand what averaging does at the end of a round."""
    averages = []
    for stage in range(3):
        bucket = GradientBucket(
            sums={name: torch.zeros_like(p) for name, p in chain.at(stage)[0].weights.masters.items()}
        )
        for peer in chain.at(stage):
            contribution = await peer.runtime.control(peer.weights.contribute)
            amount = Amount(contribution.num_samples, contribution.num_targets)
            bucket.add([mean * amount.targets for mean in contribution.tensors.values()], amount)
        averages.append(dict(bucket.means()))
    squared_norm = sum(squared_norm_of(average.values()) for average in averages)
    for peer in chain.peers:
        await peer.runtime.control(partial(apply_average, peer, averages[peer.backend.stage], squared_norm))
        member_of(peer).round_began()


def apply_average(peer: Peer, average: Mapping[str, torch.Tensor], squared_norm: float = 0.0) -> None:
    """Let a peer commit its round with this average, on its compute thread."""
    end_round(peer.weights, average, total_squared_norm=squared_norm)


def member_of(peer: Peer) -> StageMember:
    """A peer as the only member of its group."""
    return StageMember(peer.stage, num_alive=lambda: 1)


async def begin_next_round(peers: Sequence[Peer]) -> None:
    """Let every peer begin the next round, with other weights."""
    for peer in peers:
        average = {name: torch.full_like(master, 0.01) for name, master in peer.weights.masters.items()}

        def commit(peer: Peer = peer, average: dict[str, torch.Tensor] = average) -> None:
            peer.weights.contribute()
            end_round(peer.weights, average, total_squared_norm=1.0)

        await peer.runtime.control(commit)
        member_of(peer).round_began()
