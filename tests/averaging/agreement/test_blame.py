"""Members that fail in an attempt, or send nonsense. The others commit without them."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swarm.averaging.agreement import messages
from swarm.averaging.wire.transport import AVERAGE, BEGIN
from swarm.rpc.v1 import averaging_pb2 as pb
from tests.averaging.doubles import QUICK, Peer, broken, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.averaging.outcomes import assert_equal_and_once, expected_mean, result_vector
from tests.support.virtual_time import in_virtual_time


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


def _more_than_a_round(reply: pb.BeginReply) -> None:
    reply.num_samples = reply.num_targets = reply.round_samples = 1 << 40


@pytest.mark.parametrize("lie", [_negative, _without_samples, _longer, _beyond, _without_promise, _more_than_a_round])
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
        await until(lambda: leader.counters().attempts > 0)
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        await until(lambda: all(stage.round == 1 for stage in members[:2]))
        assert_equal_and_once(members[:2])
        assert members[0].results[0].members == (peer_id(1), peer_id(2))


@pytest.mark.parametrize(("factor", "what"), [(2, "num_samples"), (2, "round_samples"), (0, "round_samples")])
@in_virtual_time
async def test_who_counts_other_samples_than_its_microbatches_is_named_and_left_out(
    factor: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The microbatches that it names are had from others."""
    async with network_of(make_config("synchronous", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        liar = network.peers[peer_id(3)]

        async def begin(request: Any) -> Any:
            reply = await liar.averager.handlers.handle(BEGIN, request)
            setattr(reply, what, factor * getattr(reply, what))
            return reply

        liar.instead["Begin"] = begin
        for index in range(4):
            members[index % 3].learn(index)
        leader = network.peers[peer_id(1)].averager
        await until(lambda: leader.counters().attempts > 0)
        members[0].learn(2)
        await until(lambda: all(stage.round == 1 for stage in members[:2]))
        assert members[0].results[0].members == (peer_id(1), peer_id(2))
        assert members[0].run_samples == network.config.rounds.round_samples
    assert f"{peer_id(3)} is left out: its contribution is of " in caplog.text


def make_up_results(liar: Peer) -> None:
    """Let a member answer each Average with a digest that is not its result's."""

    async def average(request: Any) -> Any:
        reply = await liar.averager.handlers.handle(AVERAGE, request)
        reply.prepared.digest = "made up"
        return reply

    liar.instead["Average"] = average


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@in_virtual_time
async def test_who_comes_to_another_result_than_the_others_is_named_and_left_out(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with network_of(make_config(setting, microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        liar = network.peers[peer_id(3)]
        make_up_results(liar)
        members[2].learn(3)
        for index in range(3):
            members[index % 2].learn(index)
        await until(lambda: f"not that of most: {peer_id(3)}" in caplog.text)
        members[0].learn(3)
        await until(lambda: all(stage.round == 1 for stage in members[:2]))
        assert members[0].results[0].members == (peer_id(1), peer_id(2))


@pytest.mark.parametrize(
    ("attempt", "holders", "told"),
    [
        (1 << 40, [1, 2, 3], "they hold a result that cannot be"),
        (1, [1, 2], "they hold a result that cannot be"),
        (1, [3], "they do not commit what they hold"),
    ],
    ids=["of a later attempt", "of others", "of itself alone"],
)
@in_virtual_time
async def test_who_holds_a_made_up_result_is_named_and_left_out(
    attempt: int, holders: list[int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with network_of(make_config("diloco", microbatches=4), 1, 2, 3) as network:
        members = stages(network, 1, 2, 3)
        liar = network.peers[peer_id(3)]
        ballot = pb.Ballot(attempt=attempt, leader_id="0")
        prepared = pb.Prepared(digest="d", member_ids=[peer_id(number) for number in holders], ballot=ballot)

        async def begin(request: Any) -> Any:
            reply = await liar.averager.handlers.handle(BEGIN, request)
            reply.prepared.CopyFrom(prepared)
            return reply

        liar.instead["Begin"] = begin
        members[0].learn(0, 1)
        members[1].learn(2, 3)
        await until(lambda: all(stage.round == 1 for stage in members[:2]), seconds=60.0)
        assert members[0].results[0].members == (peer_id(1), peer_id(2))
    assert any(told in line and peer_id(3) in line for line in caplog.messages)


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
async def test_two_of_many_members_that_cannot_reach_each_other_own_no_parts_and_the_others_do() -> None:
    """So who says in vain that it cannot reach another one keeps nobody but these two from looking at contributions."""
    async with network_of(make_config("diloco", microbatches=12), *range(1, 7)) as network:
        members = stages(network, *range(1, 7))
        network.cut.add(frozenset((3, 5)))
        for number, member in enumerate(members):
            member.learn(2 * number, 2 * number + 1)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert_equal_and_once(members)
        assert (len(members[0].results[0].members), members[0].results[0].attempts) == (6, 2)
        last = max(place for place, (name, *_) in enumerate(network.calls) if name == "Begin")
        owners = {target for name, _, target in network.calls[last:] if name == "Exchange"}
        assert owners == {1, 2, 4, 6}


@pytest.mark.parametrize(
    ("method", "fault"),
    [("Begin", "error"), ("Begin", "late"), ("Average", "error"), ("Average", "refusal"), ("Average", "late")],
)
@in_virtual_time
async def test_what_a_member_has_that_fails_is_had_from_others(method: str, fault: str) -> None:
    """Otherwise the round would seem complete, and would never be committed: no trainer replays microbatches that a
    member reports."""
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


def test_of_what_a_member_says_of_another_only_a_line_is_passed_on() -> None:
    told = pb.Failure(blamed_id="a" * 999, reason="\n" + "x" * 100_000, noticed_by_id="b" * 999)
    failed = messages.unpack_failure(told)
    assert str(failed) == " " + "x" * (messages.LONGEST_MEMBER_REASON - 1)
    assert (len(failed.peer_id), len(failed.noticed_by)) == (messages.LONGEST_ID, messages.LONGEST_ID)
