"""Peers that are behind, or on another branch, reach the round and branch of their group."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import pytest

from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import PAST
from swarm.averaging.agreement.place import KEPT_OUTCOMES
from swarm.averaging.donor import snapshot_id
from swarm.averaging.wire.transport import BEGIN
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Contribution
from swarm.types import PeerId
from tests.averaging.doubles import QUICK, network_of, peer_id, stages, until
from tests.averaging.fake_stage import FakeStage, make_config
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
async def test_first_contribution_of_a_joiner_leaves_equal_weights_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of(2, 3) as group:

        async def busy(name: str, source: int, target: int) -> None:
            if is_download(name, source) and group.stages[0].round < 4:
                await group.commit()

        group.network.before = busy
        joiner = group.add_joiner()
        await joiner.averager.join()
        digest = group.stages[0].digest
        weights = group.stages[0].anchor

        async def freeze(self: FakeStage, round_number: int, *, drop: Collection[int]) -> Contribution:
            vector = self.anchor - weights
            return Contribution(
                tensors={"b": vector[:5], "a": vector[5:].reshape(3, 4)}, num_samples=2, num_targets=2, round_samples=2,
                committed=frozenset(self.indices),
            )  # fmt: skip

        monkeypatch.setattr(FakeStage, "freeze", freeze)
        await group.admit(joiner)
        await group.commit()
        assert joiner.record.peer_id in group.stages[0].results[-1].members
        assert group.digests == {digest}


@in_virtual_time
async def test_donor_that_dies_in_mid_transfer_is_replaced_and_nothing_is_fetched_twice() -> None:
    async with group_of(2, 3, 4) as group:
        received: Counter[int] = Counter()

        def count(target: int, reply: pb.DownloadReply) -> None:
            received[target] += len(reply.data)
            if target == 3 and reply.data:
                group.network.kill(3)

        group.network.tamper = count
        joiner = group.add_joiner()
        await until(lambda: joiner.stage.digest == group.stages[0].digest)
        assert joiner.stage.num_installs == 1
        snapshot_bytes = sum(t.nbytes for t in (await joiner.stage.snapshot()).tensors.values())
        assert received[3] == 16
        assert received[2] + received[4] == snapshot_bytes


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
