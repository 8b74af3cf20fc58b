"""Downloads from several donors: shared work, resumption, wrong bytes; and peers that catch up by them."""

import asyncio
import dataclasses
import hashlib
import logging
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swarm.averaging import messages
from swarm.averaging.catching_up.donor import snapshot_id
from swarm.averaging.catching_up.result_transfer import ResultTransfer
from swarm.averaging.catching_up.state_transfer import Fetched, StateTransfer
from swarm.averaging.messages import Standing, lineage_after
from swarm.averaging.transport import BEGIN
from swarm.errors import IntegrityError, MalformedMessage, Overloaded, PeerUnavailable
from swarm.machine.waits import Waits
from swarm.rpc.turns import HOLD_SECONDS, Turns
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.rpc.v1.tensor_pb2 import TensorHeader
from swarm.training.round_member import Contribution
from swarm.types import PeerRecord
from tests.averaging.doubles import QUICK, FakeStage, Network, Peer, make_config, network_of, peer_id, record, until
from tests.averaging.holder import SIZE, Holder, Line
from tests.support.virtual_time import LoopClock, in_virtual_time

pytestmark = pytest.mark.usefixtures("small_segments")

NUM_BYTES = 4 * SIZE


def line_to(num_holders: int, *, rounds: int = 1) -> Line:
    """Donors 1, 2, ... that hold the same state after some rounds."""
    line = Line({peer_id(number): Holder() for number in range(1, num_holders + 1)})
    for holder in line.holders.values():
        for _ in range(rounds):
            holder.commit()
    return line


def transfer_over(line: Line) -> StateTransfer:
    return StateTransfer(line, address=Address(), own_id=peer_id(99), silence_seconds=0.05, waits=Waits())  # type: ignore[arg-type]  # downloads only


def results_over(line: Line, own_number: int = 99) -> ResultTransfer:
    return ResultTransfer(line, address=Address(), own_id=peer_id(own_number), silence_seconds=0.05)  # type: ignore[arg-type]  # downloads only


async def fetch(transfer: StateTransfer, *numbers: int, max_bytes: int = 4 * NUM_BYTES) -> Fetched:
    donors = [record(number) for number in numbers]
    return await transfer.snapshot(donors, max_bytes=max_bytes, wanted=lambda standing: standing.round > 0)


def holder(line: Line, number: int) -> Holder:
    return line.holders[peer_id(number)]


def after(num_messages: int, act: Callable[[str, pb.DownloadReply], None]) -> Callable[[str, pb.DownloadReply], None]:
    """Act on all pieces but the first few."""
    num_seen = 0

    def tamper(donor: str, reply: pb.DownloadReply) -> None:
        nonlocal num_seen
        num_seen += bool(reply.data)
        if num_seen > num_messages:
            act(donor, reply)

    return tamper


def queueing_line(num_holders: int) -> tuple[Line, Turns]:
    """Donors that hold the same state, of which the first serves one after the other."""
    clock = LoopClock()
    turns = Turns(clock, is_training=lambda: False)
    line = Line({peer_id(n): Holder(clock, turns if n == 1 else None) for n in range(1, num_holders + 1)})
    for each in line.holders.values():
        each.commit()
    return line, turns


@in_virtual_time
async def test_those_who_find_a_donor_serving_another_wait_their_turn_and_all_get_the_state() -> None:
    line, _ = queueing_line(1)
    waits = Waits()
    transfers = [
        StateTransfer(line, address=Address(stage=2), own_id=peer_id(90 + n), silence_seconds=15.0, waits=waits)  # type: ignore[arg-type]  # downloads only
        for n in range(4)
    ]
    fetching = asyncio.gather(*(fetch(transfer, 1) for transfer in transfers))
    for _ in range(2):
        waits.look(asyncio.get_running_loop().time())
        await asyncio.sleep(1.5)
    waits.look(asyncio.get_running_loop().time())
    assert waits.present.startswith("the state of stage 2: 0.0 of 0.0 MB from 00000000 (")
    assert "download first), 0.00 MB/s" in waits.present
    all_fetched = await fetching
    assert {fetched.snapshot.digest for fetched in all_fetched} == {holder(line, 1).digest}
    # The time in which donors served others says nothing of their lines.
    assert asyncio.get_running_loop().time() > 5.0
    assert max(fetched.seconds for fetched in all_fetched) < 1.0


