"""A newcomer applies the rounds that it missed: slower or faster than the run goes on, and with false results."""

import asyncio
import hashlib
import logging
import struct

import pytest

from swarm.rpc.v1 import averaging_pb2 as pb
from tests.averaging.doubles import until
from tests.averaging.newcomer import group_of, is_download
from tests.support.virtual_time import in_virtual_time


@in_virtual_time
async def test_who_applies_slower_than_rounds_pass_takes_a_new_snapshot_and_says_that_it_never_arrives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A result takes three seconds over the newcomer's line, and a round takes half a second. The newcomer catches up
    only when the run pauses."""
    caplog.set_level(logging.INFO)
    async with group_of(2, 3, segment_bytes=1 << 20) as group:

        async def slow(name: str, source: int, target: int) -> None:
            if is_download(name, source):
                await asyncio.sleep(1.5)

        async def go_on() -> None:
            while group.stages[0].round < 70:
                await group.commit()
                await asyncio.sleep(0.5)

        group.network.before = slow
        joiner = group.add_joiner()
        joining = asyncio.create_task(joiner.averager.join())
        await go_on()
        assert joiner.stage.num_installs >= 3
        assert len(joiner.stage.results) <= 4 * joiner.stage.num_installs, "it does not apply what it will never end"
        assert group.stages[0].round - joiner.stage.round < 40
        assert not joiner.averager.view().progress.keys() - {joiner.record.peer_id}
        lines = [line for line in caplog.messages if "never arrive" in line]
        assert len(lines) >= 2
        assert "takes 3.0 s to fetch and apply a round" in lines[0]
        assert "the group commits one every 0.5 s" in lines[0]
        assert "a faster line or machine, here or where it fetches them, or longer rounds" in lines[0]
        await joining
        await until(lambda: joiner.stage.round == 70, seconds=600.0)
        assert group.digests == {group.stages[0].digest}


@in_virtual_time
async def test_where_the_results_are_lost_the_newcomer_starts_over() -> None:
    async with group_of(2, 3) as group:
        num_lost = 0

        async def lose(name: str, source: int, target: int) -> None:
            nonlocal num_lost
            if is_download(name, source) and joiner.stage.num_installs == num_lost + 1 < 3:
                num_lost += 1
                await group.commit()
                for peer in group.peers:
                    peer.averager.donor.jumped()

        joiner = group.add_joiner()
        group.network.before = lose
        await until(lambda: joiner.stage.digest == group.stages[0].digest and joiner.stage.round == 3)
        assert (joiner.stage.num_installs, num_lost) == (3, 2)


@in_virtual_time
async def test_a_missed_round_that_gives_another_state_is_undone_by_a_download() -> None:
    """Until the download is done, the peer reports nothing and takes part in no round, so no other peer averages with
    it."""
    async with group_of(2, 3) as group:
        states: list[tuple[bool, int]] = []

        def lie(target: int, reply: pb.DownloadReply) -> None:
            if reply.HasField("result") and not states:
                reply.result.state_digest = "00"
                states.append((True, 0))

        async def busy(name: str, source: int, target: int) -> None:
            if is_download(name, source) and group.stages[0].round < 3:
                await group.commit()
            # Once the joiner has the state, it reports like every peer.
            if source == 1 and joiner.stage.results and joiner.stage.num_installs < 2:
                states.append((place.is_sound, place.standing.round))
                assert name == "Download"
                assert place.is_catching_up

        joiner = group.add_joiner()
        place = joiner.averager.place
        group.network.tamper, group.network.before = lie, busy
        await until(lambda: place.is_sound and not place.is_catching_up and joiner.stage.num_installs == 2)
        assert states[1] == (False, joiner.stage.results[0].round)
        assert joiner.stage.digest == group.stages[0].digest


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
@in_virtual_time
async def test_a_result_of_impossible_numbers_is_not_applied(value: float, caplog: pytest.LogCaptureFixture) -> None:
    """The result's digest and lineage are right: a liar can compute them, too."""
    async with group_of(2, 3) as group:

        def lie(target: int, reply: pb.DownloadReply) -> None:
            if reply.HasField("result"):
                reply.result.sha256 = hashlib.sha256(poison * 17).digest()
            elif len(reply.data) > 16:  # Not a segment.
                reply.data = poison * 17

        async def busy(name: str, source: int, target: int) -> None:
            if is_download(name, source) and group.stages[0].round < 3:
                await group.commit()

        caplog.set_level(logging.INFO)
        poison = struct.pack("<f", value)
        group.network.tamper, group.network.before = lie, busy
        joiner = group.add_joiner()
        await until(lambda: joiner.stage.digest == group.stages[0].digest)
        assert "holds NaN, infinity, numbers beyond 1e+15" in caplog.text
        assert not joiner.stage.results
        assert joiner.stage.num_installs >= 2
