"""A member contributes wrong but ordinary numbers again and again: it is left out of rounds, and named."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from swarm.averaging.vectors.scrutiny import NEW_ROUNDS, Newcomers
from swarm.averaging.wire.transport import Payload
from swarm.compression.buffers import Buffer
from swarm.compression.codec import Codec
from swarm.events import OutOfLine
from swarm.honesty.comparison import Deviation
from swarm.honesty.suspects import LEFT_OUT_AFTER, NAMED_AFTER
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Contribution, RoundResult
from swarm.training.tally import Sign
from tests.averaging.doubles import Network, peer_id, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.support.virtual_time import in_virtual_time

NUM_LAYERS, LAYER = 4, (64, 96)
LIAR = 3
FROM = LEFT_OUT_AFTER - 1
"""The round from which on a member is left out that has lied from the first one on."""
Lie = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class LargeStage(FakeStage):
    """A stage of several layers. Contributions to a round have much in common, and noise of their own."""

    def __init__(self, lineage: str = "00") -> None:
        super().__init__(lineage)
        self.anchor = torch.zeros(NUM_LAYERS, *LAYER)
        self.lie: Lie | None = None

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        contribution = await super().freeze(round_number, drop=drop)
        drawn = np.random.default_rng(round_number).standard_normal((NUM_LAYERS, *LAYER))
        number = min(self.indices, default=0)
        noise = np.random.default_rng([1, round_number, number]).standard_normal((NUM_LAYERS, *LAYER))
        values = torch.from_numpy((0.7 * drawn + noise).astype(np.float32))
        tensors = {f"layers.{layer}.weight": values[layer] for layer in range(NUM_LAYERS)}
        return replace(contribution, tensors=self.lie(tensors) if self.lie else tensors)

    async def apply(self, result: RoundResult) -> "asyncio.Future[str]":
        values = torch.stack([result.tensors[f"layers.{layer}.weight"] for layer in range(NUM_LAYERS)])
        small = replace(result, tensors={"b": torch.zeros(5), "a": torch.zeros(3, 4)})
        kept, self.anchor = self.anchor, torch.zeros(17)
        await super().apply(small)
        self.results[-1] = result
        self.anchor = kept - values
        self.digests[-1] = self.digest
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_result(self.digest)
        return future

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.anchor.numpy().tobytes()).hexdigest()


@asynccontextmanager
async def group(
    setting: str, num_members: int, *, codec: str = "fp32", sign_as: Callable[[int], Sign | None] = lambda number: None
) -> AsyncIterator[Network]:
    config = make_config(setting, microbatches=2 * num_members, codec=codec)
    async with Network(config, LargeStage) as network:
        network.sign_as = sign_as
        for number in range(num_members):
            network.add(number)
        await until(lambda: len(network.peers[peer_id(0)].averager.view().progress) == num_members)
        yield network


def stage(network: Network, number: int) -> LargeStage:
    found = network.peers[peer_id(number)].stage
    assert isinstance(found, LargeStage)
    return found


def lines(network: Network, number: int) -> list[str]:
    return list(network.peers[peer_id(number)].averager.counters().refusals)


def common_share(result: RoundResult) -> float:
    """How much of an average is what all honest contributions have in common: 0.7 if nothing else is in it."""
    drawn = np.random.default_rng(result.round).standard_normal((NUM_LAYERS, *LAYER))
    average = np.stack([result.tensors[f"layers.{layer}.weight"].numpy() for layer in range(NUM_LAYERS)])
    return float((average * drawn).sum() / (drawn * drawn).sum())


async def commit(network: Network) -> None:
    """Let all peers learn, and those commit that are taken."""
    everybody = [stage(network, number) for number in range(len(network.peers))]
    honest = [each for each in everybody if each.lie is None]
    before = honest[0].round
    size = network.config.rounds.round_samples // 2
    missing = [before * size + index for index in range(size)]
    for index in missing:
        everybody[index % len(everybody)].learn(index)

    aborted = network.peers[peer_id(0)].averager.lead_loop.aborted
    num_before = aborted.total()

    def is_over() -> bool:
        # What was left out with a member is computed again by others; with DiLoCo, others learn as much more.
        counted = set[int]().union(*(each.indices for each in honest))
        if all(each.round == before for each in honest) and aborted.total() > num_before:
            for place, index in enumerate(sorted(set(missing) - counted)):
                honest[place % len(honest)].learn(index)
        return all(each.round == before + 1 for each in everybody)

    await until(is_over, seconds=30.0)


LIES: dict[str, Lie] = {
    "zeros": lambda tensors: {name: torch.zeros_like(value) for name, value in tensors.items()},
    "sign flipped": lambda tensors: {name: -value for name, value in tensors.items()},
    "scaled by 3": lambda tensors: {name: 3 * value for name, value in tensors.items()},
    "scaled by 9": lambda tensors: {name: 9 * value for name, value in tensors.items()},
    "random": lambda tensors: {
        name: torch.from_numpy(np.random.default_rng(7).standard_normal(value.shape).astype(np.float32)) * value.std()
        for name, value in tensors.items()
    },
}


@pytest.mark.parametrize(("setting", "lie"), [*(("diloco", lie) for lie in LIES), ("synchronous", next(iter(LIES)))])
@in_virtual_time
async def test_a_liar_is_left_out_and_named(setting: str, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    async with group(setting, 6) as network:
        stage(network, LIAR).lie = LIES[lie]
        stage(network, LIAR).carries = False  # A contribution of several rounds may be longer than the others.
        for _ in range(NAMED_AFTER + 1):
            await commit(network)
        honest = [stage(network, number) for number in range(6) if number != LIAR]
        assert len({each.digest for each in honest}) == 1
        assert all(result.num_samples >= 24 for result in honest[0].results)
        for result in honest[0].results[FROM:]:
            assert common_share(result) == pytest.approx(0.7, abs=0.04)
        for number in range(6):
            assert [line.split()[0] for line in lines(network, number)] == [peer_id(LIAR)]
        assert f"the contribution of {peer_id(LIAR)} to round {FROM} is out of line: 5 of 5 others" in caplog.text


@in_virtual_time
async def test_sums_that_lies_have_made_odd_get_no_honest_owner_into_doubt(caplog: pytest.LogCaptureFixture) -> None:
    """Three lies weigh as much as what five others give, so that no sum looks as if anybody's contribution were in it.
    They are left out of each round at once, and its second exchange has no more of them."""
    liars = [LIAR, LIAR + 2, LIAR + 4]
    async with group("synchronous", 8) as network:
        for number in liars:
            stage(network, number).lie = lambda tensors: {name: -2.3 * value for name, value in tensors.items()}
        for _ in range(NAMED_AFTER + 2):
            await commit(network)
        honest = [stage(network, number) for number in range(8) if number not in liars]
        assert all(len(result.members) == 5 and result.attempts == 2 for each in honest for result in each.results)
        accused = {line.split()[3] for line in caplog.messages if line.startswith("the contribution of ")}
        assert accused == {peer_id(number) for number in liars}
        assert "are said to be out of line" not in caplog.text


@in_virtual_time
async def test_a_newcomer_may_be_longer_than_others_for_some_rounds(caplog: pytest.LogCaptureFixture) -> None:
    async with group("diloco", 6) as network:
        await commit(network)
        network.add(6)
        await until(lambda: stage(network, 6).round == 1)
        stage(network, 6).lie = LIES["scaled by 3"]
        stage(network, 6).carries = False
        for _ in range(NEW_ROUNDS):
            await commit(network)
        assert all(len(result.members) == 7 for result in stage(network, 0).results[1:])
        for _ in range(NAMED_AFTER):
            await commit(network)
        assert [line.split()[0] for line in lines(network, 0)] == [peer_id(6)]


def test_newcomers_are_those_that_were_met_later_or_started_again() -> None:
    number, starts = 0, {"b": "first", "c": "first"}
    newcomers = Newcomers(round_number=lambda: number, starts=lambda: starts)
    assert newcomers.among("ab") == []
    number = 1
    assert newcomers.among("abc") == ["c"]
    number = 5
    starts = {"a": "first", "b": "second", "c": "first"}
    assert newcomers.among("abc") == ["b", "c"]
    number = NEW_ROUNDS
    assert newcomers.among("ab") == ["b"]
    number = 1 + NEW_ROUNDS
    assert newcomers.among("abc") == ["b"]
    number, starts = 5 + NEW_ROUNDS, {}
    assert newcomers.among("abc") == []
    number += NEW_ROUNDS  # What was so long ago is forgotten.
    assert newcomers.among("a") == ["a"]


@pytest.mark.parametrize("setting", ["diloco", "synchronous"])
@in_virtual_time
async def test_who_is_out_of_line_once_is_taken(setting: str) -> None:
    async with group(setting, 6) as network:
        for number in range(4):
            stage(network, LIAR).lie = LIES["scaled by 9"] if number == 1 else None
            await commit(network)
        assert all(len(result.members) == 6 and result.attempts == 1 for result in stage(network, 0).results)
        assert lines(network, 0) == []


@in_virtual_time
async def test_two_of_eight_that_lie_are_left_out_of_every_round() -> None:
    async with group("diloco", 8) as network:
        events: list[object] = []
        network.peers[peer_id(0)].averager.context.events.write = events.append  # type: ignore[method-assign, assignment]
        for number in (LIAR, 5):
            stage(network, number).lie = LIES["sign flipped"]
            stage(network, number).carries = False
        for _ in range(NAMED_AFTER):
            await commit(network)
        for result in stage(network, 0).results:  # The opposite of all others is left out at once.
            assert common_share(result) == pytest.approx(0.7, abs=0.04)
        assert {line.split()[0] for line in lines(network, 0)} == {peer_id(LIAR), peer_id(5)}
        noted = [event for event in events if isinstance(event, OutOfLine)]
        told = [(event.round, event.is_named) for event in noted]
        assert told == [(number, number == NAMED_AFTER - 1) for number in range(NAMED_AFTER) for _ in (LIAR, 5)]
        assert [bool(event.evidence) for event in noted] == [is_named for _, is_named in told]
        first, *_, last = noted[-1].evidence
        size = NUM_LAYERS * LAYER[0] * LAYER[1]
        assert first.startswith(
            f"round 0, {peer_id(0)} of [0, {size // 8}): its cosine with the mean of the others is -"
        )
        assert last.startswith(f"round {NAMED_AFTER - 1}, {peer_id(7)} of [")


def _in_one_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: -value if name == "layers.2.weight" else value for name, value in tensors.items()}


@in_virtual_time
async def test_a_lie_in_one_layer_is_agreed_on_as_parts_change_hands() -> None:
    async with group("diloco", 8) as network:
        stage(network, LIAR).lie = _in_one_layer
        stage(network, LIAR).carries = False
        for _ in range(NAMED_AFTER + 1):
            await commit(network)
        assert [line.split()[0] for line in lines(network, 0)] == [peer_id(LIAR)]
        assert all(len(result.members) >= 7 for result in stage(network, 0).results)


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4", "topk"])
@in_virtual_time
async def test_it_is_found_however_contributions_are_encoded(codec: str) -> None:
    async with group("diloco", 4 if codec == "topk" else 6, codec=codec) as network:
        stage(network, LIAR).lie = LIES["scaled by 9"]
        stage(network, LIAR).carries = False
        for _ in range(NAMED_AFTER):
            await commit(network)
        assert [line.split()[0] for line in lines(network, 0)] == [peer_id(LIAR)]


@in_virtual_time
async def test_among_three_all_are_taken_and_a_line_says_that_nobody_can_say_who_is_wrong() -> None:
    async with group("diloco", 3) as network:
        stage(network, 2).lie = LIES["scaled by 3"]
        await commit(network)
        assert len(stage(network, 0).results[0].members) == 3
        assert "among 3 members nobody can say whose is wrong" in lines(network, 0)[0]


@pytest.mark.parametrize("num_accusers", [1, 2])
@in_virtual_time
async def test_an_owner_that_accuses_falsely_gets_nobody_left_out_and_a_line_tells_it(num_accusers: int) -> None:
    async with group("diloco", 6) as network:
        for accuser in range(1, 1 + num_accusers):
            _accuse(network, accuser, peer_id(4))
        for _ in range(8):
            await commit(network)
        assert all(len(result.members) == 6 for result in stage(network, 0).results)
        told = [f"{peer_id(number)} says wherever its part is" for number in range(1, 1 + num_accusers)]
        assert [line[: len(told[0])] for line in lines(network, 0)] == told


class LyingCodec:
    """Encodes something else than it is given."""

    def __init__(self, codec: Codec, lie: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._codec, self._lie = codec, lie

    def encode(self, vector_N: torch.Tensor) -> Buffer:
        return self._codec.encode(self._lie(vector_N))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)


SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flipped": torch.neg,
    "zeros": torch.zeros_like,
    "others": lambda true: true.roll(1000),
}


@pytest.mark.parametrize("sums", SUMS)
@in_virtual_time
async def test_an_owner_that_makes_up_the_sum_of_its_part_is_named(sums: str) -> None:
    async with group("synchronous", 6) as network:
        stage(network, LIAR).lie = lambda tensors: tensors  # What it contributes is true.
        exchanges = network.peers[peer_id(LIAR)].averager.own_round.exchanges
        exchanges.result_codec = cast("Codec", LyingCodec(exchanges.result_codec, SUMS[sums]))
        for _ in range(NAMED_AFTER + 1):
            await commit(network)
        assert [line.split()[0] for line in lines(network, 0)] == [peer_id(LIAR)]
        assert "the sum that it made of its part" in lines(network, 0)[0]
        assert len(stage(network, 0).results[-1].members) == 5


def _accuse(network: Network, accuser: int, accused: str) -> None:
    """From now on let a member say in every answer that another one is out of line."""
    participant = network.peers[peer_id(accuser)].averager.handlers.participant
    serve = participant.serve

    async def answer(opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> Payload:
        return replace(
            await serve(opening, pieces), deviations=[Deviation(peer_id=accused, reason="its norm is a lie")]
        )

    participant.serve = answer  # type: ignore[method-assign]