@in_virtual_time
async def test_what_a_donor_keeps_one_waiting_for_another_one_sends() -> None:
    line, turns = queueing_line(2)
    transfer = StateTransfer(line, address=Address(), own_id=peer_id(90), silence_seconds=15.0, waits=Waits())  # type: ignore[arg-type]  # downloads only
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
    transfer = StateTransfer(line, address=Address(), own_id=peer_id(90), silence_seconds=15.0, waits=Waits())  # type: ignore[arg-type]  # downloads only
    others = list[int]()

    async def fetching() -> Fetched:
        return await transfer.snapshot(
            [record(1)], max_bytes=4 * NUM_BYTES, wanted=lambda standing: True, has_others=lambda: bool(others)
        )

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
async def test_one_that_waits_and_has_the_half_of_it_already_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.averaging.catching_up.donor.SEGMENT_BYTES", 16)
    line, _ = queueing_line(1)
    transfer = StateTransfer(line, address=Address(), own_id=peer_id(90), silence_seconds=15.0, waits=Waits())  # type: ignore[arg-type]  # downloads only
    num_pieces = 0

    def busy_from_the_sixth_on(donor: str, reply: pb.DownloadReply) -> None:
        nonlocal num_pieces
        num_pieces += bool(reply.data)
        if num_pieces == 6:
            raise Overloaded("another downloads first", retry_after_seconds=1.0)

    line.tamper = busy_from_the_sixth_on
    fetched = await transfer.snapshot(
        [record(1)], max_bytes=4 * NUM_BYTES, wanted=lambda standing: True, has_others=lambda: num_pieces > 1
    )
    assert fetched.snapshot.digest == holder(line, 1).digest
    assert (num_pieces, line.num_bytes[peer_id(1)]) == (11, NUM_BYTES)


@in_virtual_time
async def test_later_rounds_are_given_to_one_after_the_other_whoever_fetches_a_snapshot() -> None:
    line, turns = queueing_line(1)
    donor = holder(line, 1)
    await donor.offer()
    begun = donor.standing
    expected = [donor.commit().after for _ in range(3)]
    first, early, late = (results_over(line, n).after(record(1), begun, max_bytes=NUM_BYTES) for n in (90, 91, 91))
    async with turns.turn("another"):
        assert (await anext(first))[0].after == expected[0]
        with pytest.raises(Overloaded, match="1 other downloads first"):
            await anext(early)
        assert [c.after async for c, _ in first] == expected[1:]
        await asyncio.sleep(HOLD_SECONDS)
        assert [c.after async for c, _ in late] == expected


# -- snapshots -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_sources_with_the_same_bits_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    line = line_to(3)
    monkeypatch.setattr("swarm.averaging.catching_up.donor.SEGMENT_BYTES", 16)
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
    monkeypatch.setattr("swarm.averaging.catching_up.state_transfer.GRACE_SECONDS", 0.02)
    line = line_to(2)
    line.silent.add(peer_id(1))
    transfer = StateTransfer(line, address=Address(), own_id=peer_id(99), silence_seconds=60.0, waits=Waits())  # type: ignore[arg-type]  # downloads only
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


@in_virtual_time
async def test_nobody_who_is_ahead() -> None:
    line = line_to(2, rounds=0)
    with pytest.raises(PeerUnavailable, match="no peer offers"):
        await fetch(transfer_over(line), 1, 2)
    with pytest.raises(PeerUnavailable, match="no peer offers"):
        await fetch(transfer_over(line))


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


# -- results ---------------------------------------------------------------------------------------------------------


