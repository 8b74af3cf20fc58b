"""Snapshots from several donors: turns, shared work, resumption, wrong bytes."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from swarm.averaging.state_transfer import Fetched, StateTransfer, Wanted
from swarm.errors import Overloaded, PeerUnavailable
from swarm.machine.waits import Waits
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.tensor_pb2 import TensorHeader
from tests.averaging.doubles import peer_id, record
from tests.averaging.holder import NUM_BYTES, SIZE, holder, line_to, queueing_line, transfer_over
from tests.support.virtual_time import in_virtual_time

pytestmark = pytest.mark.usefixtures("small_segments")


async def fetch(transfer: StateTransfer, *numbers: int, max_bytes: int = 4 * NUM_BYTES) -> Fetched:
    donors = [record(number) for number in numbers]
    wanted = Wanted(max_bytes=max_bytes, is_useful=lambda standing: standing.round > 0)
    return await transfer.fetch(await transfer.begin(donors, wanted))


def after(num_messages: int, act: Callable[[str, pb.DownloadReply], None]) -> Callable[[str, pb.DownloadReply], None]:
    """A tamper function that calls `act` for every piece after the first `num_messages`."""
    num_seen = 0

    def tamper(donor: str, reply: pb.DownloadReply) -> None:
        nonlocal num_seen
        num_seen += bool(reply.data)
        if num_seen > num_messages:
            act(donor, reply)

    return tamper


@in_virtual_time
async def test_those_who_find_a_donor_serving_another_wait_their_turn_and_all_get_the_state() -> None:
    line, _ = queueing_line(1)
    waits = Waits()
    transfers = [transfer_over(line, 90 + n, silence_seconds=15.0, waits=waits, stage=2) for n in range(4)]
    fetching = asyncio.gather(*(fetch(transfer, 1) for transfer in transfers))
    for _ in range(2):
        waits.look(asyncio.get_running_loop().time())
        await asyncio.sleep(1.5)
    waits.look(asyncio.get_running_loop().time())
    assert waits.present.startswith("the state of stage 2: 0.0 of 0.0 MB from 00000000 (")
    assert "download first), 0.00 MB/s" in waits.present
    all_fetched = await fetching
    assert {fetched.snapshot.digest for fetched in all_fetched} == {holder(line, 1).digest}
    # The time in which donors served others says nothing about the speed of their lines.
    assert asyncio.get_running_loop().time() > 5.0
    assert max(fetched.seconds for fetched in all_fetched) < 1.0


@in_virtual_time
async def test_what_a_donor_keeps_one_waiting_for_another_one_sends() -> None:
    line, turns = queueing_line(2)
    transfer = transfer_over(line, 90, silence_seconds=15.0)
    began_at = asyncio.get_running_loop().time()
    async with turns.turn("another"):
        fetched = await fetch(transfer, 1, 2)
    assert asyncio.get_running_loop().time() - began_at < 3.0
    assert fetched.snapshot.digest == holder(line, 2).digest
    assert (line.num_bytes[peer_id(1)], line.num_bytes[peer_id(2)]) == (0, NUM_BYTES)
    assert [source.peer_id for source in fetched.sources] == [peer_id(2), peer_id(1)], "the faster one comes first"


@in_virtual_time
async def test_one_that_waits_and_has_nothing_yet_looks_again_once_another_peer_has_the_state() -> None:
    line, turns = queueing_line(1)
    transfer = transfer_over(line, 90, silence_seconds=15.0)
    others = list[int]()

    async def fetching() -> Fetched:
        wanted = Wanted(max_bytes=4 * NUM_BYTES, is_useful=lambda standing: True)
        return await transfer.fetch(await transfer.begin([record(1)], wanted), lambda: bool(others))

    async with turns.turn("another"):
        waiting = asyncio.create_task(fetching())
        await asyncio.sleep(20.0)
        assert not waiting.done(), "there is nobody else to be asked"
        others.append(2)
        with pytest.raises(Overloaded, match="others have the state"):
            await asyncio.wait_for(waiting, 2.0)
    others.clear()
    assert (await fetching()).snapshot.digest == holder(line, 1).digest


@in_virtual_time
async def test_sources_with_the_same_bits_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_to(3)
    monkeypatch.setattr("swarm.averaging.donor.SEGMENT_BYTES", 16)
    fetched = await fetch(transfer_over(line), 1, 2, 3)
    assert torch.equal(fetched.snapshot.tensors["state"], holder(line, 1).state)
    assert (fetched.snapshot.round, fetched.snapshot.digest) == (1, holder(line, 1).digest)
    assert [outcome.round for outcome in fetched.outcomes] == [0]
    assert len(fetched.sources) == 3
    assert sum(line.num_bytes.values()) == NUM_BYTES
    assert min(line.num_bytes[peer_id(number)] for number in (1, 2, 3)) >= 32


@in_virtual_time
async def test_the_farthest_standing_is_taken_and_only_from_those_who_hold_it() -> None:
    line = line_to(3)
    for number in (2, 3):
        holder(line, number).commit()
    holder(line, 3).state[0] += 1.0
    line.holders[peer_id(4)] = line.holders[peer_id(2)]
    fetched = await fetch(transfer_over(line), 1, 2, 3, 4)
    assert fetched.snapshot.round == 2
    assert [source.peer_id for source in fetched.sources] == [peer_id(2), peer_id(4)]
    assert fetched.snapshot.digest == holder(line, 2).digest


@in_virtual_time
async def test_segments_that_are_here_are_not_fetched_again() -> None:
    line = line_to(2)
    transfer = transfer_over(line)
    # Two of three segments come, and then nobody answers any more.
    line.tamper = after(2, lambda donor, reply: line.broken.update(line.holders))
    with pytest.raises(PeerUnavailable, match="1 of 3 segments missing"):
        await fetch(transfer, 1, 2)
    assert sum(line.num_bytes.values()) == 128
    line.broken.clear()
    line.tamper = lambda donor, reply: None
    for holder_ in line.holders.values():
        holder_.commit()
    fetched = await fetch(transfer, 1, 2)
    assert fetched.snapshot.round == 1
    assert sum(line.num_bytes.values()) == NUM_BYTES
    assert fetched.snapshot.tensors["state"].tolist() == [index - 1.0 for index in range(SIZE)]


@pytest.mark.parametrize("fault", ["broken", "silent"])
@in_virtual_time
async def test_a_source_that_fails_gives_its_segment_back(fault: str) -> None:
    line = line_to(2)

    def fail(donor: str, reply: pb.DownloadReply) -> None:
        if reply.data and donor == peer_id(2):
            getattr(line, fault).add(donor)

    line.tamper = fail
    fetched = await fetch(transfer_over(line), 1, 2)
    assert (line.num_segments[peer_id(1)], line.num_segments[peer_id(2)]) == (3, 1)
    assert torch.equal(fetched.snapshot.tensors["state"], holder(line, 1).state)


@in_virtual_time
async def test_a_frozen_donor_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.averaging.state_transfer.GRACE_SECONDS", 0.02)
    line = line_to(2)
    line.silent.add(peer_id(1))
    transfer = transfer_over(line, silence_seconds=60.0)
    async with asyncio.timeout(5.0):
        fetched = await fetch(transfer, 1, 2)
    assert [source.peer_id for source in fetched.sources] == [peer_id(2)]


@in_virtual_time
async def test_a_donor_that_sends_wrong_bytes_is_found_out_and_not_asked_again() -> None:
    line = line_to(2)
    transfer = transfer_over(line)

    def flip(donor: str, reply: pb.DownloadReply) -> None:
        if donor == peer_id(1) and reply.data:
            reply.data = bytes([reply.data[0] ^ 1]) + reply.data[1:]

    line.tamper = flip
    fetched = await fetch(transfer, 1, 2)
    assert torch.equal(fetched.snapshot.tensors["state"], holder(line, 2).state)
    assert line.num_segments[peer_id(1)] == 1
    line.tamper = lambda donor, reply: None
    assert [source.peer_id for source in (await fetch(transfer, 1, 2)).sources] == [peer_id(2)]
    # A distrusted donor is better than none: what it sends is checked again.
    assert [source.peer_id for source in (await fetch(transfer, 1)).sources] == [peer_id(1)]


def larger(header: pb.SnapshotHeader) -> None:
    header.tensors[0].shape[0] = SIZE << 40
    header.tensors[0].num_bytes = NUM_BYTES << 40
    header.segment_bytes <<= 40


def renamed(header: pb.SnapshotHeader) -> None:
    header.tensors.append(TensorHeader(name="state", encoding="fp32", shape=[0]))


HOSTILE: dict[str, Callable[[pb.SnapshotHeader], None]] = {
    "larger": larger,
    "renamed": renamed,
    "no segments": lambda header: header.ClearField("segment_digests"),
    "segments of nothing": lambda header: header.ClearField("segment_bytes"),
    "many segments": lambda header: header.segment_digests.extend([b""] * 5),
    "no type": lambda header: header.tensors[0].ClearField("encoding"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@in_virtual_time
async def test_hostile_headers_are_refused_and_another_donor_is_taken(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = line_to(2)

    def tamper(donor: str, reply: pb.DownloadReply) -> None:
        if donor == peer_id(1) and reply.HasField("header"):
            # This is the farthest snapshot, so it would be chosen.
            reply.header.standing.run_samples += 1
            HOSTILE[kind](reply.header)

    line.tamper = tamper
    fetched = await fetch(transfer_over(line), 1, 2)
    assert [source.peer_id for source in fetched.sources] == [peer_id(2)]
    assert peer_id(1) in caplog.text
    assert line.num_segments[peer_id(1)] == 0


@pytest.mark.parametrize("change", [b"", b"more", None])
@in_virtual_time
async def test_segments_of_another_length_are_refused(change: bytes | None) -> None:
    line = line_to(2)

    def tamper(donor: str, reply: pb.DownloadReply) -> None:
        if donor == peer_id(1) and reply.data:
            reply.data = reply.data[:-4] if change is None else reply.data + change if change else b""

    line.tamper = tamper
    fetched = await fetch(transfer_over(line), 1, 2)
    assert torch.equal(fetched.snapshot.tensors["state"], holder(line, 2).state)


@pytest.mark.parametrize("number", ["round", "run_samples"])
@in_virtual_time
async def test_a_snapshot_of_a_standing_that_nobody_means_is_refused(number: str) -> None:
    line = line_to(1)
    holder(line, 1)

    def tamper(_: str, reply: pb.DownloadReply) -> None:
        setattr(reply.header.standing, number, 2**63)

    line.tamper = tamper
    with pytest.raises(PeerUnavailable, match="no peer offers"):
        await fetch(transfer_over(line), 1)
    assert not sum(line.num_segments.values())
