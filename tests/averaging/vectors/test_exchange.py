"""What error feedback keeps from one exchange to the next, for each way to exchange and any set of members."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares, divide
from swarm.averaging.vectors.allreduce import HandOut
from swarm.averaging.vectors.exchange import Closed, Exchanges
from swarm.averaging.vectors.terms import Average
from swarm.compression.buffers import TILE
from swarm.config import AveragingConfig
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Contribution
from tests.averaging.hall import Door, Hall

SIZE = 5
GATHER_MEMBERS = 2
NUM_ELEMENTS = 4 * TILE + 17


class Members:
    """The state of all members between exchanges. It returns their residuals of a fragment as dense vectors."""

    def __init__(self, codec: str, decay: float = 1.0, size: int = SIZE) -> None:
        config = AveragingConfig(codec=codec, feedback_decay=decay, gather_members=GATHER_MEMBERS)  # type: ignore[arg-type]  # names of codecs
        self.all = {str(number): Exchanges(config, str(number)) for number in range(size)}

    def own_debt(self, name: str, fragment: int = 0) -> torch.Tensor:
        """What encoding dropped from a member's contributions."""
        feedback = self.all[name].feedback.get(fragment)
        zeros = torch.zeros(NUM_ELEMENTS)
        return (feedback.compensate(zeros) if feedback else zeros).double()

    def sum_debt(self, name: str, fragment: int = 0) -> torch.Tensor:
        """What encoding dropped from the sums that a member made."""
        feedback = self.all[name].feedback.get(fragment)
        owed = feedback.owed(slice(0, NUM_ELEMENTS)) if feedback else None
        return (torch.zeros(NUM_ELEMENTS) if owed is None else owed).double()

    def debts(self, fragment: int) -> list[torch.Tensor]:
        """All that the members owe."""
        return [debt(name, fragment) for name in self.all for debt in (self.own_debt, self.sum_debt)]

    async def exchange(
        self, contributions: Mapping[str, Contribution], *, bandwidths: Sequence[float] = (1e6,) * SIZE,
        owners: Collection[str] | None = None, clip_to_median: float = 0.0,
    ) -> tuple[Shares, dict[str, Average]]:  # fmt: skip
        """Make one attempt, up to the point where it may be committed."""
        closed = {name: await self.all[name].flatten(brought) for name, brought in contributions.items()}
        shares = divide(
            {name: _reply(closed[name], bandwidths[int(name)]) for name in sorted(contributions)},
            num_elements=NUM_ELEMENTS, tile=TILE, clip_to_median=clip_to_median, owners=owners,
        )  # fmt: skip
        sides = {name: self.all[name].open(closed[name], shares) for name in contributions}
        hall = Hall(sides)
        found = await asyncio.gather(
            *(self.all[n].run(closed[n], shares, sides[n], Door(hall, n), 5.0) for n in contributions)
        )
        averages = dict(zip(contributions, (average for average, _ in found), strict=True))
        assert len({average.digest for average in averages.values()}) == 1
        return shares, averages

    def commit(self, averages: Mapping[str, Average], fragment: int = 0) -> None:
        """Commit that attempt."""
        for name, average in averages.items():
            self.all[name].committed(fragment, average.residual)


def _reply(closed: Closed, bandwidth: float) -> pb.BeginReply:
    count = closed.contribution.num_samples
    return pb.BeginReply(
        num_samples=count, num_targets=count, round_samples=count, norm=closed.norm, bytes_per_second=bandwidth
    )


def _contribution(seed: int, num_samples: int, *, fragment: int = 0, scale: float = 1.0) -> Contribution:
    values = scale * torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed))
    return Contribution(
        tensors={"a": values}, num_samples=num_samples, num_targets=num_samples, round_samples=num_samples,
        committed=frozenset(), fragment=fragment,
    )  # fmt: skip


def _vector(contribution: Contribution) -> torch.Tensor:
    return contribution.tensors["a"].double()


@dataclass(frozen=True)
class Attempt:
    """One attempt of any kind: members with their samples (None: not there), and how they exchange."""

    samples: tuple[int | None, ...]
    bandwidths: tuple[float, ...]
    through_one: bool
    is_committed: bool
    fragment: int


