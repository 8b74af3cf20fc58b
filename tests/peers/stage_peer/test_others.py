"""The rounds of other peers, some of which are silent or leaving."""

import dataclasses
import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import cast

import pytest

from peers.shared.network import KnownPeers, Membership
from peers.stage_peer import others as others_module
from peers.stage_peer.others import Others, find_others
from swarm.config import ModelConfig, RoundsConfig, RunConfig, StagesConfig, Timeline
from swarm.credentials.identity import generate
from swarm.dht.directory import Directory
from swarm.errors import Fatal, PeerUnavailable
from swarm.machine.clock import SystemClock
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block, PeerRecord, PeerState
from tests.support.describing import describing

SYNCHRONOUS = RunConfig(
    model=ModelConfig(num_layers=3, d_model=8, num_heads=2),
    stages=StagesConfig(num_stages=3),
    rounds=RoundsConfig(setting="synchronous", round_samples=16),
)
DILOCO = dataclasses.replace(SYNCHRONOUS, rounds=RoundsConfig(setting="diloco", round_samples=16))
STAGE = 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others_module, "LOOK_SECONDS", 0.05)


class _Directory:
    """A directory with living peers at some stages, and at every stage a dead peer that was far ahead."""

    def __init__(self, living: Sequence[PeerRecord], silent: Mapping[int, int], leaving: Collection[int]) -> None:
        self.num_looks = 0
        self._living = {record.stage: record for record in reversed(living)}
        self._more = [record for record in living if record not in self._living.values()]
        self._silent = dict(silent)
        self._leaving = leaving

    async def sample(self, block: Block) -> list[PeerRecord]:
        stage = block.stage
        self.num_looks += 1
        here = self._living.get(stage)
        if here is not None and stage in self._leaving:
            return [here.model_copy(update={"state": PeerState.LEAVING})]
        dead = PeerRecord(
            peer_id="f" * 40, announced_at=0.0, stage=stage, endpoint="127.0.0.1:1", certificate_pem="",
            state=PeerState.SERVING, round=99,
        )  # fmt: skip
        if here is not None:
            return [here, dead, *(record for record in self._more if record.stage == stage)]
        self._silent[stage] = self._silent.get(stage, 0) - 1
        return [dead] if self._silent[stage] >= 0 else []


def _reply(
    config: RunConfig, stage: int, number: int, *, committed: int = 0, num_forwards: int = 0
) -> pb.DescribeReply:
    rounds = [pb.RoundReport(round=number - 1 - back) for back in reversed(range(committed))]
    return pb.DescribeReply(
        run_id=config.run_id, stage=stage, round=number, run_samples=16 * number, rounds=rounds,
        counters=pb.StageCounters(forwards=num_forwards),
    )  # fmt: skip


