"""What a donor keeps, for how long it keeps it, and what it answers."""

import asyncio
import hashlib
from typing import Any

import pytest

from swarm.averaging.agreement.messages import Standing
from swarm.averaging.donor import snapshot_id
from swarm.averaging.vectors.snapshots import TensorBytes
from swarm.errors import MalformedMessage, NotReady
from swarm.rpc.transfers import YIELD_LOOK_SECONDS, YIELD_SECONDS
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Snapshot
from tests.averaging.holder import SIZE, Holder

pytestmark = pytest.mark.usefixtures("small_segments")


async def test_all_who_ask_in_a_round_get_one_snapshot_and_it_outlives_the_round() -> None:
    holder = Holder()
    headers = await asyncio.gather(*(holder.offer() for _ in range(5)))
    assert holder.num_copies == 1
    assert len({snapshot_id(header) for header in headers}) == 1
    before = holder.state.numpy().tobytes()
    for _ in range(3):
        holder.commit()
    assert b"".join([await holder.segment(headers[0], index) for index in range(3)]) == before
    with pytest.raises(MalformedMessage, match="no segment 3"):
        await holder.segment(headers[0], 3)
    assert snapshot_id(await holder.offer(snapshot_id(headers[0]))) == snapshot_id(headers[0])
    assert (await holder.offer()).standing.round == 3


async def _pass_time(holder: Holder, seconds: float) -> None:
    for _ in range(round(seconds / YIELD_LOOK_SECONDS)):
        holder.clock.advance(YIELD_LOOK_SECONDS)
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("what", ["segment", "results"])
async def test_an_exchange_has_the_line_first_and_keeps_nobody_waiting_for_good(what: str) -> None:
    holder = Holder()
    header, begins_at = await holder.offer(), holder.standing
    holder.commit()

    def fetch() -> "asyncio.Future[Any]":
        return asyncio.ensure_future(holder.segment(header, 0) if what == "segment" else holder.results(begins_at))

    holder.exchange()
    fetching = fetch()
    await asyncio.sleep(0.01)
    await _pass_time(holder, YIELD_SECONDS - 2 * YIELD_LOOK_SECONDS)
    assert not fetching.done()
    await _pass_time(holder, 4 * YIELD_LOOK_SECONDS)
    assert await fetching
    fetching = fetch()
    await asyncio.sleep(0.01)
    await _pass_time(holder, YIELD_SECONDS / 2)
    assert not fetching.done()
    holder.place.group.step_back()
    await _pass_time(holder, 2 * YIELD_LOOK_SECONDS)
    assert await fetching


async def test_a_lease_lasts_as_long_as_somebody_asks_and_then_memory_is_free() -> None:
    holder = Holder()
    header = await holder.offer()
    for _ in range(4):
        holder.clock.advance(25.0)
        await holder.segment(header, 0)
        holder.commit()
    assert holder.donor.num_bytes == 5 * 4 * SIZE
    holder.clock.advance(31.0)
    holder.donor.expire()
    assert holder.donor.num_bytes == 0
    with pytest.raises(NotReady):
        await holder.segment(header, 0)
    holder.commit()
    assert holder.donor.num_bytes == 0


async def test_the_last_result_of_members_in_groups_is_kept_for_a_while_though_nobody_asked() -> None:
    holder = Holder()
    for _ in range(2):
        begins_at = holder.standing
        holder.commit(in_groups=True)
        assert len(await holder.results(begins_at)) > 1
        assert holder.donor.num_bytes == 4 * SIZE, "the one before is dropped"
    holder.clock.advance(31.0)
    with pytest.raises(NotReady):
        await holder.results(begins_at)
    assert holder.donor.num_bytes == 0


async def test_a_snapshot_that_takes_longer_to_digest_than_a_lease_lasts_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = Holder()
    digest = TensorBytes.sha256

    def slowly(content: TensorBytes, start: int, stop: int) -> bytes:
        holder.clock.advance(31.0)
        holder.donor.expire()
        return digest(content, start, stop)

    monkeypatch.setattr(TensorBytes, "sha256", slowly)
    header = await holder.offer()
    await holder.segment(header, 0)
    holder.clock.advance(31.0)
    holder.donor.expire()
    assert holder.donor.num_bytes == 0


async def test_pins_are_few_and_those_in_use_stay() -> None:
    holder = Holder()
    first = await holder.offer()
    await holder.segment(first, 0)
    holder.commit()
    unused = await holder.offer()
    holder.commit()
    third = await holder.offer()
    assert (unused.standing.round, third.standing.round) == (1, 2)
    with pytest.raises(NotReady):
        await holder.segment(unused, 0)
    await holder.segment(third, 0)
    holder.commit()
    # Both snapshots are being fetched. The next peer that asks gets the newer one, and the results since then.
    assert (await holder.offer()).standing.round == 2
    assert holder.num_copies == 3


async def test_results_come_in_order_from_the_pinned_round_on() -> None:
    holder = Holder()
    holder.commit()
    await holder.offer()
    standing = holder.standing
    committed = [holder.commit(0.5 * number) for number in range(3)]
    replies = await holder.results(standing)
    assert [reply.WhichOneof("message") for reply in replies] == ["result", "data"] * 3
    for reply, data, expected in zip(replies[::2], replies[1::2], committed, strict=True):
        assert reply.result.outcome == expected.outcome
        assert reply.result.state_digest == await expected.state_digest
        assert data.data == expected.result.tensors["state"].numpy().tobytes()
        assert reply.result.sha256 == hashlib.sha256(data.data).digest()
    assert await holder.results(holder.standing) == []
    with pytest.raises(NotReady, match="round 0"):
        await holder.results(Standing(run_samples=0, round=0, lineage="00"))
    with pytest.raises(NotReady):
        await holder.results(Standing(run_samples=10, round=1, lineage="another"))


async def test_results_are_bounded_and_the_snapshot_goes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.averaging.donor.RESULTS_BYTES", 0)
    holder = Holder()
    header = await holder.offer()
    begun = holder.standing
    for _ in range(4):
        holder.commit()
    assert await holder.segment(header, 0)
    holder.commit()
    assert holder.donor.num_bytes == 0
    with pytest.raises(NotReady):
        await holder.segment(header, 0)
    with pytest.raises(NotReady):
        await holder.results(begun)


async def test_a_peer_that_is_about_to_move_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    snapshot = await holder.snapshot()
    holder.commit()

    async def stale() -> Snapshot:
        return snapshot

    monkeypatch.setattr(holder, "snapshot", stale)
    with pytest.raises(NotReady, match="about to move"):
        await holder.offer()
    assert holder.donor.num_bytes == 0


async def test_a_request_for_nothing_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        await Holder().ask(pb.DownloadRequest())
