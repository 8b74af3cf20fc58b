import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from swarm.averaging.exchanging.allreduce import OWNER_PATIENCE
from swarm.averaging.place import KEPT_OUTCOMES
from swarm.averaging.transport import BEGIN, COMMIT
from swarm.errors import PeerUnavailable
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId
from tests.averaging.doubles import (
    QUICK,
    FakeStage,
    Network,
    all_past,
    broken,
    gradient,
    make_config,
    network_of,
    peer_id,
    stages,
    until,
)
from tests.support.virtual_time import in_virtual_time


def expected_mean(*indices: int) -> np.ndarray:
    return np.asarray(np.mean([gradient(i).double().numpy() for i in indices], axis=0))


def result_vector(stage: FakeStage, nth: int = 0) -> np.ndarray:
    tensors = stage.results[nth].tensors
    return torch.cat([tensors["b"], tensors["a"].reshape(-1)]).numpy()


def assert_equal_and_once(members: list[FakeStage], rounds: int = 1) -> None:
    """Assert that all peers came to the same round by commits, with the same bits and the same lineage."""
    assert {stage.round for stage in members} == {rounds}
    assert len({stage.digest for stage in members}) == 1
    assert len({stage.lineage for stage in members}) == 1
    assert all(len(stage.results) <= rounds for stage in members)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@in_virtual_time
