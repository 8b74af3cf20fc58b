"""Leaders die or freeze, or their messages are lost or late, or two members count a microbatch. All end with the same
round."""

import asyncio
from functools import partial

import numpy as np
import pytest

from tests.averaging.doubles import all_past, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.averaging.outcomes import assert_equal_and_once, expected_mean, result_vector
from tests.support.virtual_time import in_virtual_time


@pytest.mark.parametrize(
    ("moment", "survives"),
    [
        ("before begin", "nothing"), ("after begin", "nothing"), ("in exchange", "nothing"),
        ("after all prepared", "result"), ("in the middle of commit", "result"),
    ],
)  # fmt: skip
@in_virtual_time
async def test_leader_killed(moment: str, survives: str) -> None:
    """The survivors end equal. If all had prepared a result, they commit it."""
    async with network_of(make_config(), 1, 2, 3) as network:
        leader, *others = stages(network, 1, 2, 3)
        committed = 0

        async def before(name: str, source: int, target: int) -> None:
            nonlocal committed
            fatal = {
                "before begin": "Begin",
                "after begin": "Average",
                "in exchange": "Exchange",
                "after all prepared": "Commit",
            }
            if fatal.get(moment) == name and 1 in (source, target) and not network.peers[peer_id(1)].dead.is_set():
                network.kill(1)
            if name == "Commit" and moment == "in the middle of commit" and source == 1:
                committed += 1
                if committed == 2:
                    network.kill(1)

        network.before = before
        leader.learn(0, 1)
        others[0].learn(2, 3, 4)
        others[1].learn(5)
        await until(lambda: network.peers[peer_id(1)].dead.is_set())
        if survives == "nothing":
            await asyncio.sleep(0.5)
            assert all(stage.round == 0 and not stage.closed for stage in others)
            others[0].learn(0, 1)
        await until(lambda: all(stage.round == 1 for stage in others))
        await asyncio.sleep(0.3)
        assert_equal_and_once(others)
        for stage in others:
            np.testing.assert_allclose(result_vector(stage), expected_mean(*range(6)), rtol=1e-5, atol=1e-6)
            assert len(stage.results[0].members) == (2 if survives == "nothing" else 3)


@pytest.mark.parametrize("method", ["Begin", "Average", "Commit", "Abort", "Report"])
@pytest.mark.parametrize("lost", ["request", "reply"])
@in_virtual_time
async def test_lost_message(method: str, lost: str) -> None:
    """Each kind of message is lost once: the members still commit the same thing, once."""
    async with network_of(make_config(), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        num_lost = 0

        async def lose(name: str, source: int, target: int) -> None:
            nonlocal num_lost
            if name == method and target == 3 and not num_lost:
                num_lost += 1
                await asyncio.sleep(60)
            elif method == "Abort" and name == "Average" and target == 2 and network.calls.count(("Average", 1, 2)) < 2:
                # An abort is sent only if something fails.
                await asyncio.sleep(60)

        setattr(network, "before" if lost == "request" else "after", lose)
        for index in range(6):
            members[index % 3].learn(index)
        await until(lambda: all(stage.round >= 1 for stage in members))
        assert num_lost == 1
        assert_equal_and_once(members)
        np.testing.assert_allclose(result_vector(members[0]), expected_mean(*range(6)), rtol=1e-5, atol=1e-6)


@in_virtual_time
async def test_every_message_may_be_late() -> None:
    generator = np.random.default_rng(5)
    async with network_of(make_config(), 1, 2, 3, 4) as network:

        async def delay(name: str, source: int, target: int) -> None:
            await asyncio.sleep(float(generator.exponential(0.03)))

        network.before = network.after = delay
        members = stages(network, 1, 2, 3, 4)
        for round_number in range(3):
            for offset in range(6):
                members[offset % 4].learn(6 * round_number + offset)
            await until(partial(all_past, members, round_number))
        assert_equal_and_once(members, rounds=3)


@pytest.mark.parametrize("moment", ["Average", "Commit"])
@in_virtual_time
async def test_frozen_leader_wakes_and_is_refused(moment: str) -> None:
    async with network_of(make_config(), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        froze = False

        async def before(name: str, source: int, target: int) -> None:
            nonlocal froze
            if name == moment and source == 1 and not froze:
                froze = True
                network.freeze(1)
                await asyncio.sleep(0)

        network.before = before
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        members[2].learn(4, 5)
        await until(lambda: froze)
        await asyncio.sleep(0.7)
        if moment == "Average":  # Otherwise the round is decided, and another leader only has to commit it.
            members[1].learn(0, 1)
        await until(lambda: members[1].round == members[2].round == 1)
        members[1].learn(*range(6, 12))
        await until(lambda: members[1].round == members[2].round == 2)
        network.thaw(1)
        await until(lambda: members[0].round == 2)
        await asyncio.sleep(0.3)
        assert len({stage.digest for stage in members}) == 1
        assert [len(stage.results) for stage in members[1:]] == [2, 2]
        assert network.peers[peer_id(1)].averager.view().is_leader


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
