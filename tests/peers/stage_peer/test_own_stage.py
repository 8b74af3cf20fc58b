"""A stage that does not fit, and what the last one needs besides its weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.shared import needs
from peers.stage_peer import own_stage
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_stage import ServerOptions, own_backends
from swarm.config import RoundsConfig, RunConfig, Timeline
from swarm.errors import Fatal
from swarm.events import Events
from swarm.machine.clock import SystemClock
from swarm.machine.recording import Recorder
from swarm.stage.backend import StageBackend
from swarm.stage.graphs import GraphBudget
from swarm.stage.runtime import Runtime
from swarm.stage.staging import Staging
from swarm.types import Block
from tests.support.chain import PATIENCE_SECONDS, SYNCHRONOUS

_ENDLESS = 1 << 40
"""Tokens of a microbatch whose loss fits into no memory."""


def _backend(
    config: RunConfig, stage: int, *, variant: int = 0, graph_memory_mib: int | None = 0, compiles: bool = False,
    recorder: Recorder | None = None, **given: Any,
) -> StageBackend:  # fmt: skip
    options = ServerOptions(
        given=PeerOptions(preset="tiny", graph_memory_mib=graph_memory_mib, **given), device=torch.device("cpu"),
        checkpoints=None, events=Events(), compiles=compiles, recorder=recorder,
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


async def test_what_cannot_be_compiled_is_warmed_up_uncompiled_but_no_lack_of_memory_is_hidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    backend, runtime, cpu = _backend(SYNCHRONOUS, 1), Runtime(queue_capacity=4), torch.device("cpu")
    faults, given_up, texts = list[Exception](), list[str](), list[str]()
    monkeypatch.setattr(StageBackend, "warm_up", lambda _: _raise(faults.pop(0)) if faults else None)
    monkeypatch.setattr(own_stage, "go_on_uncompiled", lambda error, device: given_up.append(f"{error} on {device}"))

    async def warm_up(*, compiles: bool, device: torch.device = cpu) -> None:
        await own_stage.warm_up(
            backend, runtime, SystemClock(), device=device, compiles=compiles, texts=lambda: texts.append("compiled")
        )

    runtime.start()
    try:
        faults = [RuntimeError("no compiler")]
        await warm_up(compiles=True)
        assert (given_up, texts, faults) == (["no compiler on cpu"], [], [])
        assert caplog.messages[-1].startswith("warmed up the layers of stage 1")
        await warm_up(compiles=True)
        assert texts == ["compiled"]
        for compiles, fault in ((True, MemoryError()), (False, RuntimeError("no kernel"))):
            faults = [fault]
            with pytest.raises(type(fault)):
                await warm_up(compiles=compiles, device=torch.device("cuda"))
        assert len(given_up) == 1
    finally:
        runtime.stop(PATIENCE_SECONDS)


def _raise(error: Exception) -> None:
    raise error
