"""Any cut computes what the uncut model computes, from the same initial weights."""

import dataclasses
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.model.attention import rotary_tables
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule, stage_loss
from swarm.model.stages import build_stage, build_transformer, layer_ranges

MODEL = ModelConfig(num_layers=4, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=40, dropout=0.2)
KEY = DropoutKey(seed=3, microbatch=11)
CUTS = [(4,), (1, 3), (1, 2, 1), (2, 0, 2), (0, 4), (1, 1, 1, 1)]


def make_config(cut: tuple[int, ...], **model: Any) -> RunConfig:
    return RunConfig(
        model=dataclasses.replace(MODEL, **model),
        stages=StagesConfig(num_stages=len(cut), layers_per_stage=cut),
        data=DataConfig(sequence_length=12, seed=5),
    )


def make_stages(config: RunConfig) -> list[nn.Module]:
    return [build_stage(config, stage, device="cpu") for stage in range(config.stages.num_stages)]


def make_tokens() -> torch.Tensor:
    return torch.randint(0, MODEL.vocab_size, (3, 13), generator=torch.Generator().manual_seed(0))


def loss_and_gradients(stages: list[nn.Module], key: DropoutKey | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run forward and backward through the stages, with a cut of the graph between them, as peers do."""
    tokens = make_tokens()
    inputs, outputs = [tokens[:, :-1]], []
    for stage in stages:
        options: dict[str, Any] = {"tokens_BT": tokens[:, :-1]} if getattr(stage, "fixed_columns", None) else {}
        options["dropout_key"] = key
        if stage is stages[-1]:
            parameters = dict(stage.named_parameters())
            outputs.append(stage_loss(stage, parameters, inputs[-1], tokens[:, 1:], **options))
        else:
            outputs.append(stage(inputs[-1], **options))
        inputs.append(outputs[-1].detach().requires_grad_())
    loss = inputs[-1] / tokens[:, 1:].numel()
    torch.autograd.backward(loss)
    gradients: dict[str, Any] = {}
    for stage, output, passed_on in zip(reversed(stages), reversed(outputs), reversed(inputs[1:]), strict=True):
        torch.autograd.backward(output, passed_on.grad)
        gradients |= {name: parameter.grad for name, parameter in stage.named_parameters()}
    return loss.detach(), gradients


NARROW: dict[str, Any] = {"bottleneck_dim": 6}
LEARNED: dict[str, Any] = {**NARROW, "bottleneck": "learned", "bottleneck_layers": (1, 3)}
LEARNED_CUTS = [(4,), (1, 3), (3, 1), (1, 2, 1)]


@pytest.mark.parametrize(
    ("cut", "key", "model"),
    [
        *((cut, key, {}) for cut in CUTS for key in (KEY, None)),
        *((cut, KEY, NARROW | {"gradient_checkpointing": again}) for cut in CUTS if cut[-1] for again in (False, True)),
        *((cut, KEY, LEARNED | {"gradient_checkpointing": again}) for cut in LEARNED_CUTS for again in (False, True)),
        *((cut, KEY, LEARNED | {"tied_embeddings": True}) for cut in LEARNED_CUTS[:1]),
        *((cut, KEY, LEARNED | {"bottleneck": "anchored"}) for cut in LEARNED_CUTS[:1]),
    ],
)
def test_any_cut_is_the_uncut_model(cut: tuple[int, ...], key: DropoutKey | None, model: dict[str, Any]) -> None:
    """Loss and gradients are the same bits, and the parameters have the same names."""
    config = make_config(cut, **model)
    reference, stages = build_transformer(config, device="cpu"), make_stages(config)
    _set_bottlenecks((reference, *stages))
    expected = reference.loss(make_tokens(), key)
    torch.autograd.backward(expected)
    loss, gradients = loss_and_gradients(stages, key)
    assert torch.equal(loss, expected)
    assert gradients.keys() == dict(reference.named_parameters()).keys() == reference.state_dict().keys()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=0)


def _set_bottlenecks(stages: Iterable[nn.Module]) -> None:
    """Give the matrices of learned bottlenecks, which begin as zeros, numbers that follow from their names."""
    with torch.no_grad():
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if "coder" in name:
                    parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(name) + int(name[7])))


@pytest.mark.parametrize("kind", ["learned", "anchored"])
@pytest.mark.parametrize("cut", LEARNED_CUTS)
def test_learned_bottlenecks_compute_what_their_formulas_say(cut: tuple[int, ...], kind: str) -> None:
    """In float64, by the layers of a model without bottlenecks, and matrices between these."""
    stages, tokens = make_stages(make_config(cut, **LEARNED | {"bottleneck": kind})), make_tokens()
    _set_bottlenecks(stages)
    shapes = {name: tuple(p.shape) for stage in stages for name, p in stage.named_parameters() if "coder" in name}
    around_1 = {"layers.0.encoder.weight": (6, 32), "layers.1.decoder.weight": (32, 32)}
    around_3 = {"layers.2.encoder.weight": (6, 32), "layers.3.decoder.weight": (32, 32)}
    assert shapes == around_1 | around_3
    loss, gradients = loss_and_gradients(stages, None)

    table_VC = torch.cat([buffer for stage in stages for buffer in stage.buffers()]).double()[:40]
    assert table_VC.shape == (40, 26)
    plain = make_stages(make_config((4,)))[0].double()
    assert isinstance(plain, StageModule)
    assert plain.embedding is not None
    assert plain.head is not None
    weights = {name: p.detach().double() for stage in stages for name, p in stage.named_parameters()}
    plain.load_state_dict({name: value for name, value in weights.items() if "coder" not in name})
    coders = {name: weights[name].requires_grad_() for name in shapes}
    cos_TJ, sin_TJ = (table.double() for table in rotary_tables(MODEL, torch.arange(12)))
    hidden = plain.embedding(tokens[:, :-1])
    for number, layer in enumerate(plain.layers.values()):
        if (decoder := coders.get(f"layers.{number}.decoder.weight")) is not None:
            fixed = table_VC[tokens[:, :-1]]
            decoded = torch.cat((hidden, fixed), dim=-1) @ decoder.T
            stays = torch.zeros_like(fixed) if kind == "anchored" else fixed
            hidden = torch.cat((hidden, stays), dim=-1) + decoded
        hidden = layer(hidden, None, cos_TJ, sin_TJ, None)
        if (encoder := coders.get(f"layers.{number}.encoder.weight")) is not None:
            hidden = hidden[..., :6] + hidden @ encoder.T
    expected = F.cross_entropy(plain.head(hidden, None).flatten(0, 1), tokens[:, 1:].flatten())
    torch.autograd.backward(expected)
    assert float(loss) == pytest.approx(float(expected.detach()), abs=1e-6)
    wanted = {name: p.grad for name, p in plain.named_parameters()} | {name: p.grad for name, p in coders.items()}
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient is not None
        torch.testing.assert_close(gradients[name].double(), gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("cut", CUTS)
def test_initial_weights_do_not_depend_on_the_cut_or_the_global_state(cut: tuple[int, ...]) -> None:
    torch.manual_seed(len(cut))
    config = make_config(cut)
    joined: dict[str, torch.Tensor] = {}
    for module in make_stages(config):
        assert joined.keys().isdisjoint(module.state_dict())
        joined |= module.state_dict()
    expected = build_transformer(config, device="cpu").state_dict()
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], expected[name]) for name in expected)


def test_initial_weights_follow_from_seed_and_name_with_the_configured_deviation() -> None:
    config = make_config((4,), d_model=128)
    weights = build_stage(config, 0, device="cpu").state_dict()
    assert weights["layers.1.attention.q.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.1.attention.output.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert weights["layers.1.feed_forward.down.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert torch.equal(weights["head.norm.weight"], torch.ones(128))
    assert not torch.equal(weights["layers.1.attention.q.weight"], weights["layers.2.attention.q.weight"])
    other = dataclasses.replace(config, data=DataConfig(seed=6))
    assert not torch.equal(
        build_stage(other, 0, device="cpu").state_dict()["embedding.weight"], weights["embedding.weight"]
    )


def test_initial_weights_stay_what_they_were() -> None:
    """Peers on other processors and of other releases must start from the same bits."""
    weight_VD = build_stage(make_config((4,)), 0, device="cpu").state_dict()["embedding.weight"]
    assert weight_VD[0, :3].tolist() == [0.03125564008951187, 0.01788170263171196, 0.02693355269730091]


@pytest.mark.parametrize("autocast", ["off", "bf16"])
@pytest.mark.parametrize("cut", [(4,), (1, 2, 1)])
def test_gradient_checkpointing_changes_no_gradient(cut: tuple[int, ...], autocast: str) -> None:
    loss, gradients = loss_and_gradients(make_stages(make_config(cut, autocast=autocast)), KEY)
    checkpointed = make_stages(make_config(cut, autocast=autocast, gradient_checkpointing=True))
    again, recomputed = loss_and_gradients(checkpointed, KEY)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_functional_call_uses_the_given_weights_in_backward_too(checkpointing: bool) -> None:
    """A checkpointed layer that is computed again with the module's own weights would give neither one's gradient."""
    config = make_config((4,), gradient_checkpointing=checkpointing)
    tokens = make_tokens()
    trained = build_transformer(make_config((4,)), device="cpu")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    torch.autograd.backward(trained.loss(tokens, KEY))

    module = build_stage(config, 0, device="cpu")
    weights = {name: p.detach().clone().requires_grad_() for name, p in trained.named_parameters()}
    logits = functional_call(module, weights, (tokens[:, :-1],), {"dropout_key": KEY})
    torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=0, atol=1e-7)


def test_bf16_autocast_stays_near_float32() -> None:
    loss, gradients = loss_and_gradients(make_stages(make_config((1, 2, 1))), KEY)
    cast_stages = make_stages(make_config((1, 2, 1), autocast="bf16"))
    cast_loss, cast_gradients = loss_and_gradients(cast_stages, KEY)
    assert not torch.equal(cast_loss, loss)
    assert cast_loss.item() == pytest.approx(loss.item(), rel=1e-2)
    for name, gradient in cast_gradients.items():
        assert gradient.dtype == torch.float32
        assert (gradient - gradients[name]).norm() < 0.05 * gradients[name].norm(), name
    hidden = cast_stages[0](make_tokens(), dropout_key=None)
    assert hidden.dtype == torch.float32
    assert cast_stages[2](hidden, dropout_key=None).dtype == torch.float32


@given(num_layers=st.integers(1, 60), data=st.data())
def test_layer_ranges_are_an_even_partition_with_the_remainder_in_the_middle(
    num_layers: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    config = RunConfig(model=ModelConfig(num_layers=num_layers), stages=StagesConfig(num_stages=num_stages))
    ranges = layer_ranges(config)
    assert [layer for layer_range in ranges for layer in layer_range] == list(range(num_layers))
    sizes = [len(layer_range) for layer_range in ranges]
    assert max(sizes) - min(sizes) <= 1
    peak = sizes.index(max(sizes))
    assert sizes[: peak + 1] == sorted(sizes[: peak + 1])
    assert sizes[peak:] == sorted(sizes[peak:], reverse=True)
    assert abs(sum(sizes[: num_stages // 2]) - sum(sizes[(num_stages + 1) // 2 :])) <= 1


class Mixer(nn.Module):
    """A model of a user's own: one weight for each layer, an embedding and a readout."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        d_model, vocab_size = config.model.d_model, config.model.vocab_size
        self.embedding = nn.Embedding(vocab_size, d_model) if stage == 0 else None
        self.layers = nn.ModuleDict({str(layer): nn.Linear(d_model, d_model) for layer in layer_range})
        self.head = nn.Linear(d_model, vocab_size) if stage == config.stages.num_stages - 1 else None

    def forward(self, inputs: torch.Tensor, *, dropout_key: DropoutKey | None) -> torch.Tensor:
        hidden = self.embedding(inputs) if self.embedding is not None else inputs
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).cumsum(dim=1)
        return self.head(hidden) if self.head is not None else hidden