async def replayed(line: Line, donor: PeerRecord, standing: Standing, *, max_bytes: int = NUM_BYTES) -> list[Standing]:
    stream = results_over(line).after(donor, standing, max_bytes=max_bytes)
    return [committed.after async for committed, _ in stream]


@in_virtual_time
async def test_results_are_rebuilt_as_they_were() -> None:
    line = line_to(1)
    donor = holder(line, 1)
    await donor.offer()
    begun = donor.standing
    expected = [donor.commit(0.25 * number) for number in range(3)]
    results = [committed async for committed, _ in results_over(line).after(record(1), begun, max_bytes=NUM_BYTES)]
    assert [r.after for r in results] == [e.after for e in expected]
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours.result.tensors["state"], theirs.result.tensors["state"])
        assert (await ours.state_digest, ours.outcome) == (await theirs.state_digest, theirs.outcome)
        for name in ("round", "num_samples", "squared_norm", "total_squared_norm", "members", "lineage", "digest"):
            assert getattr(ours.result, name) == getattr(theirs.result, name)


def another_past(reply: pb.DownloadReply) -> None:
    reply.result.outcome.prepared.member_ids.append("more")


def too_far(reply: pb.DownloadReply) -> None:
    reply.result.standing.round += 1


def flipped(reply: pb.DownloadReply) -> None:
    if reply.data:
        reply.data = b"\1" + reply.data[1:]


