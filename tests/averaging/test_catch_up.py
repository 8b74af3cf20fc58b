"""Peers that are behind, or on another branch, reach the round and branch of their group."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import PAST
from swarm.averaging.agreement.place import KEPT_OUTCOMES
from swarm.averaging.donor import snapshot_id
from swarm.averaging.wire.transport import BEGIN
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId
from tests.averaging.doubles import QUICK, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.averaging.newcomer import group_of, is_download
from tests.support.virtual_time import in_virtual_time


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
    """Both branches go on while they are cut off from each other. Then the one with fewer samples downloads the other's
    state. Nothing is mixed."""
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


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@in_virtual_time
async def test_a_newcomer_leads_peers_that_do_not_know_the_place_where_it_began(setting: str) -> None:
    """The peer that joined before the newcomer does not know the place at which the newcomer begins, so it takes the
    newcomer for one on another branch, until the newcomer reports from where the group is."""
    async with network_of(make_config(setting, microbatches=3), 3) as network:
        founder = stages(network, 3)[0]
        for number in range(PAST + 2):
            founder.learn(*range(3 * number, 3 * number + 3))
            await until(lambda number=number: founder.round == number + 1)  # type: ignore[misc]
        earlier = network.add(2)
        await earlier.averager.join()

        async def far_away(name: str, source: int, target: int) -> None:
            if {source, target} == {1, 3}:
                # So the newcomer answers a question of the earlier one before it has heard of all others.
                await asyncio.sleep(QUICK.call_seconds / 2)
            elif (source, target) == (2, 1) and earlier.averager.place.branches.is_elsewhere(PeerId(peer_id(1))):
                # Of the newcomer's arrival the earlier one hears by the newcomer's own report.
                await asyncio.sleep(QUICK.report_seconds)

        network.before = far_away
        newcomer = network.add(1)
        await until(lambda: earlier.averager.place.branches.is_elsewhere(PeerId(peer_id(1))))
        await until(lambda: newcomer.stage.round == founder.round)
        peers = [newcomer, earlier, network.peers[peer_id(3)]]
        # The founder reports to the newcomer now, and the earlier one has to do the same.
        await until(lambda: peers[2].averager.view().leader_id == newcomer.record.peer_id)
        await asyncio.sleep(QUICK.fresh_seconds)
        first = 3 * founder.round
        for number, peer in enumerate(peers):
            peer.stage.learn(first + number)
        await until(lambda: all(peer.stage.round == PAST + 3 for peer in peers))
        assert founder.results[-1].members == (peer_id(1), peer_id(2), peer_id(3))


@in_virtual_time
async def test_download_slower_than_a_round_converges() -> None:
    """The group commits a round for nearly every piece that the newcomer gets, and then goes on as usual."""
    async with group_of(2, 3) as group:
        lock = asyncio.Lock()

        async def trickle(name: str, source: int, target: int) -> None:
            if is_download(name, source):
                async with lock:
                    if group.stages[0].round < 7:
                        await group.commit()

        group.network.before = trickle
        joiner = group.add_joiner()
        await joiner.averager.join()
        assert joiner.stage.round == group.stages[0].round == 7
        assert group.digests == {group.stages[0].digest}
        assert joiner.stage.num_installs == 1
        assert len(joiner.stage.results) >= 4
        assert joiner.stage.digests == group.stages[0].digests[-len(joiner.stage.digests) :]
        assert joiner.averager.place.outcomes == group.peers[0].averager.place.outcomes
        await group.admit(joiner)
        await group.commit()
        assert len(group.digests) == 1
        assert len(group.stages[0].results[-1].members) == 3


@in_virtual_time
async def test_a_peer_that_catches_up_promises_nothing_and_is_not_waited_for() -> None:
    async with group_of(2, 3) as group:
        arrived, release = asyncio.Event(), asyncio.Event()

        async def hold(name: str, source: int, target: int) -> None:
            if is_download(name, source):
                arrived.set()
                await release.wait()

        group.network.before = hold
        joiner = group.add_joiner()
        await arrived.wait()
        group.network.calls.clear()
        begin = pb.BeginRequest(
            address=joiner.averager.context.address,
            peer_id=peer_id(2),
            ballot=pb.Ballot(attempt=1, leader_id=peer_id(2)),
            standing=messages.pack_standing(joiner.averager.place.standing),
        )
        reply = await joiner.averager.handlers.handle(BEGIN, begin)
        assert "catching up" in reply.refusal.reason
        rosters = [peer.averager.roster for peer in group.peers]
        await until(lambda: not any(peer_id(1) in roster.alive() for roster in rosters))
        await asyncio.sleep(2 * QUICK.heartbeat_seconds)
        assert not any(name == "Report" and source == 1 for name, source, _ in group.network.calls)
        await group.commit()
        assert group.stages[0].results[-1].members == (peer_id(2), peer_id(3))
        release.set()
        await until(lambda: joiner.stage.digest == group.stages[0].digest)


@in_virtual_time
async def test_a_snapshot_that_belies_its_digest_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of(2, 3) as group:
        honest_id, lies, liar = b"", list[bytes](), group.peers[0].averager.handlers

        def lie(target: int, reply: pb.DownloadReply) -> None:
            nonlocal honest_id
            if target == 2 and reply.HasField("header"):
                honest_id = snapshot_id(reply.header)
                # This snapshot is the farthest, so it is chosen, and its segments fit its header.
                reply.header.standing.round += 1
                reply.header.standing.run_samples += 1
                reply.header.state_digest = "00"
                lies.append(snapshot_id(reply.header))

        async def serve(
            request: pb.DownloadRequest, honest: Callable[[pb.DownloadRequest], Any] = liar.download
        ) -> AsyncIterator[pb.DownloadReply]:
            if request.segment.snapshot in lies:
                request.segment.snapshot = honest_id
            async for reply in honest(request):
                yield reply

        monkeypatch.setattr(liar, "download", serve)
        group.network.tamper = lie
        joiner = group.add_joiner()
        await until(lambda: joiner.stage.num_installs == 1)
        assert joiner.stage.digest == group.stages[1].digest
        assert len(lies) == 1, "it is not asked again"
