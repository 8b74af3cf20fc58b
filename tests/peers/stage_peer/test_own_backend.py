"""A stage that does not fit, and what the last one needs besides its weights."""

import dataclasses

import pytest
import torch

from peers.shared.devices import Dtype
from peers.stage_peer.own_backend import own_backend
from swarm.config import RunConfig
from swarm.errors import Fatal
from swarm.events.kinds import Events
from swarm.model.stage_module import StageModule
from swarm.stage.backend import StageBackend
from swarm.stage.staging import Staging
from tests.support.chain import SYNCHRONOUS

_ENDLESS = 1 << 40
"""Tokens of a microbatch whose loss fits into no memory."""


def _backend(config: RunConfig, stage: int, *, dtype: Dtype | None = None, compiles: bool = False) -> StageBackend:
    return own_backend(
        config,
        stage,
        device=torch.device("cpu"),
        staging=Staging(),
        given=None,
        graph_bytes=0,
        events=Events(),
        dtype=dtype,
        compiles=compiles,
    )


def test_the_last_stage_alone_needs_room_for_the_loss() -> None:
    data = dataclasses.replace(SYNCHRONOUS.data, sequence_length=_ENDLESS)
    config = dataclasses.replace(SYNCHRONOUS, data=data)
    last = config.stages.num_stages - 1
    assert not _backend(config, last - 1).is_last
    with pytest.raises(Fatal, match=rf"stage {last} does not fit on cpu \(no room for .*\): take more stages"):
        _backend(config, last)
    assert _backend(SYNCHRONOUS, last).is_last


def test_a_peer_may_compute_in_a_type_of_its_own() -> None:
    backend = _backend(SYNCHRONOUS, 0, dtype="fp16")
    assert SYNCHRONOUS.model.autocast == "off"
    assert backend.config.model.autocast == "fp16"
    assert isinstance(backend.module, StageModule)
    assert backend.module.model.autocast == "fp16"


def test_dropout_is_not_compiled() -> None:
    model = dataclasses.replace(SYNCHRONOUS.model, dropout=0.1)
    with pytest.raises(ValueError, match="--compile is not for runs with dropout"):
        _backend(dataclasses.replace(SYNCHRONOUS, model=model), 0, compiles=True)


def test_without_a_compiler_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: object) -> object:
        raise RuntimeError("\nNo working C++ compiler found\nand much more")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(
        Fatal, match=r"^--compile: this machine makes no code for cpu, .*\(No working C\+\+ compiler found\)$"
    ):
        _backend(SYNCHRONOUS, 0, compiles=True)