def huge(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        reply.result.tensors[0].shape[0] <<= 50
        reply.result.tensors[0].num_bytes <<= 50


def clipped_by_less(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        outcome = reply.result.outcome
        outcome.total_squared_norm = -1.0
        reply.result.standing.lineage = lineage_after("00", outcome)


def clipped_by_nan(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        outcome = reply.result.outcome
        outcome.total_squared_norm = float("nan")
        reply.result.standing.lineage = lineage_after("00", outcome)


def out_of_order(reply: pb.DownloadReply) -> None:
    if reply.HasField("result"):
        reply.data = b"early"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (another_past, MalformedMessage), (too_far, MalformedMessage), (huge, MalformedMessage),
        (clipped_by_less, MalformedMessage), (clipped_by_nan, MalformedMessage),
        (out_of_order, MalformedMessage), (flipped, IntegrityError),
    ],
)  # fmt: skip
@in_virtual_time
async def test_wrong_results_are_refused(change: Callable[[pb.DownloadReply], None], error: type[Exception]) -> None:
    line = line_to(1)
    donor = holder(line, 1)
    await donor.offer()
    begun = donor.standing
    donor.commit()

    def tamper(_: str, reply: pb.DownloadReply) -> None:
        if reply.WhichOneof("message") == "result" or change is flipped:
            change(reply)

    line.tamper = tamper
    with pytest.raises(error):
        await replayed(line, record(1), begun)


# -- whole peers -----------------------------------------------------------------------------------------------------


class Group:
    """A DiLoCo stage of some peers, which a newcomer with the lowest id joins."""

    def __init__(self, network: Network, *numbers: int) -> None:
        self.network = network
        self.peers = [network.peers[peer_id(number)] for number in numbers]
        self.stages = [peer.stage for peer in self.peers]
        self.next_index = 0

    async def commit(self) -> None:
        """Commit one more round, in which every living peer has learnt something."""
        alive = [peer.stage for peer in self.peers if not peer.dead.is_set()]
        number = max(stage.round for stage in alive)
        for stage in alive:
            stage.learn(self.next_index)
            self.next_index += 1
        await until(lambda: all(stage.round > number for stage in alive))

    def add_joiner(self) -> Peer:
        """Add a newcomer, which waits for donors that a script holds up."""
        self.network.timing = dataclasses.replace(QUICK, silence_seconds=5.0)
        return self.network.add(1)

    async def admit(self, joiner: Peer) -> None:
        """Commit a round with the newcomer, and check that all peers see that it leads now."""
        self.peers.insert(0, joiner)
        self.stages.insert(0, joiner.stage)
        await until(lambda: all(peer.averager.view().leader_id == joiner.record.peer_id for peer in self.peers))
        await until(lambda: len(joiner.averager.view().progress) == len(self.peers))

    @property
    def digests(self) -> set[str]:
        return {peer.stage.digest for peer in self.network.peers.values() if not peer.dead.is_set()}


@asynccontextmanager
async def group_of(*numbers: int, segment_bytes: int = 16) -> AsyncIterator[Group]:
    config = make_config("diloco", microbatches=len(numbers))
    with patch("swarm.averaging.catching_up.donor.SEGMENT_BYTES", segment_bytes):
        async with network_of(config, *numbers) as network:
            group = Group(network, *numbers)
            await group.commit()
            yield group


def is_download(name: str, source: int) -> bool:
    return name == "Download" and source == 1


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
async def test_who_replays_slower_than_rounds_pass_takes_a_new_snapshot_and_says_that_it_never_arrives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A result takes three seconds over its line, and a round half a second. It arrives once the run pauses."""
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
        assert len(joiner.stage.results) <= 4 * joiner.stage.num_installs, "it does not replay what it will never end"
        assert group.stages[0].round - joiner.stage.round < 40
        assert not joiner.averager.view().progress.keys() - {joiner.record.peer_id}
        lines = [line for line in caplog.messages if "never arrive" in line]
        assert len(lines) >= 2
        assert "takes 3.0 s to fetch and replay a round" in lines[0]
        assert "the group commits one every 0.5 s" in lines[0]
        assert "a faster line or machine, here or where it fetches them, or longer rounds" in lines[0]
        await joining
        await until(lambda: joiner.stage.round == 70, seconds=600.0)
        assert group.digests == {group.stages[0].digest}


@in_virtual_time
async def test_who_replays_faster_than_rounds_pass_says_when_it_arrives(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with group_of(2, 3) as group:
        num_pieces = 0

        async def slow(name: str, source: int, target: int) -> None:
            nonlocal num_pieces
            if is_download(name, source):
                num_pieces += 1
                await asyncio.sleep(4.0 if num_pieces <= 7 else 0.5)

        async def go_on() -> None:
            while joiner.stage.round < group.stages[0].round or not joiner.stage.results:
                await group.commit()
                await asyncio.sleep(1.5)

        group.network.before = slow
        joiner = group.add_joiner()
        joining = asyncio.create_task(joiner.averager.join())
        await go_on()
        await joining
        assert joiner.stage.num_installs == 1
        assert [line for line in caplog.messages if "rounds behind" in line and "there in about" in line]
        assert "never" not in caplog.text


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

        async def close(self: FakeStage, round_number: int, *, drop: Collection[int]) -> Contribution:
            vector = self.anchor - weights
            return Contribution(
                tensors={"b": vector[:5], "a": vector[5:].reshape(3, 4)}, num_samples=2, num_targets=2, round_samples=2,
                committed=frozenset(self.indices),
            )  # fmt: skip

        monkeypatch.setattr(FakeStage, "close", close)
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
async def test_a_source_with_wrong_results_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async with group_of(2, 3) as group:
        liars: set[int] = set()

        def lie(target: int, reply: pb.DownloadReply) -> None:
            if reply.HasField("result"):
                liars.add(target)
                if liars == {target}:
                    reply.result.sha256 = bytes(32)

        async def busy(name: str, source: int, target: int) -> None:
            if is_download(name, source) and group.stages[0].round < 3:
                await group.commit()

        group.network.tamper, group.network.before = lie, busy
        joiner = group.add_joiner()
        await joiner.averager.join()
        assert joiner.stage.digest == group.stages[0].digest
        assert len(liars) == 2
        assert joiner.stage.num_installs == 1


@in_virtual_time
async def test_a_replayed_round_that_gives_another_state_is_undone_by_a_download() -> None:
    """Until the download the peer reports nothing and takes part in nothing, so no other averages with it."""
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
    """The result's digest and lineage fit, as they do in what a liar makes up."""
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
