"""Which member drops a microbatch that several members count."""

import asyncio

import numpy as np

from swarm.averaging.agreement import messages
from swarm.averaging.beginning import duplicates
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId
from tests.averaging.doubles import make_config, network_of, peer_id, stages, until
from tests.averaging.outcomes import expected_mean, result_vector
from tests.support.virtual_time import in_virtual_time


def _drops(**committed: set[int]) -> dict[str, set[int]]:
    begun = {PeerId(peer): pb.BeginReply(committed_gaps=messages.pack_indices(ids)) for peer, ids in committed.items()}
    return {str(peer): drops for peer, drops in duplicates(begun).items()}


def test_who_has_nothing_alone_drops_it_all_and_others_nothing() -> None:
    """The member was away, for example, and all of its microbatches were replayed. Dropping them costs nothing."""
    assert _drops(returned={1, 3}, one={0, 1, 2}, other={3, 4}) == {"returned": {1, 3}}


def test_of_two_that_have_the_same_one_keeps_it() -> None:
    assert _drops(one={1, 3}, other={1, 3}) == {"one": {1, 3}}


def test_who_has_little_alone_drops_the_rest_rather_than_others_a_part_each() -> None:
    """The member recomputes its sum from the few microbatches that only it has."""
    held = {"returned": {0, 1, 2, 3, 4, 5}, "one": {6, 7, 0, 1, 2}, "other": {8, 9, 3, 4}}
    assert _drops(**held) == {"returned": {0, 1, 2, 3, 4}}


def test_what_is_shared_is_shared_equally() -> None:
    held = {"returned": {0, 1, 2, 3, 4, 5}, "one": {6, 7, 0, 1}, "other": {8, 9, 2}}
    drops = _drops(**held)
    assert {peer: len(indices) for peer, indices in drops.items()} == {"returned": 1, "one": 1, "other": 1}


def test_who_has_no_doubles_drops_nothing() -> None:
    assert _drops(one={0, 1}, other={2}, third=set()) == {}


def test_of_what_a_returned_member_had_nobody_computes_more_than_a_third_again() -> None:
    """This holds for any share of its microbatches that was replayed before the member came back."""
    for num_replayed in range(33):
        half = num_replayed // 2
        held = {
            "returned": set(range(32)),
            "one": {*range(32, 64), *range(half)},
            "other": {*range(64, 96), *range(half, num_replayed)},
        }
        again = {peer: min(len(drops), len(held[peer]) - len(drops)) for peer, drops in _drops(**held).items()}
        assert max(again.values(), default=0) <= 32 / 3


@in_virtual_time
async def test_duplicates_count_once() -> None:
    async with network_of(make_config(microbatches=8), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        members[0].learn(0, 1, 2)
        members[1].learn(2, 3, 6)
        members[2].learn(0, 4, 7)
        await asyncio.sleep(0.15)
        members[0].learn(5)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert members[0].results[0].num_samples == 16
        np.testing.assert_allclose(result_vector(members[2]), expected_mean(*range(8)), rtol=1e-5, atol=1e-6)


@in_virtual_time
async def test_who_has_nothing_alone_gives_it_all_up_and_others_nothing() -> None:
    """The member was away, for example, and its microbatches were replayed."""
    async with network_of(make_config(), 1, 2, 3) as network:
        returned, *others = stages(network, 1, 2, 3)
        returned.learn(1, 3)
        others[0].learn(0, 1, 2)
        others[1].learn(3, 4)
        await asyncio.sleep(0.15)
        others[0].learn(5)
        await until(lambda: all(stage.round == 1 for stage in (returned, *others)))
        assert [stage.dropped for stage in (returned, *others)] == [{1, 3}, set(), set()]


@in_virtual_time
async def test_who_comes_back_before_all_of_it_was_replayed_gives_up_no_more_than_that() -> None:
    async with network_of(make_config(), 1, 2, 3) as network:
        leader, returned, other = stages(network, 1, 2, 3)
        leader.learn(0, 1)
        other.learn(2)
        view = network.peers[peer_id(1)].averager.view
        await until(lambda: view().committed == {0, 1, 2})
        returned.learn(1, 2, 3)
        await until(lambda: view().committed == {0, 1, 2, 3})
        other.learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in (leader, returned, other)))
        assert leader.dropped | returned.dropped | other.dropped == {1, 2}
        np.testing.assert_allclose(result_vector(other), expected_mean(*range(6)), rtol=1e-5, atol=1e-6)


@in_virtual_time
async def test_doubles_are_shared_by_those_that_have_them() -> None:
    """Taking a microbatch out costs a forward and a backward."""
    async with network_of(make_config(microbatches=14), 1, 2, 3) as network:
        returned, *others = stages(network, 1, 2, 3)
        returned.learn(*range(9))
        others[0].learn(0, 1, 9, 10)
        others[1].learn(2, 3, 11, 12)
        await asyncio.sleep(0.15)
        others[0].learn(13)
        await until(lambda: all(stage.round == 1 for stage in (returned, *others)))
        assert sorted(len(stage.dropped) for stage in (returned, *others)) == [1, 1, 2]
        assert {0, 1, 2, 3} == returned.dropped | others[0].dropped | others[1].dropped