async def _find(
    rounds: Mapping[int, Sequence[int | None]], *, config: RunConfig = SYNCHRONOUS, stage: int = STAGE,
    patient: bool = False, gives_up: bool = False, silent_looks: Mapping[int, int] | None = None,
    committed: Mapping[int, int] | None = None, num_forwards: int = 0, leaving: Collection[int] = (),
    needs_holder: bool = False, liars: Sequence[tuple[int, int]] = (),
) -> tuple[Others, int]:  # fmt: skip
    """What a joiner learns, and how often it looked again; `rounds` has the successive answers of each stage.

    `silent_looks`: of stages that never answer, for how many looks they have a dead peer that is announced.
    `liars`: further peers, by their stage and the round that they say. `committed`: how many rounds each has committed
    itself. `leaving`: stages whose peer is about to be gone.
    """

    def say(number: int, turns: Iterator[int | None]) -> pb.DescribeReply:
        if (turn := next(turns)) is None:
            raise PeerUnavailable("it says nothing")
        return _reply(config, number, turn, committed=(committed or {}).get(number, 0), num_forwards=num_forwards)

    async with AsyncExitStack() as stack:
        living = []
        for number, turns in rounds.items():
            # After the last reading, it is repeated.
            saying = itertools.chain(turns, itertools.repeat(turns[-1]))
            peer = describing(number, lambda _, number=number, saying=saying: say(number, saying))  # type: ignore[misc]
            living.append(await stack.enter_async_context(peer))
        for index, (number, lie) in enumerate(liars):
            peer = describing(number, lambda _, number=number, lie=lie: _reply(config, number, lie))  # type: ignore[misc]
            record = await stack.enter_async_context(peer)
            living.append(record.model_copy(update={"peer_id": f"{index:040d}", "round": lie}))
        directory = _Directory(living, silent_looks or {}, leaving)
        known, channels = KnownPeers(Router(SystemClock(), random.Random(0))), ChannelPool(insecure=True)
        stack.push_async_callback(channels.close)
        for number in {stage, *rounds, *(silent_looks or {})}:
            known.update(Block(number), await directory.sample(Block(number)))
        directory.num_looks = 0
        membership = Membership(
            config=config, timeline=Timeline(config), identity=generate(), directory=cast(Directory, directory),
            known=known, channels=channels, clock=SystemClock(),
        )  # fmt: skip
        found = await find_others(
            membership, Block(stage), patient=patient, gives_up=gives_up, needs_holder=needs_holder
        )
        return found, directory.num_looks


async def test_only_peers_that_answer_count() -> None:
    others, num_looks = await _find({0: [7], 2: [8]})
    assert others == Others(rounds={Block(0): 7, Block(2): 8}, latest=8, samples=128)
    assert (others.latest, num_looks) == (8, 0)
    assert (await _find({})) == (Others(), 0)


LIE = 1 << 43


@pytest.mark.parametrize("lie", [LIE, 0])
async def test_what_one_peer_says_is_not_the_round_of_the_run(lie: int) -> None:
    others, _ = await _find({0: [7], 2: [7]}, liars=[(2, lie)])
    assert others == Others(rounds={Block(0): 7, Block(2): 7}, latest=7, samples=112)
    others, _ = await _find({0: [7]}, liars=[(0, 7), (2, LIE)])
    assert (others.latest, others.samples) == (7, 112), "a stage with no other peer than the liar"
    others, _ = await _find({0: [7], STAGE: [7], 2: [7]}, liars=[(STAGE, lie)])
    assert others == Others(held_at=7)
    others, _ = await _find({0: [0], STAGE: [0], 2: [0]}, liars=[(STAGE, lie)])
    assert others == Others(held_at=0)


async def test_made_up_peers_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others_module, "SILENT_SECONDS", 0.2)
    others, _ = await _find({0: [7], 2: [8]}, silent_looks={STAGE: 1000})
    assert others == Others(rounds={Block(0): 7, Block(2): 8}, latest=8, samples=128)
    others, _ = await _find({0: [0], 2: [0]}, silent_looks={STAGE: 1000})
    assert others == Others(rounds={Block(0): 0, Block(2): 0})
    for silent in ({0: 1000}, {STAGE: 1000}):
        with pytest.raises(Fatal, match=r"gone on with ffffffff, silent since .* none of its peers answers"):
            await _find({}, silent_looks=silent)


async def test_who_has_committed_a_round_itself_can_repeat_it() -> None:
    others, _ = await _find({0: [7], 2: [7]}, committed={0: 1})
    assert others.repeating == {Block(0)}
    others, _ = await _find({0: [7], 2: [7]}, committed={0: 3, 2: 2})
    assert others.repeating == {Block(0), Block(2)}


async def test_a_stage_whose_holders_are_announced_and_silent_does_not_begin_anew() -> None:
    others, num_looks = await _find({0: [7], 2: [8]}, silent_looks={STAGE: 3})
    assert others == Others(rounds={Block(0): 7, Block(2): 8}, latest=8, samples=128)
    assert num_looks == 3 * 3, "three looks at three stages"


