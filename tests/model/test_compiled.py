"""torch.compile on a stage's layers. A backend counts the graphs, and runs them without compiling."""

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from swarm import config as configs
from swarm.config import LoraConfig, ModelConfig, RunConfig
from swarm.model.compiled import compiles
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import MOST_VARIANTS, StageModule
from swarm.model.stages import build_stage


# torch.compile looks at .grad of the tensors that it finds, and makes an instance of autograd.Function.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "lora", "documents", "num_graphs"),
    [
        ({}, LoraConfig(), False, 1),
        pytest.param({}, LoraConfig(), True, 1, marks=pytest.mark.slow),
        # A layer may have an encoder, or a decoder.
        pytest.param(
            {"bottleneck_dim": 32, "bottleneck": "learned", "bottleneck_layers": (2,)},
            LoraConfig(),
            False,
            3,
            marks=pytest.mark.slow,
        ),
        # A layer's two parts are compiled apart.
        pytest.param({"block_types": "tp", "num_shards": 2}, LoraConfig(), False, 2, marks=pytest.mark.slow),
        # The first layer's inputs need no gradient.
        ({}, LoraConfig(rank=4), False, 2),
    ],
)
def test_layers_share_what_is_compiled(
    model: dict[str, Any], lora: LoraConfig, documents: bool, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, module = _counted(monkeypatch, lora=lora, **model)
    tokens = torch.arange(32).reshape(2, 16)
    others = {"documents_BT": torch.arange(16).div(5).long().expand(2, 16)} if documents else {}
    for microbatch in range(2):
        key = DropoutKey(seed=1, microbatch=microbatch)
        module(tokens, targets_BT=tokens, dropout_key=key, **others).backward()
    assert counter.frame_count == num_graphs


def _counted(
    monkeypatch: pytest.MonkeyPatch, *, lora: LoraConfig | None = None, **model: Any
) -> tuple[CompileCounter, StageModule]:
    """Four compiled layers, and what counts the pieces of code that are made for them."""
    torch._dynamo.reset()
    counter, compile_layer = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: compile_layer(self, backend=counter, **kwargs))
    tiny = configs.load_preset("tiny")
    config = dataclasses.replace(
        tiny, model=dataclasses.replace(tiny.model, num_layers=4, **model),
        stages=dataclasses.replace(tiny.stages, num_stages=1), lora=lora or LoraConfig(),
    )  # fmt: skip
    module = build_stage(config, 0, device=torch.device("cpu"))
    assert isinstance(module, StageModule)
    module.compile_layers()
    return counter, module


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_thread_of_its_own_may_have_more_kinds_of_calls_than_torch_allows_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter, module = _counted(monkeypatch)
    found = list[int]()

    def compute() -> None:
        module(torch.ones(2, 8, dtype=torch.int64))
        found.append(torch._dynamo.config.recompile_limit)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert (counter.frame_count, found) == (1, [MOST_VARIANTS])


CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("model", [{"dropout": 0.1}, {"custom_class": "package.module:Class"}])
def test_what_cannot_be_compiled_and_is_to_be_is_refused(model: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--compile on is"):
        compiles("on", RunConfig(model=ModelConfig(**model)), CPU)


def test_without_a_compiler_one_line_says_so_and_what_was_compiled_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(function: object) -> object:
        raise RuntimeError("\n  No working C++ compiler found\nand much more")

    counter, module = _counted(monkeypatch)
    monkeypatch.setattr(torch, "compile", fails)
    try:
        assert not compiles("on", RunConfig(), CPU)
        module(torch.ones(2, 4, dtype=torch.int64))
    finally:
        torch.compiler.set_stance("default")
    assert [record.message for record in caplog.records] == [
        "goes on uncompiled, and so slower: this machine makes no code for cpu (No working C++ compiler found)"
    ]
    assert counter.frame_count == 0
