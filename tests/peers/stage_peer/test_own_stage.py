"""A stage that does not fit, and what the last one needs besides its weights."""

import asyncio
import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peers.shared import needs
from peers.shared.network import Membership
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_stage import OwnRoom, ServerOptions, deal, own_backends, warm_up
from peers.stage_peer.resume import ResumeOptions
from swarm.config import RoundsConfig, RunConfig, StagesConfig, Timeline, load_preset
from swarm.credentials.identity import generate
from swarm.errors import Fatal
from swarm.events import Events
from swarm.machine.recording import Recorder
from swarm.model.stage_module import StageModule
from swarm.stage.backend import StageBackend
from swarm.stage.graphs import GraphBudget
from swarm.stage.runtime import Runtime
from swarm.stage.staging import Staging
from swarm.types import Block
from tests.support.chain import PATIENCE_SECONDS, SYNCHRONOUS
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore
from tests.support.whole_swarm import whole_swarm

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


def test_all_variants_of_a_stage_begin_alike_and_have_lineages_of_their_own() -> None:
    stages = dataclasses.replace(SYNCHRONOUS.stages, variants=(1, 2, 1))
    config = dataclasses.replace(SYNCHRONOUS, stages=stages)
    one, other = (_backend(config, 1, variant=variant).weights for variant in (0, 1))
    assert one.masters.keys() == other.masters.keys()
    assert all(torch.equal(master, other.masters[name]) for name, master in one.masters.items())
    assert one.round.lineage != other.round.lineage


def test_a_peer_may_compute_in_a_type_of_its_own() -> None:
    backend = _backend(SYNCHRONOUS, 0, dtype="fp16")
    assert SYNCHRONOUS.model.autocast == "off"
    assert backend.config.model.autocast == "fp16"
    assert isinstance(backend.module, StageModule)
    assert backend.module.model.autocast == "fp16"


async def test_it_serves_the_run_all_the_same_whatever_it_computes_in(tmp_path: Path) -> None:
    """Imported models leave the type to each peer, and the run's id follows from what the run says."""
    config = dataclasses.replace(SYNCHRONOUS, model=dataclasses.replace(SYNCHRONOUS.model, autocast="auto"))
    async with whole_swarm(config, tmp_path / "logs", num_peers=(1, 1, 1)) as swarm:
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert len(await swarm.train(1)) == 1


def test_blocks_are_dealt_to_devices_in_order_and_evenly() -> None:
    assert deal([5, 1, 1, 5], 2) == [0, 0, 1, 1]
    assert deal([1, 2, 3, 4, 5], 2) == [0, 0, 0, 1, 1]
    assert deal([1, 1, 1, 10], 2) == [0, 0, 0, 1]
    assert deal([1, 1, 1, 1], 3) == [0, 0, 1, 2], "no device is left out"
    assert deal([3], 4) == [0]


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


def test_what_a_class_of_the_user_s_own_needs_is_not_known() -> None:
    config = dataclasses.replace(SYNCHRONOUS, model=dataclasses.replace(SYNCHRONOUS.model, custom_class="a:B"))
    room = _room(config, 1 << 20)
    room.require(range(1))
    assert room.spans is None


def test_memory_that_the_user_gives_limits_graphs() -> None:
    budget = _backend(SYNCHRONOUS, 0, graph_memory_mib=None, memory=1 << 40).budget
    assert budget.limit_bytes == pytest.approx(1 << 39, rel=0.01)
    assert _backend(SYNCHRONOUS, 0, graph_memory_mib=None, memory=1 << 20).budget.limit_bytes == 0


async def _warmed_up(
    caplog: pytest.LogCaptureFixture, *, device: str = "cpu", compiles: bool = False, recorder: Recorder | None = None
) -> list[str]:
    """Warm a stage up, and return the lines about it."""
    backend = _backend(SYNCHRONOUS, 1, compiles=compiles, recorder=recorder, graph_memory_mib=1024)
    runtime = Runtime(queue_capacity=4)
    runtime.start()
    try:
        with caplog.at_level("INFO"):
            await warm_up(backend, runtime, ManualClock(), device=torch.device(device), compiles=compiles)
    finally:
        runtime.stop(20.0)
    return [record.message for record in caplog.records if record.name.startswith(("peers", "swarm"))]


async def test_a_gpu_is_warmed_up_and_a_cpu_need_not_be(caplog: pytest.LogCaptureFixture) -> None:
    assert await _warmed_up(caplog) == []
    assert await _warmed_up(caplog, device="cuda") == ["warmed up the layers of stage 1 in 0 s"]


async def test_layers_that_no_code_can_be_made_for_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(graph: object, inputs: object) -> object:
        raise RuntimeError("no such instruction")

    torch._dynamo.reset()
    compile_layer = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile_layer(self, backend=fails))
    try:
        lines = await _warmed_up(caplog, compiles=True)
    finally:
        torch.compiler.set_stance("default")
    assert lines[0] == "compiling the layers of stage 1, which takes a minute the first time"
    assert re.fullmatch("goes on uncompiled, .* makes no code for cpu .*no such instruction.*", lines[1])
    assert lines[2] == "warmed up the layers of stage 1 in 0 s"
