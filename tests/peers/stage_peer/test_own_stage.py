"""A stage that does not fit, and what the last one needs besides its weights."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.shared import needs
from peers.shared.network import Membership
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_stage import OwnRoom, ServerOptions, deal, own_backends
from peers.stage_peer.resume import ResumeOptions
from swarm.config import RoundsConfig, RunConfig, StagesConfig, Timeline, load_preset
from swarm.credentials.identity import generate
from swarm.errors import Fatal
from swarm.events import Events
from swarm.machine.recording import Recorder
from swarm.model.stage_module import StageModule
from swarm.stage.backend import StageBackend
from swarm.stage.graphs import GraphBudget
from swarm.stage.staging import Staging
from swarm.types import Block
from tests.support.chain import SYNCHRONOUS
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore

_ENDLESS = 1 << 40
"""Tokens of a microbatch whose loss fits into no memory."""


def _backend(
    config: RunConfig, stage: int, *, variant: int = 0, graph_memory_mib: int | None = 0, compiles: bool = False,
    recorder: Recorder | None = None, **given: Any,
) -> StageBackend:  # fmt: skip
    options = ServerOptions(
        given=PeerOptions(preset="tiny", graph_memory_mib=graph_memory_mib, **given), device=torch.device("cpu"),
        resume=ResumeOptions(), checkpoints=None, events=Events(), compiles=compiles, recorder=recorder,
    )  # fmt: skip
    block = Block(stage, variant)
    return own_backends(Timeline(config), {block: options}, {options.device: Staging()})[block]


def test_the_last_stage_alone_needs_room_for_the_loss() -> None:
    data = dataclasses.replace(SYNCHRONOUS.data, sequence_length=_ENDLESS)
    config = dataclasses.replace(SYNCHRONOUS, data=data)
    last = config.stages.num_stages - 1
    assert not _backend(config, last - 1).is_last
    with pytest.raises(Fatal, match=rf"stage {last} does not fit on cpu \(no room for .*\): take more stages"):
        _backend(config, last)
    assert _backend(SYNCHRONOUS, last).is_last


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7), num_devices=st.integers(1, 5))
def test_no_other_cut_has_a_smaller_largest_share(sizes: list[int], num_devices: int) -> None:
    def largest(cut: Sequence[int]) -> int:
        return max(sum(size for size, device in zip(sizes, cut, strict=True) if device == one) for one in set(cut))

    used = min(num_devices, len(sizes))
    starts = itertools.combinations(range(1, len(sizes)), used - 1)
    cuts = ([sum(start <= number for start in chosen) for number in range(len(sizes))] for chosen in starts)
    assert largest(deal(sizes, num_devices)) == min(map(largest, cuts))


def test_blocks_on_one_device_share_its_memory_for_graphs() -> None:
    first = GraphBudget(limit_bytes=100, graph_bytes=30)
    second = first.beside()
    first.keep()
    first.keep()
    assert second.has_room()
    second.graph_bytes = 50
    assert not second.has_room()
    first.let_go()
    assert second.has_room()
    second.keep()
    second.keep()
    first.halve()
    assert first.limit_bytes == second.limit_bytes == 50
    third = first.beside()
    third.recorded_bytes = 40
    assert first.taken_bytes == 170
    third.leave()
    assert first.taken_bytes == 130, "the third block was given up"
    first.allow(60)
    assert (second.limit_bytes, third.limit_bytes) == (60, 50)
    first.allow(50)
    first.recorded_bytes = 20
    assert second.most_bytes == 30


def _room(config: RunConfig, memory_bytes: int | None) -> OwnRoom:
    clock = ManualClock()
    member = Membership.enter(config, MemoryStore(clock), generate(), clock, insecure=True)
    return OwnRoom.of(member, torch.device("cpu"), dtype=None, memory_bytes=memory_bytes)


def test_a_stage_for_which_there_is_no_memory_is_refused_in_a_line() -> None:
    """The outer stages of GPT-2 have a vocabulary besides their layers."""
    config = dataclasses.replace(load_preset("gpt2-124m").begun(), stages=StagesConfig(num_stages=12))
    room = _room(config, 2 << 30)
    assert room.spans is not None
    assert {stage for span in room.spans for stage in span} == {*range(1, 11)}
    room.require(range(1, 2))
    room.require(None)
    fault = r"stage 11 takes \S+ GiB or more, and 2.0 GiB of cpu are there: take --stage 1, which fits, or a run with "
    with pytest.raises(ValueError, match=fault):
        room.require(range(11, 12))
    _room(config, 4 << 30).require(range(1, 5))
    with pytest.raises(ValueError, match=r"stages 1 to 4 take \S+ GiB or more, .* are there: take --stage 1-"):
        room.require(range(1, 5))
    with pytest.raises(ValueError, match=r"a stage takes .* or more, and 512.0 MiB of cpu are there: close other"):
        _room(config, 512 << 20).require(None)


def test_anchors_on_disk_need_no_ram_and_their_folder_is_there(tmp_path: Path) -> None:
    diloco = dataclasses.replace(SYNCHRONOUS, rounds=RoundsConfig(setting="diloco", round_samples=8))
    here, there = (
        needs.of_stages(diloco, on_gpu=False, anchors_on_disk=on_disk)[1].device for on_disk in (False, True)
    )
    assert here - there == 12 * needs.num_parameters(diloco, 1)
    for config, folder, fault in (
        (SYNCHRONOUS, tmp_path, "--anchors is for rounds.setting = 'diloco'"),
        (diloco, tmp_path / "none", "--anchors: .* cannot be had in .*none: No such file or directory"),
    ):
        with pytest.raises(Fatal, match=fault):
            _backend(config, 1, anchors=folder)
    assert _backend(diloco, 1, anchors=tmp_path).weights.anchor(0) is not None


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
    with pytest.raises(ValueError, match=r"stages 0 to 2 take .* or more, and 512.1 MiB of cpu are there: "):
        _room(config, (512 << 20) + (100 << 10)).require(range(3))


def test_where_a_class_cannot_be_measured_one_stage_is_taken_alone() -> None:
    room = _room(_of_class(f"{Unmeasured.__module__}:{Unmeasured.__qualname__}"), 1 << 20)
    room.require(range(1))
    assert room.spans is None
    with pytest.raises(ValueError, match=r"^model.custom_class 'a:B' cannot be imported"):
        _room(_of_class("a:B"), 1 << 20)
