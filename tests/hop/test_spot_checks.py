"""What a sender makes of the verdicts on answers that it has checked, where peers' weights drift apart."""

import asyncio
import contextlib
import random
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.honesty.drift import FIRST_ROUND
from swarm.hop import spot_checks
from swarm.hop.answers import HopReply
from swarm.hop.spot_checks import LEAST_ANSWERS, SpotChecks
from swarm.machine.clock import SystemClock
from swarm.routing.router import Router
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import GRADIENT
from swarm.training.samples import Microbatch
from swarm.training.sketches import LONGEST_STATEMENT
from swarm.types import Block, PeerId, PeerRecord, PeerState
from tests.support.virtual_time import in_virtual_time

BLOCK = Block(1)
CHECKED = PeerId("0" * 40)
RIGHT, WRONG = pb.SpotCheckReply.VERDICT_AGREES, pb.SpotCheckReply.VERDICT_DIFFERS
UNSHOWN = pb.SpotCheckReply.VERDICT_NOT_SHOWN


def _record(number: int) -> PeerRecord:
    return PeerRecord(
        peer_id=f"{number:040x}", stage=1, announced_at=0.0, state=PeerState.SERVING, endpoint="127.0.0.1:1"
    )


async def _checked(
    verdicts: Sequence[Any], *, num_peers: int = 4, share: float = 1.0, drawn: Sequence[float] = (),
    anchored: Collection[int] = (), round_number: int = FIRST_ROUND, norms: Mapping[int, float] = MappingProxyType({}),
) -> tuple[bool, list[int]]:  # fmt: skip
    """Let answers of one peer be checked one after the other, each with the same verdict of all, or with that of each.
    `drawn` are the random numbers that say which ones, `anchored` has those that were computed with an anchor, and
    `norms` those of gradients that are not 1. Returns whether the peer is left alone in the end, and the microbatches
    of the checks that were asked for."""
    router, asked, numbers = Router(SystemClock(), random.Random(0)), list[int](), iter(drawn)
    router.update(BLOCK, [_record(number) for number in range(num_peers)])

    async def verdict(request: pb.SpotCheckRequest) -> pb.SpotCheckReply:
        asked.append(request.microbatch)
        is_proof, verdict = request.microbatch in anchored, verdicts[request.microbatch]
        if isinstance(verdict, tuple):
            verdict = verdict[asked.count(request.microbatch) - 1]
        return pb.SpotCheckReply(verdict=verdict, is_proof=is_proof)

    rng: Any = SimpleNamespace(random=lambda: next(numbers, 0.0), sample=lambda others, number: others[:number])
    checks = SpotChecks(
        run_id="", block=BLOCK, share=share, router=router, drifts=True, rng=rng,
        encodings_in=lambda _: {GRADIENT: "fp32"},
        stub=lambda record: SimpleNamespace(SpotCheck=verdict),
    )  # fmt: skip
    running = asyncio.create_task(checks.run())
    call: Any = None
    for index in range(len(verdicts)):
        tensors = {GRADIENT: torch.full((4,), norms.get(index, 1.0) / 2)}
        reply = HopReply(loss=1.0, tensors=tensors, route={BLOCK: CHECKED}, num_reroutes=0, num_busy=0, _call=call)
        reply.anchor_round = round_number if index in anchored else None
        checks.acknowledged(
            Microbatch(index=index, round=round_number, num_samples=1), {"tokens": torch.zeros(1)}, reply, None
        )
        await asyncio.sleep(1.0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return CHECKED in router.banned(BLOCK), asked


@in_virtual_time
async def test_with_diloco_several_answers_have_to_be_found_wrong() -> None:
    assert await _checked([WRONG] * (LEAST_ANSWERS - 1)) == (False, [0, 0, 0, 1, 1, 1])
    is_left_alone, _ = await _checked([WRONG] * LEAST_ANSWERS)
    assert is_left_alone


@in_virtual_time
async def test_an_answer_that_is_found_right_takes_one_back() -> None:
    assert not (await _checked([WRONG, WRONG, RIGHT, WRONG]))[0]
    assert (await _checked([WRONG, WRONG, RIGHT, WRONG, WRONG]))[0]


@in_virtual_time
async def test_after_a_wrong_answer_the_next_one_is_checked() -> None:
    drawn = (0.0, 0.0, 0.5)
    assert (await _checked([RIGHT, RIGHT, RIGHT], share=0.1, drawn=drawn))[1] == [0, 1]
    assert (await _checked([RIGHT, WRONG, RIGHT], share=0.1, drawn=drawn))[1] == [0, 1, 1, 1, 2]


@in_virtual_time
async def test_of_answers_from_the_anchor_one_is_enough_in_any_round_and_among_three() -> None:
    assert await _checked([WRONG], anchored=[0], num_peers=3, round_number=0) == (True, [0, 0])
    assert await _checked([WRONG], num_peers=3, round_number=0) == (False, [])
    assert await _checked([WRONG], round_number=0) == (False, [])


@in_virtual_time
async def test_an_answer_from_the_anchor_stands_for_those_since_the_last_one() -> None:
    # The first ones are checked more often, of either kind.
    drawn = (0.0, 0.12, 1.0, 1.0, 1.0, 0.35, 0.2)
    assert (await _checked([RIGHT] * 7, share=0.1, drawn=drawn, anchored=[0, 1, 5, 6]))[1] == [0, 1, 5]
    # Others are checked half as often for a while.
    drawn = (0.0, 0.0, 0.0, 0.0, 0.12, 0.12, 0.12)
    assert (await _checked([RIGHT] * 7, share=0.2, drawn=drawn, anchored=[3]))[1] == [0, 1, 2, 3, 6]


@in_virtual_time
async def test_where_nobody_could_know_what_is_usual_nobody_is_asked() -> None:
    assert await _checked([WRONG] * LEAST_ANSWERS, num_peers=3) == (False, [])


@in_virtual_time
async def test_an_answer_with_a_gradient_much_longer_than_others_is_checked_always() -> None:
    drawn = [0.0] + [1.0] * 24
    assert (await _checked([RIGHT] * 25, share=0.1, drawn=drawn, norms={20: 4.0, 22: 6.0}))[1] == [0, 22]
    # Of a few nobody knows what is usual.
    assert (await _checked([RIGHT] * 9, share=0.1, drawn=drawn, norms={8: 6.0}))[1] == [0]


@in_virtual_time
async def test_a_peer_that_shows_most_others_nothing_is_left_alone_after_two_checks() -> None:
    assert await _checked([UNSHOWN]) == (False, [0, 0, 0])
    assert await _checked([UNSHOWN, UNSHOWN]) == (True, [0, 0, 0, 1, 1, 1])
    # Right answers make one forgotten.
    assert not (await _checked([UNSHOWN, *[RIGHT] * 16, UNSHOWN]))[0]


@in_virtual_time
async def test_two_that_say_they_are_shown_nothing_are_outvoted() -> None:
    verdicts = (UNSHOWN, UNSHOWN, RIGHT, RIGHT, RIGHT)
    assert await _checked([verdicts] * 4, num_peers=6) == (False, [number for number in range(4) for _ in range(5)])


async def test_a_statement_that_is_none_keeps_no_other_from_being_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot_checks, "GATHER_SECONDS", 0.01)
    router, passed = Router(SystemClock(), random.Random(0)), asyncio.Queue[pb.SpotCheckRequest]()
    router.update(BLOCK, [_record(number) for number in range(2)])

    async def take(request: pb.SpotCheckRequest) -> pb.SpotCheckReply:
        passed.put_nowait(request)
        return pb.SpotCheckReply()

    checks = SpotChecks(
        run_id="", block=BLOCK, share=0.0, router=router, rng=random.Random(0),
        stub=lambda record: SimpleNamespace(SpotCheck=take),
    )  # fmt: skip
    call: Any = None
    reply = HopReply(loss=1.0, tensors={}, route={BLOCK: CHECKED}, num_reroutes=0, num_busy=0, _call=call)
    replay = Microbatch(index=0, round=0, num_samples=1, accumulate_only_at=1)  # Is not checked.
    whole = pb.Statement(microbatch=1, sketch=bytes(8))
    for statement in (pb.Statement(sketch=bytes(LONGEST_STATEMENT)), whole):
        checks.acknowledged(replay, {}, reply, statement)
    running = asyncio.create_task(checks.run())
    async with asyncio.timeout(10):
        assert list((await passed.get()).statements) == [whole]
    running.cancel()
