"""Modules of the users' own classes: each block has its own, what does not fit is one line, and sizes are measured."""

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.model.custom_class import measured
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage, layer_ranges, parameter_shapes
from swarm.types import Block

MODEL = ModelConfig(num_layers=3, d_model=32, num_heads=2, vocab_size=40)
VARIANTS = StagesConfig(num_stages=3, variants=(2, 1, 2), paths=((0, 0, 0), (1, 0, 1)))
DATA = DataConfig(sequence_length=12, microbatch_size=4)


class Mixer(nn.Module):
    """An embedding, a matrix and a frozen factor for each layer, and a readout."""

    width = 0  # Added to the width of what it gives

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        width, vocab_size = config.model.d_model, config.model.vocab_size
        self.embedding = nn.Embedding(vocab_size, width) if stage == 0 else None
        self.layers = nn.ModuleDict({str(layer): nn.Linear(width, width + self.width) for layer in layer_range})
        self.factor = nn.Parameter(torch.ones(5), requires_grad=False)
        self.head = nn.Linear(width, vocab_size) if stage == config.stages.num_stages - 1 else None

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        for layer in self.layers.values():
            hidden = layer(hidden).tanh()
        return hidden if self.head is None else self.head(hidden)


class Other(Mixer):
    pass


class Wide(Mixer):
    width = 1


class Curious(Mixer):
    """Looks at numbers, which the meta device has not."""

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        assert float(inputs.sum()) == 0.0
        return super().forward(inputs, dropout_key=dropout_key)


def _named(own: type[nn.Module]) -> str:
    return f"{own.__module__}:{own.__qualname__}"


def _config(custom_class: Any) -> RunConfig:
    return RunConfig(model=dataclasses.replace(MODEL, custom_class=custom_class), stages=VARIANTS, data=DATA)


def test_each_block_is_made_by_its_own_class() -> None:
    config = _config(tuple((_named(own), "", _named(own)) for own in (Mixer, Other)))
    made = {block: build_stage(config, block, device="cpu") for block in config.blocks}
    kinds = {block: type(module) for block, module in made.items()}
    assert kinds == {Block(0): Mixer, Block(0, 1): Other, Block(1): StageModule, Block(2): Mixer, Block(2, 1): Other}
    assert type(build_stage(config, 2, device="cpu")) is Mixer
    built_in = build_stage(dataclasses.replace(config, model=MODEL), 1, device="cpu").state_dict()
    assert all(torch.equal(value, built_in[name]) for name, value in made[Block(1)].state_dict().items())


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (0, r"gives float32 \[1, 12, 33\] at stage 0, and the next stage takes .* \[1, 12, 32\] \(model.d_model\)$"),
        (1, r"gives float32 \[1, 12, 33\] at stage 1, and the next stage takes .* \[1, 12, 32\] \(model.d_model\)$"),
        (2, r"cannot compute float32 \[1, 12, 32\] at stage 2: RuntimeError: mat1 and mat2 shapes cannot be "),
    ],
)
def test_what_does_not_fit_to_its_neighbours_is_one_line(stage: int, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^model.custom_class '{_named(Wide)}' {fault}") as raised:
        build_stage(_config(_named(Wide)), stage, device="cpu")
    assert "\n" not in str(raised.value)


def test_logits_are_of_the_run_s_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, said in ((lambda outputs: outputs[..., 1:], r"float32 \[1, 12, 39\]"), (lambda _: None, "a NoneType")):
        monkeypatch.setattr(Other, "forward", lambda self, x, given=given, **key: given(Mixer.forward(self, x, **key)))
        with pytest.raises(ValueError, match=rf"gives {said} at stage 2, and the loss takes .* \(model.vocab_size\)$"):
            build_stage(_config(_named(Other)), 2, device="cpu")


def _measured(config: RunConfig, stage: int) -> Any:
    return measured(config, Block(stage), layer_ranges(config)[stage])


def test_what_a_class_takes_is_measured_without_memory() -> None:
    config, tokens = _config(_named(Mixer)), 4 * 12
    first, middle, last = (_measured(config, stage) for stage in range(3))
    assert {name: tuple(shape) for name, shape in middle.trained.items()} == {
        "layers.1.weight": (32, 32), "layers.1.bias": (32,)
    }  # fmt: skip
    assert first.frozen_bytes == middle.frozen_bytes == 4 * 5
    # The linear layer keeps its input and tanh its output; a readout keeps what tanh has kept already.
    assert middle.graph_bytes == last.graph_bytes == 4 * tokens * (32 + 32)
    assert first.graph_bytes == middle.graph_bytes + 8 * tokens, "the token ids"


def test_the_built_in_stages_are_measured_as_they_are_counted() -> None:
    class_of_us = f"{StageModule.__module__}:{StageModule.__qualname__}"
    found = _measured(_config(class_of_us), 1)
    assert found.trained == parameter_shapes(_config(""), 1)


def test_the_size_of_a_class_that_looks_at_numbers_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert _measured(_config(_named(Curious)), 1) is None
    assert "how much memory stage 1 takes is not known: " in caplog.text
    assert type(build_stage(_config(_named(Curious)), 1, device="cpu")) is Curious
    with pytest.raises(ValueError, match=r"model.custom_class 'no.such:Class' cannot be imported"):
        _measured(_config("no.such:Class"), 1)