async def test_a_stage_whose_holder_is_leaving_does_not_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    """The holder may stay, or write its last checkpoint."""
    others, num_looks = await _find({0: [7], STAGE: [8, 8, None], 2: [8]}, leaving={STAGE})
    assert others == Others(rounds={Block(0): 7, Block(2): 8}, latest=8, samples=128), "it is gone"
    assert num_looks == 2 * 3
    (said,) = [record.getMessage() for record in caplog.records if record.name == "peers.stage_peer.others"]
    assert said.startswith("stage 1 is being left by ")


async def test_a_run_whose_peers_are_announced_and_silent_is_not_at_round_0(caplog: pytest.LogCaptureFixture) -> None:
    others, num_looks = await _find({0: [None, None, 7]})
    assert others == Others(rounds={Block(0): 7}, latest=7, samples=112)
    assert num_looks == 2 * 3
    others, num_looks = await _find({}, silent_looks={0: 3, 2: 2})
    assert (others, num_looks) == (Others(), 3 * 3), "announced no longer"
    said = [record.getMessage() for record in caplog.records if record.name == "peers.stage_peer.others"]
    assert [line.split(" with ")[0] for line in said] == ["the run has gone on"] * 2, "once each time"


async def test_who_moves_does_not_wait_for_silent_peers_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others_module, "SETTLE_SECONDS", 0.2)
    with pytest.raises(PeerUnavailable, match="those who hold it do not answer"):
        await _find({0: [7]}, silent_looks={STAGE: 1000}, gives_up=True)
    with pytest.raises(PeerUnavailable, match="those who hold it are leaving it"):
        await _find({0: [7], STAGE: [8]}, leaving={STAGE}, gives_up=True)
    with pytest.raises(PeerUnavailable, match="those who serve the other stages do not answer"):
        await _find({}, silent_looks={0: 1000}, gives_up=True)


async def test_a_peer_with_a_checkpoint_waits_until_the_others_have_committed_the_same_round() -> None:
    others, num_looks = await _find({0: [8], 2: [7, 8]}, patient=True)
    assert others == Others(rounds={Block(0): 8, Block(2): 8}, latest=8, samples=128)
    assert num_looks > 0
    others, num_looks = await _find({0: [8], 2: [7, 8]}, patient=True, config=DILOCO)
    assert (others.rounds, num_looks) == ({Block(0): 8, Block(2): 7}, 0)


async def test_holders_that_fell_silent_are_waited_for_by_who_has_nothing_else_to_begin_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(others_module, "RETURN_SECONDS", 0.3)
    others, num_looks = await _find({0: [7], 2: [7]}, silent_looks={STAGE: 2}, needs_holder=True)
    assert others.rounds == {Block(0): 7, Block(2): 7}
    assert others.silent.startswith("ffffffff, silent since ")
    assert num_looks >= 4 * 3, "while it is announced, and for a while thereafter"
    (line,) = [message for message in caplog.messages if "was held by" in message]
    assert line.startswith("stage 1 was held by ffffffff, silent since ")
    others, _ = await _find({0: [0], 2: [0]}, silent_looks={STAGE: 2}, needs_holder=True)
    assert others.silent == "", "nothing was learnt yet"


async def test_a_holder_that_comes_back_in_time_is_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(_Directory):
        """A directory in which the holder's announcement expires, and comes again."""

        num_readings = 0

        async def sample(self, block: Block) -> list[PeerRecord]:
            found = await super().sample(block)
            self.num_readings += block.stage == STAGE
            return [] if block.stage == STAGE and 1 < self.num_readings < 5 else found

    monkeypatch.setitem(globals(), "_Directory", Frozen)
    others, _ = await _find({0: [7], STAGE: [None, 8], 2: [7]}, needs_holder=True)
    assert others == Others(held_at=8)