_ATTEMPTS = st.builds(
    Attempt,
    samples=st.tuples(*[st.sampled_from([None, 0, 1, 2, 40])] * SIZE).filter(any),
    bandwidths=st.tuples(*[st.sampled_from([1e6, 3e6])] * SIZE),
    through_one=st.booleans(), is_committed=st.sampled_from([True, True, False]), fragment=st.sampled_from([0, 0, 1]),
)  # fmt: skip


@settings(max_examples=10)
@given(st.sampled_from(["topk", "dct-topk", "int4", "dct-lowpass"]), st.lists(_ATTEMPTS, min_size=2, max_size=6))
def test_what_is_contributed_is_applied_or_still_owed(codec: str, attempts: list[Attempt]) -> None:
    """This holds for any members, weights, parts and ways to exchange. A member's own residual counts with the weight
    of its contribution."""

    async def run() -> None:
        members = Members(codec)
        for number, attempt in enumerate(attempts):
            await _one(members, attempt, seed=SIZE * number)

    asyncio.run(run())


async def _one(members: Members, attempt: Attempt, seed: int) -> None:
    present = {str(i): count for i, count in enumerate(attempt.samples) if count is not None}
    brought = {
        name: _contribution(seed + int(name), count, fragment=attempt.fragment, scale=1.0 + int(name))
        for name, count in present.items()
    }
    before, elsewhere = members.debts(attempt.fragment), members.debts(1 - attempt.fragment)
    own_before = {name: members.own_debt(name, attempt.fragment) for name in present}
    expected = sum((members.sum_debt(name, attempt.fragment) for name in present), torch.zeros(()))
    shares, averages = await members.exchange(
        brought, bandwidths=attempt.bandwidths, clip_to_median=1.5,
        owners={min(present)} if attempt.through_one else None,
    )  # fmt: skip
    assert _same(members.debts(attempt.fragment), before), "only a commit changes anything"
    if not attempt.is_committed:
        return
    members.commit(averages, attempt.fragment)
    assert _same(members.debts(1 - attempt.fragment), elsewhere)
    found = next(iter(averages.values())).vector_D.double()
    found += sum((members.sum_debt(name, attempt.fragment) for name in present), torch.zeros(()))
    for share in shares.senders:
        expected = expected + share.weight * (_vector(brought[share.peer_id]) + own_before[share.peer_id])
        found += share.weight * members.own_debt(share.peer_id, attempt.fragment)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    for name, own_debt in own_before.items():
        if not present[name]:
            assert torch.equal(members.own_debt(name, attempt.fragment), own_debt)
    absent = [i for i in range(SIZE) if str(i) not in present]
    after = members.debts(attempt.fragment)
    assert _same(
        [after[2 * i + j] for i in absent for j in (0, 1)], [before[2 * i + j] for i in absent for j in (0, 1)]
    )


def _same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("second_samples", [0, 2])
@pytest.mark.parametrize("codec", ["topk", "dct-topk"])
async def test_what_a_lone_member_owes_is_paid_once_a_second_one_is_there(codec: str, second_samples: int) -> None:
    """The exchange changes from a butterfly to a gather. What the member had learnt alone is added completely, and
    once."""
    members = Members(codec)
    alone = _contribution(0, 2)
    _, averages = await members.exchange({"0": alone})
    members.commit(averages)
    applied = averages["0"].vector_D.double()
    owed = float(members.sum_debt("0").norm())
    assert owed > 0.3 * float(_vector(alone).norm())
    nothing = {"0": _contribution(1, 2, scale=0.0), "1": _contribution(1, second_samples, scale=0.0)}
    for _ in range(40):
        shares, averages = await members.exchange(nothing)
        assert isinstance(members.all["0"].open(await members.all["0"].flatten(nothing["0"]), shares), HandOut)
        members.commit(averages)
        applied += averages["0"].vector_D.double()
        torch.testing.assert_close(applied + members.sum_debt("0"), _vector(alone), rtol=0, atol=2e-5)
    assert float(members.sum_debt("0").norm()) < 0.3 * owed


