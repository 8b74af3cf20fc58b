"""Which blocks a peer takes: its user allows them, and its devices have room."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.shared import needs
from peers.shared.network import Membership
from peers.shared.room import Room
from peers.shared.stage_choice import StageChoice
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_room import deal, require_blocks, require_room, room_on
from peers.status.view import Joining
from swarm.config import ModelConfig, RunConfig, StagesConfig, load_preset
from swarm.credentials.identity import generate
from swarm.model.stage_module import StageModule
from swarm.rpc.entry import Entry
from swarm.types import Block, PeerRecord, PeerState
from tests.support.chain import SYNCHRONOUS
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore


def test_whose_code_runs_here_is_for_the_user_to_say() -> None:
    run = RunConfig(model=ModelConfig(custom_class="theirs:Model"))
    require_blocks(_joining(), RunConfig(), None)
    require_blocks(_joining("theirs:Model"), RunConfig(), None)
    require_blocks(_joining(), run, run)
    require_blocks(_joining("theirs:Model"), run, None)
    for allowed in ((), ("",), ("theirs",), ("ours:Model",)):
        with pytest.raises(ValueError, match=r"if you trust that code, add --allow-class theirs:Model$"):
            require_blocks(_joining(*allowed), run, None)


def _joining(*allowed: str, **options: Any) -> PeerOptions:
    return PeerOptions(initial_peers=("/ip4/127.0.0.1/tcp/1/p2p/x",), allow_class=allowed, **options)


def test_a_peer_that_stays_on_one_path_runs_no_code_of_the_others() -> None:
    run = RunConfig(
        model=ModelConfig(num_layers=3, custom_class=(("one:A", "", "one:A"), ("two:B", "", "two:C"))),
        stages=StagesConfig(num_stages=3, variants=(2, 1, 2), paths=((0, 0, 0), (1, 0, 1))),
    )
    require_blocks(_joining("one:A", path=0), run, None)
    require_blocks(_joining(stage=StageChoice(1, 1)), run, None)
    missing = r"run 'two:B', 'two:C', its model.custom_class: .* add --allow-class two:B --allow-class two:C$"
    for everywhere in ({"stage": "auto"}, {"path": 1}):
        with pytest.raises(ValueError, match=missing):
            require_blocks(_joining("one:A", **everywhere), run, None)
    joining = Joining.at(run, [Entry.parse(f"{40 * 'a'}@192.0.2.1:5001")], insecure=False)
    assert joining.peer.endswith(" --allow-class one:A --allow-class two:B --allow-class two:C")


def test_what_is_to_be_typed_is_one_word_to_a_shell() -> None:
    run = RunConfig(model=ModelConfig(custom_class="a:B; rm -rf ~"))
    with pytest.raises(ValueError, match=r"add --allow-class 'a:B; rm -rf ~'$"):
        require_blocks(_joining(), run, None)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7), num_devices=st.integers(1, 5))
def test_no_other_cut_has_a_smaller_largest_share(sizes: list[int], num_devices: int) -> None:
    def largest(cut: Sequence[int]) -> int:
        return max(sum(size for size, device in zip(sizes, cut, strict=True) if device == one) for one in set(cut))

    used = min(num_devices, len(sizes))
    starts = itertools.combinations(range(1, len(sizes)), used - 1)
    cuts = ([sum(start <= number for start in chosen) for number in range(len(sizes))] for chosen in starts)
    assert largest(deal(sizes, num_devices)) == min(map(largest, cuts))


def _member(config: RunConfig) -> Membership:
    clock = ManualClock()
    return Membership.enter(config, MemoryStore(clock), generate(), clock, insecure=True)


def _room(config: RunConfig, memory_bytes: int) -> Room:
    return room_on(torch.device("cpu"), _member(config), _joining(stage="auto", memory=memory_bytes))


def test_a_stage_for_which_there_is_no_memory_is_refused_in_a_line() -> None:
    """The outer stages of GPT-2 have a vocabulary besides their layers."""
    config = dataclasses.replace(load_preset("gpt2-124m").begun(), stages=StagesConfig(num_stages=12))
    room = _room(config, 2 << 30)
    assert room.spans is not None
    assert {stage for span in room.spans for stage in span} == {*range(1, 11)}
    assert room.fault(range(1, 2)) == room.fault(None) == ""
    fault = r"stage 11 takes \S+ GiB or more, and 2.0 GiB of cpu are there: take --stage 1, which fits, or a run with "
    assert re.match(fault, room.fault(range(11, 12)))
    assert _room(config, 4 << 30).fault(range(1, 5)) == ""
    assert re.match(r"stages 1 to 4 take \S+ GiB or more, .* are there: take --stage 1-", room.fault(range(1, 5)))
    assert re.match(
        r"a stage takes .* or more, and 512.0 MiB of cpu are there: close other", _room(config, 512 << 20).fault(None)
    )


def test_a_peer_shares_its_stage_s_round_with_those_that_serve_that_stage_already() -> None:
    member, on = _member(SYNCHRONOUS), torch.device("cpu")
    others = [
        PeerRecord(
            peer_id=f"{number:040x}", name=str(number), announced_at=0.0, stage=1, endpoint=f"127.0.0.1:{number + 1}",
            state=PeerState.SERVING,
        )
        for number in range(3)
    ]  # fmt: skip
    member.known.update(Block(1), others)
    shared, alone = (room_on(on, member, _joining(stage=stage)).each[1] for stage in (StageChoice(1, 1), "auto"))
    assert shared == needs.of_stages(SYNCHRONOUS, on_gpu=False, num_peers=4)[1]
    assert shared.other < alone.other


async def test_a_peer_begins_only_if_each_device_has_room_for_its_own_stages() -> None:
    member = _member(dataclasses.replace(load_preset("gpt2-124m").begun(), stages=StagesConfig(num_stages=12)))
    on = [torch.device("cpu")] * 2
    room = await require_room(PeerOptions(preset="tiny", stage=StageChoice(9, 10), memory=2 << 30), member, on)
    assert room.fault(None) == ""
    for stage, memory_bytes, fault in (
        (StageChoice(10, 11), 2 << 30, "^stage 11 takes .* take --stage 10, which fits"),
        (StageChoice(11, 11), 2 << 30, "^stage 11 takes "),
        ("auto", 512 << 20, "^a stage takes .*: close other"),
    ):
        with pytest.raises(ValueError, match=fault):
            await require_room(_joining(stage=stage, memory=memory_bytes), member, on)


class Unmeasured(StageModule):
    def forward(self, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        assert inputs.device.type != "meta"
        return super().forward(inputs, **options)


def _of_class(custom_class: Any) -> RunConfig:
    return dataclasses.replace(SYNCHRONOUS, model=dataclasses.replace(SYNCHRONOUS.model, custom_class=custom_class))


def test_a_class_of_the_user_s_own_is_measured_and_several_stages_of_it_fit() -> None:
    config = _of_class(f"{StageModule.__module__}:{StageModule.__qualname__}")
    room = _room(config, 1 << 30)
    assert room.spans == _room(SYNCHRONOUS, 1 << 30).spans
    assert range(3) in (room.spans or ())
    built_in = needs.of_stages(SYNCHRONOUS, on_gpu=False)
    for stage, own in room.each.items():
        assert (own.weights, own.optimizer, own.ram) == (
            built_in[stage].weights, built_in[stage].optimizer, built_in[stage].ram
        )  # fmt: skip
        assert own.graphs == pytest.approx(built_in[stage].graphs, rel=0.25)
    assert re.match(
        r"stages 0 to 2 take .* or more, and 512.1 MiB of cpu are there: ",
        _room(config, (512 << 20) + (100 << 10)).fault(range(3)),
    )


def test_where_a_class_cannot_be_measured_one_stage_is_taken_alone() -> None:
    room = _room(_of_class(f"{Unmeasured.__module__}:{Unmeasured.__qualname__}"), 1 << 20)
    assert room.fault(range(1)) == ""
    assert room.spans is None
    with pytest.raises(ValueError, match=r"^model.custom_class 'a:B' cannot be imported"):
        _room(_of_class("a:B"), 1 << 20)
