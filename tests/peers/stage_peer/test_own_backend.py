"""A stage that does not fit, and what the last one needs besides its weights."""

import dataclasses

import pytest
import torch

from peers.stage_peer.own_backend import own_backend
from swarm.config import RunConfig
from swarm.errors import Fatal
from swarm.events.kinds import NoEvents
from swarm.stage.backend import StageBackend
from swarm.stage.staging import Staging
from tests.support.chain import SYNCHRONOUS

_ENDLESS = 1 << 40
"""Tokens of a microbatch whose loss fits nowhere."""


def _backend(config: RunConfig, stage: int) -> StageBackend:
    return own_backend(
        config, stage, device=torch.device("cpu"), staging=Staging(), given=None, graph_bytes=0, events=NoEvents()
    )


def test_the_last_stage_alone_needs_room_for_the_loss() -> None:
    data = dataclasses.replace(SYNCHRONOUS.data, sequence_length=_ENDLESS)
    config = dataclasses.replace(SYNCHRONOUS, data=data)
    last = config.stages.num_stages - 1
    assert not _backend(config, last - 1).is_last
    with pytest.raises(Fatal, match=rf"stage {last} does not fit on cpu \(no room for .*\): take more stages"):
        _backend(config, last)
    assert _backend(SYNCHRONOUS, last).is_last