async def test_members_commit_the_weighted_mean_bit_identically(size: int, setting: str) -> None:
    async with network_of(make_config(setting), *range(size)) as network:
        members = stages(network, *range(size))
        # Uneven shares: the weights matter.
        for index in range(6):
            members[min(index // 2, size - 1) if size > 1 else 0].learn(index)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert_equal_and_once(members)
        assert all(len(stage.results) == 1 for stage in members)
        np.testing.assert_allclose(result_vector(members[0]), expected_mean(*range(6)), rtol=1e-5, atol=1e-6)
        result = members[0].results[0]
        assert result.num_samples == 12
        assert result.squared_norm == pytest.approx(float((expected_mean(*range(6)) ** 2).sum()), rel=1e-5)
        assert len(set(stage.results[0].squared_norm for stage in members)) == 1
        await until(lambda: all(p.averager.statistics().num_alive == size for p in network.peers.values()))


@in_virtual_time
async def test_rounds_follow_one_another() -> None:
    async with network_of(make_config(), 1, 2) as network:
        members = stages(network, 1, 2)
        for round_number in range(3):
            for offset in range(6):
                members[offset % 2].learn(6 * round_number + offset)
            await until(partial(all_past, members, round_number))
        assert_equal_and_once(members, rounds=3)
        assert members[0].run_samples == 36
        assert members[0].results[2].members == tuple(peer.record.peer_id for peer in network.peers.values())


@in_virtual_time
async def test_fp16_members_apply_what_went_over_the_wire() -> None:
    async with network_of(make_config(codec="fp16"), 1, 2) as network:
        members = stages(network, 1, 2)
        members[0].learn(0, 1, 2, 3)
        members[1].learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert_equal_and_once(members)
        vector = result_vector(members[0])
        np.testing.assert_array_equal(vector, vector.astype(np.float16).astype(np.float32))
        assert members[0].results[0].cost.compression_ratio == 2.0


@in_virtual_time
async def test_single_member_in_fp32_gets_its_contribution_bit_for_bit() -> None:
    async with network_of(make_config(), 1) as network:
        stage = stages(network, 1)[0]
        stage.indices.update(range(6))
        contribution = await stage.close(0, drop=())
        stage.learn()
        await until(lambda: stage.round == 1)
        assert all(torch.equal(stage.results[0].tensors[n], t) for n, t in contribution.tensors.items())


@in_virtual_time
async def test_round_waits_for_what_is_missing() -> None:
    async with network_of(make_config(), 1, 2) as network:
        members = stages(network, 1, 2)
        members[0].learn(0, 1, 2)
        members[1].learn(3, 4)
        view = network.peers[peer_id(1)].averager.view
        await until(lambda: view().committed == frozenset(range(5)))
        await asyncio.sleep(0.2)
        assert view().is_leader
        assert not view().complete
        assert all(stage.round == 0 for stage in members)
        members[1].learn(5)
        await until(lambda: all(stage.round == 1 for stage in members))


@in_virtual_time
async def test_what_a_member_has_that_missed_a_heartbeat_does_not_show_and_nothing_is_begun_without_it() -> None:
    """An attempt would close what the others have, and nothing could be replayed until it failed."""
    async with network_of(make_config(), 1, 2) as network:
        members = stages(network, 1, 2)
        members[1].learn(3, 4, 5)
        view = network.peers[peer_id(1)].averager.view
        await until(lambda: view().shown == {3, 4, 5})
        network.freeze(2)
        await asyncio.sleep(2.5 * QUICK.heartbeat_seconds)
        members[0].learn(0, 1, 2)
        await asyncio.sleep(QUICK.heartbeat_seconds)
        assert view().shown == {0, 1, 2}
        assert view().complete
        assert not [name for name, _, _ in network.calls if name == "Begin"]
        network.thaw(2)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert members[0].results[0].attempts == 1


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
    """The member was away, say, and what it had was replayed."""
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
async def test_a_contribution_that_does_not_fit_its_microbatches_is_not_averaged() -> None:
    async with network_of(make_config(), 1, 2) as network:
        leader, other = stages(network, 1, 2)
        other.surplus = 1
        leader.learn(0, 1, 2)
        other.learn(3, 4, 5)
        averager = network.peers[peer_id(1)].averager
        await until(lambda: sum(averager.statistics().aborted.values()) > 0)
        assert [stage.round for stage in (leader, other)] == [0, 0]
        other.surplus = 0
        await until(lambda: all(stage.round == 1 for stage in (leader, other)))


@in_virtual_time
async def test_a_leader_that_is_left_out_may_be_back_with_what_it_has() -> None:
    async with network_of(make_config(), 1, 2) as network:
        leader, other = stages(network, 1, 2)
        leader.learn(0, 1)
        other.learn(2)
        peer = network.peers[peer_id(1)]
        await until(lambda: peer.averager.view().committed == {0, 1, 2})
        peer.averager.roster.suspicions.exclude(PeerId(peer_id(1)))
        view = peer.averager.view()
        assert view.committed == {2}
        assert view.counted == {0, 1, 2}
        assert not view.lost


@in_virtual_time
async def test_doubles_are_shared_by_those_that_have_them() -> None:
    """To take a microbatch out costs a forward and a backward."""
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


# -- leaders that die ------------------------------------------------------------------------------------------------


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


@in_virtual_time
async def test_member_killed_in_exchange_is_not_counted() -> None:
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)

        async def before(name: str, source: int, target: int) -> None:
            if name == "Exchange" and source == 2:
                network.kill(2)

        network.before = before
        members[1].learn(4, 5)
        members[2].learn(2, 3)
        await asyncio.sleep(0.1)
        members[0].learn(0, 1)
        survivors = [members[0], members[2]]
        await until(lambda: all(stage.round == 1 for stage in survivors))
        assert_equal_and_once(survivors)
        assert survivors[0].results[0].num_samples == 8
        assert survivors[0].results[0].attempts > 1
        np.testing.assert_allclose(result_vector(survivors[0]), expected_mean(0, 1, 2, 3), rtol=1e-5, atol=1e-6)


@in_virtual_time
async def test_poisoned_contribution_is_left_out() -> None:
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        members[1].poison = True
        members[1].learn(4, 5)
        members[2].learn(2, 3)
        await asyncio.sleep(0.1)
        members[0].learn(0, 1)
        await until(lambda: all(stage.round == 1 for stage in members))
        await until(lambda: len({stage.digest for stage in members}) == 1)
        assert members[1].num_installs == 1
        np.testing.assert_allclose(result_vector(members[0]), expected_mean(0, 1, 2, 3), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [-1.0, 0.0, float("nan")])
@in_virtual_time
async def test_a_norm_that_cannot_be_is_not_clipped_by(norm: float, caplog: pytest.LogCaptureFixture) -> None:
    """The member lives on, and gets the round's result once a peer tells the truth."""
    async with network_of(make_config(), 1, 2) as network:
        members = stages(network, 1, 2)
        liar, asked = network.peers[peer_id(2)], asyncio.Event()

        async def commit(request: Any) -> Any:
            asked.set()
            request.total_squared_norm = norm
            return await liar.averager.handlers.handle(COMMIT, request)

        liar.instead["Commit"] = commit
        members[0].learn(0, 1, 2)
        members[1].learn(3, 4, 5)
        await asked.wait()
        await until(lambda: all(stage.round == 1 for stage in members))
        assert "the model's squared norm is said to be" in caplog.text
        assert {stage.results[0].total_squared_norm for stage in members} == {members[0].results[0].squared_norm}
        assert len({stage.digest for stage in members}) == 1


def _negative(reply: pb.BeginReply) -> None:
    reply.norm = -1.0


def _without_samples(reply: pb.BeginReply) -> None:
    reply.num_samples = 0


def _longer(reply: pb.BeginReply) -> None:
    reply.num_elements += 1


def _beyond(reply: pb.BeginReply) -> None:
    reply.committed_gaps.extend([1 << 48, 1 << 48])


def _without_promise(reply: pb.BeginReply) -> None:
    reply.ClearField("since")
    reply.prepared.CopyFrom(pb.Prepared(digest="d", member_ids=[peer_id(3)], ballot=pb.Ballot(attempt=1)))


@pytest.mark.parametrize("lie", [_negative, _without_samples, _longer, _beyond, _without_promise])
@in_virtual_time
async def test_who_closes_with_what_makes_no_sense_is_left_out(lie: Callable[[pb.BeginReply], None]) -> None:
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        liar = network.peers[peer_id(3)]

        async def begin(request: Any) -> Any:
            reply = await liar.averager.handlers.handle(BEGIN, request)
            lie(reply)
            return reply

        liar.instead["Begin"] = begin
        for index in range(4):
            members[2].learn(4 + index)
        leader = network.peers[peer_id(1)].averager
        await until(lambda: leader.statistics().num_attempts > 0)
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        await until(lambda: all(stage.round == 1 for stage in members[:2]))
        assert_equal_and_once(members[:2])
        assert members[0].results[0].members == (peer_id(1), peer_id(2))


@pytest.mark.parametrize("codec", ["fp32", "dct-topk"])
@in_virtual_time
async def test_two_members_that_cannot_reach_each_other_exchange_through_their_leader(codec: str) -> None:
    async with network_of(make_config("diloco", codec=codec), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        network.cut.add(frozenset((2, 3)))
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        members[2].learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert_equal_and_once(members)
        assert (len(members[0].results[0].members), members[0].results[0].attempts) == (3, 2)


@in_virtual_time
async def test_a_member_that_its_leader_does_not_reach_either_is_left_out() -> None:
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)

        async def before(name: str, source: int, target: int) -> None:
            if name == "Exchange" and 3 in (source, target):
                raise PeerUnavailable("only its small messages come through", is_unreachable=True)

        network.before = before
        members[1].learn(2, 3)
        members[2].learn(4, 5)
        await asyncio.sleep(0.1)
        members[0].learn(0, 1)
        await until(lambda: all(stage.round == 1 for stage in members[:2]))
        assert_equal_and_once(members[:2])
        assert len(members[0].results[0].members) == 2


@pytest.mark.parametrize("fault", ["refusal", "late"])
@in_virtual_time
async def test_a_member_that_fails_and_goes_on_reporting_is_left_out(fault: str) -> None:
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        broken(network, 3, "Average", fault)
        members[1].learn(2)
        members[2].learn(4, 5)
        await asyncio.sleep(0.1)
        members[0].learn(0)
        averager = network.peers[peer_id(1)].averager
        await until(lambda: averager.statistics().num_attempts > 0)
        members[0].learn(1)
        members[1].learn(3)
        await until(lambda: all(stage.round == 1 for stage in members[:2]))
        assert len(members[0].results[0].members) == 2


@pytest.mark.parametrize(
    ("method", "fault"),
    [("Begin", "error"), ("Begin", "late"), ("Average", "error"), ("Average", "refusal"), ("Average", "late")],
)
@in_virtual_time
async def test_what_a_member_has_that_fails_is_had_from_others(method: str, fault: str) -> None:
    """Otherwise the round would look complete and never be: no trainer replays what a member reports."""
    async with network_of(make_config(), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        broken(network, 3, method, fault)
        for index in range(6):
            members[index % 3].learn(index)
        view = network.peers[peer_id(1)].averager.view
        await until(lambda: view().complete)
        time = asyncio.get_running_loop().time
        shown_at = began_at = time()
        while time() - shown_at < QUICK.fresh_seconds:
            assert time() - began_at < 30.0, "it keeps coming back"
            shown_at = time() if view().committed != {0, 1, 3, 4} else shown_at
            await asyncio.sleep(QUICK.heartbeat_seconds / 5)
        members[0].learn(2)
        members[1].learn(5)
        await until(lambda: all(stage.round == 1 for stage in members[:2]), seconds=30.0)
        assert_equal_and_once(members[:2])


@in_virtual_time
async def test_who_refuses_once_is_asked_again() -> None:
    """The member may have lost touch with its leader for a moment."""
    async with network_of(make_config("diloco"), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        broken(network, 3, "Average", "refusal")

        async def heal(name: str, source: int, target: int) -> None:
            if (name, target) == ("Average", 3):
                network.peers[peer_id(3)].instead.clear()

        network.after = heal
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        members[2].learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert (len(members[0].results[0].members), members[0].results[0].attempts) == (3, 2)


@in_virtual_time
async def test_a_line_that_stands_still_is_given_up_long_before_an_exchange_takes_too_long() -> None:
    async with network_of(make_config("diloco"), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)

        async def before(name: str, source: int, target: int) -> None:
            if {source, target} == {2, 3}:
                await asyncio.Event().wait()

        network.before = before
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        members[2].learn(4, 5)
        began_at = asyncio.get_running_loop().time()
        await until(lambda: all(stage.round == 1 for stage in members))
        seconds = asyncio.get_running_loop().time() - began_at
        assert seconds < 2 * QUICK.report_seconds < OWNER_PATIENCE * QUICK.average_seconds
        assert len(members[0].results[0].members) == 3


@in_virtual_time
async def test_who_has_no_answers_from_its_leader_does_not_hold_it_up() -> None:
    """What the member sends arrives, but nothing that is sent to it does."""
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        deaf = True

        async def before(name: str, source: int, target: int) -> None:
            if deaf and target == 3:
                await asyncio.Event().wait()

        async def after(name: str, source: int, target: int) -> None:
            if deaf and source == 3:
                await asyncio.Event().wait()

        network.before, network.after = before, after
        await asyncio.sleep(2 * QUICK.fresh_seconds)
        members[2].learn(4, 5)
        members[1].learn(2, 3)
        await asyncio.sleep(2 * QUICK.fresh_seconds)
        members[0].learn(0, 1)
        await until(lambda: all(stage.round == 1 for stage in members[:2]))
        assert members[0].results[0].attempts == 1
        deaf = False
        await until(lambda: members[2].round == 1)
        members[0].learn(6, 7)
        members[1].learn(8)
        members[2].learn(9)
        await until(lambda: all(stage.round == 2 for stage in members))


# -- lost and late messages ------------------------------------------------------------------------------------------


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
                # Something has to fail for an abort to be sent.
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


# -- stale leaders and branches --------------------------------------------------------------------------------------


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
        if moment == "Average":  # Else the round is decided, and another leader only has to commit it.
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


@pytest.mark.parametrize("num_rounds", [1, KEPT_OUTCOMES, KEPT_OUTCOMES + 1])
@in_virtual_time
async def test_who_was_away_for_a_few_rounds_keeps_what_it_has_learnt(num_rounds: int) -> None:
    async with network_of(make_config("diloco", microbatches=2), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        members[2].learn(0)
        network.freeze(3)
        for number in range(num_rounds):
            members[0].learn(2 * number + 1, 2 * number + 2)
            await until(lambda number=number: members[0].round == members[1].round == number + 1)  # type: ignore[misc]
        network.thaw(3)
        await until(lambda: members[2].round == num_rounds)
        assert members[2].carried == [num_rounds <= KEPT_OUTCOMES]
        assert members[2].digest == members[0].digest


@in_virtual_time
async def test_two_branches_meet_and_the_poorer_one_yields() -> None:
    """Both go on while cut off from each other. Then the one with fewer samples downloads; nothing is mixed."""
    async with network_of(make_config("diloco", microbatches=2), 1, 2) as network:
        members = stages(network, 1, 2)
        network.cut.add(frozenset((1, 2)))
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        await until(lambda: all(stage.round == 1 for stage in members))
        members[1].learn(4, 5)
        await until(lambda: members[1].round == 2)
        richer = members[1].digest
        network.cut.clear()
        await until(lambda: members[0].round == 2)
        assert members[0].digest == members[1].digest == richer
        assert (members[0].num_installs, members[1].num_installs) == (1, 0)
        assert members[0].carried == [False]


@in_virtual_time
async def test_majority_does_not_fork_and_never_mixes_branches() -> None:
    async with network_of(make_config("diloco", microbatches=2, quorum="majority"), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        members[0].learn(0)
        members[1].learn(1)
        await until(lambda: all(stage.round == 1 for stage in members))
        network.cut |= {frozenset((1, 2)), frozenset((1, 3))}
        await asyncio.sleep(0.6)
        members[0].learn(2, 3)
        members[1].learn(4, 5)
        await until(lambda: members[1].round == members[2].round == 2)
        await asyncio.sleep(0.5)
        assert members[0].round == 1
        network.cut.clear()
        await until(lambda: members[0].round == 2)
        assert len({stage.digest for stage in members}) == 1


@in_virtual_time
async def test_foreign_branch_at_the_same_round_is_never_averaged(caplog: pytest.LogCaptureFixture) -> None:
    async with network_of(make_config("diloco", microbatches=2, quorum="majority"), 1, 3) as network:
        stage, stranger = stages(network, 1)[0], network.add(2, lineage="ff").stage
        stage.learn(0)
        stranger.learn(1)
        await until(lambda: "another branch" in caplog.text)
        await asyncio.sleep(0.2)
        assert stage.round == stranger.round == 0
        stage.learn(2)
        await until(lambda: stage.round == 1)
        assert stage.results[0].members == (peer_id(1), peer_id(3))


# -- newcomers -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_joiner_catches_up_and_takes_part() -> None:
    async with network_of(make_config("diloco", microbatches=4), 2, 3) as network:
        members = stages(network, 2, 3)
        for stage in members:
            stage.learn(0, 1)
        await until(lambda: all(stage.round == 1 for stage in members))
        # The joiner has the lowest id of all, but must not lead while it is behind.
        joiner = network.add(1)
        await joiner.averager.join()
        assert (joiner.stage.round, joiner.stage.digest) == (1, members[0].digest)
        assert joiner.averager.place.outcomes.keys() == {0}
        joiner.stage.learn(4, 5)
        members[0].learn(6)
        members[1].learn(7)
        await until(lambda: all(stage.round == 2 for stage in [*members, joiner.stage]))
        assert len({stage.digest for stage in [*members, joiner.stage]}) == 1
        assert len(members[0].results[1].members) == 3


@in_virtual_time
async def test_joiner_takes_the_next_donor_when_one_sends_rubbish(caplog: pytest.LogCaptureFixture) -> None:
    async with network_of(make_config("diloco", microbatches=2), 2, 3) as network:
        members = stages(network, 2, 3)
        for number, stage in enumerate(members):
            stage.learn(number)
        await until(lambda: all(stage.round == 1 for stage in members))
        first: list[int] = []

        def corrupt(target: int, reply: pb.DownloadReply) -> None:
            first[:] = first or [target]
            if target == first[0] and reply.data:
                reply.data = bytes(len(reply.data))

        network.tamper = corrupt
        joiner = network.add(4)
        await until(lambda: joiner.stage.round == 1)
        assert joiner.stage.digest == members[0].digest
        assert "does not match its digest" in caplog.text


# -- several stages --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def two_stages() -> AsyncIterator[Network]:
    """Peers 1 and 2 at stage 0, 3 and 4 at stage 1."""
    async with network_of(make_config(stages=2)) as network:
        for number in (1, 2, 3, 4):
            network.add(number, (number - 1) // 2)
        yield network


@in_virtual_time
async def test_no_stage_commits_before_all_are_prepared() -> None:
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        first[0].learn(0, 1, 2)
        first[1].learn(3, 4, 5)
        second[0].learn(0, 1, 2, 3)
        await asyncio.sleep(0.8)
        assert all(stage.closed for stage in first)
        assert all(stage.round == 0 for stage in [*first, *second])
        second[1].learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in [*first, *second]))
        norms = [stage.results[0].squared_norm for stage in (first[0], second[0])]
        totals = {stage.results[0].total_squared_norm for stage in [*first, *second]}
        assert totals == {norms[0] + norms[1]}
        assert_equal_and_once(first)
        assert_equal_and_once(second)


@in_virtual_time
async def test_what_is_decided_is_not_missed_when_its_member_goes() -> None:
    """A stage that waits at the barrier has all that it needs, even from a member that has left since."""
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        first[0].learn(0, 1, 2)
        first[1].learn(3, 4, 5)
        second[0].learn(0, 1, 2, 3)
        view = network.peers[peer_id(1)].averager.view
        await until(lambda: view().complete and all(stage.closed for stage in first))
        await asyncio.sleep(0.3)
        network.kill(2)
        await until(lambda: len(view().progress) == 1)
        assert view().committed == view().shown == frozenset(range(6))
        assert view().complete
        second[1].learn(4, 5)
        await until(lambda: all(stage.round == 1 for stage in [first[0], *second]))


@in_virtual_time
async def test_leaders_that_do_not_get_through_to_each_other_hear_through_others() -> None:
    """Some line between two machines may not work, though each of them reaches others."""
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)
        network.cut.add(frozenset({1, 3}))
        for index in range(6):
            first[index % 2].learn(index)
            second[index % 2].learn(index)
        await until(lambda: all(stage.round == 1 for stage in [*first, *second]))
        assert_equal_and_once(first)
        assert_equal_and_once(second)


@in_virtual_time
async def test_leader_dies_at_the_barrier_after_the_other_stage_relied_on_it() -> None:
    """Stage 1 commits on the strength of stage 0's answer; stage 0's survivor must then commit that very result."""
    async with two_stages() as network:
        first, second = stages(network, 1, 2), stages(network, 3, 4)

        async def before(name: str, source: int, target: int) -> None:
            if name == "Commit" and source == 1:
                network.kill(1)
            if name == "Barrier" and source == 1:
                # Stage 1 gets its answer first.
                await asyncio.sleep(0.3)

        network.before = before
        for index in range(6):
            first[index % 2].learn(index)
            second[index % 2].learn(index)
        await until(lambda: all(stage.round == 1 for stage in second))
        network.kill(1)
        assert first[1].round == 0
        await until(lambda: first[1].round == 1)
        result = first[1].results[0]
        assert len(result.members) == 2
        assert result.total_squared_norm == second[0].results[0].total_squared_norm
