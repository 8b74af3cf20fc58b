"""torch.compile on a stage's layers. A backend counts the graphs, and runs them without compiling."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from swarm import config as configs
from swarm.config import LoraConfig
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage


# torch.compile looks at .grad of the tensors that it finds, and makes an instance of autograd.Function.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "lora", "documents", "num_graphs"),
    [
        ({}, LoraConfig(), False, 1),
        (
            {"feed_forward": "gelu", "norm": "layer", "positions": "learned", "max_positions": 64},
            LoraConfig(),
            False,
            1,
        ),
        ({}, LoraConfig(), True, 1),
        # The last layer writes more columns than the others.
        ({"bottleneck_dim": 32}, LoraConfig(), False, 2),
        # A layer's two parts are compiled apart.
        ({"block_types": "tp", "num_shards": 2}, LoraConfig(), False, 2),
        # The first layer's inputs need no gradient.
        ({}, LoraConfig(rank=4), False, 2),
    ],
)
def test_layers_share_what_is_compiled(
    model: dict[str, Any], lora: LoraConfig, documents: bool, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counter, compile_layer = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: compile_layer(self, backend=counter, **kwargs))
    tiny = configs.load_preset("tiny")
    config = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, num_layers=4, **model),
        stages=dataclasses.replace(tiny.stages, num_stages=1),
        lora=lora,
    )
    module = build_stage(config, 0, device=torch.device("cpu"))
    assert isinstance(module, StageModule)
    module.compile_layers()
    tokens = torch.arange(32).reshape(2, 16)
    others = {"documents_BT": torch.arange(16).div(5).long().expand(2, 16)} if documents else {}
    for microbatch in range(2):
        key = DropoutKey(seed=1, microbatch=microbatch)
        module(tokens, targets_BT=tokens, dropout_key=key, **others).backward()
    assert counter.frame_count == num_graphs