@pytest.mark.parametrize("codec", ["topk", "dct-topk"])
async def test_members_that_come_and_go_do_not_make_more_of_what_is_owed(codec: str) -> None:
    """The residual of a sum counts the same at every weight, however often the weights change."""
    members = Members(codec)
    alone = _contribution(0, 2)
    _, averages = await members.exchange({"0": alone})
    members.commit(averages)
    applied, owed = averages["0"].vector_D.double(), float(members.sum_debt("0").norm())
    for number in range(12):
        others = {str(i): _contribution(1, 2, scale=0.0) for i in range(1, (1, 2, 5)[number % 3])}
        _, averages = await members.exchange({"0": _contribution(1, 2, scale=0.0), **others})
        members.commit(averages)
        applied += averages["0"].vector_D.double()
        still = sum((members.sum_debt(name) for name in members.all), torch.zeros(()))
        torch.testing.assert_close(applied + still, _vector(alone), rtol=0, atol=2e-5)
        assert float(still.norm()) < owed
        owed = float(still.norm())
    assert not any(members.own_debt(name).any() for name in members.all)


async def test_what_is_owed_decays_once_a_round_whichever_way_it_is_paid() -> None:
    members = Members("topk", decay=0.5)
    _, averages = await members.exchange({"0": _contribution(0, 2)})
    members.commit(averages)
    owed = 2 * members.sum_debt("0")  # This is the residual before its decay; `sum_debt` returns it after the decay.
    nothing = {name: _contribution(1, 2, scale=0.0) for name in ("0", "1")}
    _, averages = await members.exchange(nothing)
    members.commit(averages)
    found = averages["0"].vector_D.double() + 2 * members.sum_debt("0")
    torch.testing.assert_close(found, 0.5 * owed, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_samples", [0, 1])
async def test_who_counts_for_next_to_nothing_goes_on_owing(num_samples: int) -> None:
    members = Members("topk", decay=0.5)
    _, averages = await members.exchange({"0": _contribution(0, 2)})
    members.commit(averages)
    owed = members.sum_debt("0")
    brought = {"0": _contribution(1, num_samples, scale=0.0), "1": _contribution(1, 999, scale=0.0)}
    _, averages = await members.exchange(brought)
    members.commit(averages)
    assert torch.equal(members.sum_debt("0"), owed)
    assert not averages["0"].vector_D.any()


async def test_what_is_given_up_early_is_told_to_those_who_wait() -> None:
    members = Members("topk")
    brought = {name: _contribution(1, 2) for name in ("0", "1")}
    closed = await members.all["0"].flatten(brought["0"])
    shares, _ = await members.exchange(brought)
    side = members.all["0"].open(closed, shares)
    task = asyncio.ensure_future(members.all["0"].run(closed, shares, side, Door(Hall({}), "0"), 5.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(MemberFailed, match="given up"):
        await side.result()


async def test_another_state_owes_nothing() -> None:
    members = Members("topk")
    _, averages = await members.exchange({"0": _contribution(0, 2)})
    members.commit(averages)
    assert members.all["0"].residual_bytes > 0
    members.all["0"].reset()
    assert members.all["0"].residual_bytes == 0
    brought: dict[str, Any] = {name: _contribution(1, 1, scale=0.0) for name in ("0", "1")}
    _, averages = await members.exchange(brought)
    assert not averages["0"].vector_D.any()


async def test_a_member_that_lost_what_an_exchange_left_starts_without() -> None:
    """Only that fragment's residual is gone. The closed contribution is made anew."""
    members = Members("topk")
    for fragment in (0, 1):
        _, averages = await members.exchange({"0": _contribution(fragment, 2, fragment=fragment)})
        members.commit(averages, fragment)
    closed = await members.all["0"].flatten(brought := _contribution(2, 2))
    members.all["0"].forget(0)
    assert not any(debt.any() for debt in members.debts(0))
    assert any(debt.any() for debt in members.debts(1))
    assert await members.all["0"].flatten(brought) is not closed