class SeededMixer(Mixer):
    """A model that sets its own initial weights."""

    def init_parameters(self, seed: int) -> None:
        for parameter in self.parameters():
            nn.init.constant_(parameter, seed)


class Broken(Mixer):
    """A model that fails in one way or another."""

    error: Exception = RuntimeError("mat1 and mat2\nshapes cannot be multiplied")

    def init_parameters(self, seed: int) -> None:
        raise self.error


class Greedy(Mixer):
    """A model that does not fit on any machine."""

    def init_parameters(self, seed: int) -> None:
        torch.empty(1 << 50)


@pytest.fixture
def _custom_models(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("custom_models")
    vars(module).update(Mixer=Mixer, SeededMixer=SeededMixer, Broken=Broken, Greedy=Greedy, number=3)
    monkeypatch.setitem(sys.modules, "custom_models", module)


@pytest.mark.usefixtures("_custom_models")
def test_a_custom_class_is_cut_and_initialised_like_the_built_in_one() -> None:
    whole = loss_and_gradients(make_stages(make_config((4,), custom_class="custom_models:Mixer")), KEY)
    parts = make_stages(make_config((1, 2, 1), custom_class="custom_models:Mixer"))
    cut = loss_and_gradients(parts, KEY)
    assert torch.equal(whole[0], cut[0])
    assert whole[1].keys() == cut[1].keys()
    assert all(torch.equal(whole[1][name], cut[1][name]) for name in whole[1])
    assert torch.equal(parts[0].state_dict()["layers.0.bias"], torch.zeros(32))


def test_a_custom_class_has_no_built_in_reference() -> None:
    with pytest.raises(ValueError, match="build_stage"):
        build_transformer(make_config((4,), custom_class="package.module:Class"), device="cpu")


@pytest.mark.usefixtures("_custom_models")
def test_a_custom_class_may_initialise_itself() -> None:
    stage = build_stage(make_config((4,), custom_class="custom_models:SeededMixer"), 0, device="cpu")
    assert all(torch.equal(p, torch.full_like(p, 5.0)) for p in stage.parameters())


@pytest.mark.usefixtures("_custom_models")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("no_such_package.module:Class", "cannot be imported"),
        ("custom_models:Missing", "cannot be imported"),
        ("not a name", "cannot be imported"),
        (":Class", "cannot be imported"),
        ("custom_models:number", "not a class derived from torch.nn.Module"),
        ("builtins:dict", "not a class derived from torch.nn.Module"),
    ],
)
def test_a_wrong_custom_class_is_named_in_one_line(name: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as raised:
        build_stage(make_config((4,), custom_class=name), 0, device="cpu")
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_module_that_fails_as_it_is_imported_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_models.py").write_text("raise RuntimeError('wrong\\nversion')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^model.custom_class 'broken_models:A' cannot be imported \(wrong version\)"):
        build_stage(make_config((4,), custom_class="broken_models:A"), 0, device="cpu")


@pytest.mark.usefixtures("_custom_models")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Broken.error, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        (TypeError("takes 3 positional arguments"), "TypeError: takes 3 positional arguments"),
    ],
)
def test_a_custom_class_that_fails_is_named_in_one_line(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "error", error)
    expected = f"^model.custom_class 'custom_models:Broken' cannot be made for stage 1: {reason}$"
    with pytest.raises(ValueError, match=expected):
        build_stage(make_config((2, 2), custom_class="custom_models:Broken"), 1, device="cpu")


@pytest.mark.usefixtures("_custom_models")
def test_a_custom_class_that_does_not_fit_is_no_fault_of_it() -> None:
    with pytest.raises(RuntimeError) as raised:
        build_stage(make_config((4,), custom_class="custom_models:Greedy"), 0, device="cpu")
    assert is_out_of_memory(raised.value)
