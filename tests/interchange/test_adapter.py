"""Adapters learn as peft's do, and are exported in peft's form or merged."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm.config import DataConfig, LoraConfig, OptimizerConfig, RoundsConfig, RunConfig
from swarm.errors import IntegrityError
from swarm.interchange import origin, run_folder
from swarm.interchange.adapter import export_adapter
from swarm.interchange.export import Card, Origin, export_model
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source
from swarm.interchange.weights import Weights
from swarm.model.stages import parameter_shapes
from tests.interchange.small_models import POSITIONS, VOCABULARY, make_tokens, save
from tests.support.wire_chain import WireChain

# peft uses this deprecated name of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

STEPS = 8
LEARNING_RATE, DECAY, CLIP = 5e-3, 0.1, 1.0
EPSILON = 1e-4
"""If a gradient is nearly 0, Adam with a smaller epsilon would magnify its rounding errors."""
CASES = {"llama-3": ("all-linear",), "qwen2": ("q_proj", "v_proj", "down_proj"), "gpt2": ("all-linear",)}


class Samples:
    """Microbatches of random tokens."""

    def tokens(self, index: int) -> np.ndarray[Any, Any]:
        shape = (2, POSITIONS - 3)
        return torch.randint(
            VOCABULARY, shape, generator=torch.Generator().manual_seed(index), dtype=torch.int32
        ).numpy()


def _import(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> RunConfig:
    save(name, folder / "model", dtype)
    config = import_model(Source(folder / "model"), folder / "run", ImportOptions(num_stages=2))
    return dataclasses.replace(
        config,
        lora=LoraConfig(rank=4, alpha=6.0, targets=CASES[name]),
        data=DataConfig(sequence_length=POSITIONS - 4, microbatch_size=2),
        rounds=RoundsConfig(setting="synchronous", round_samples=2),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, warmup_samples=0, weight_decay=DECAY, clip_norm=CLIP, epsilon=EPSILON
        ),
    ).begun()


def _trained(chain: WireChain) -> dict[str, Tensor]:
    return {name: master.detach() for stage in chain.stages for name, master in stage.weights.masters.items()}


def _chain(config: RunConfig, folder: Path) -> WireChain:
    given = run_folder.open_weights(folder / "run", config).load(
        {name for stage in range(2) for name in parameter_shapes(config, stage)}
    )
    return WireChain(config, Samples(), given=given)  # type: ignore[arg-type]  # all that it is asked for


def _origin(config: RunConfig, trained: Mapping[str, Tensor], base: Weights | None) -> Origin:
    card = Card(round=STEPS, num_samples=0, losses={})
    return origin.of_trained(
        config, lambda names: {name: trained[name] for name in names}, base, card, tokenizer="bytes"
    )


def _in_peft(folder: Path, config: RunConfig, begin: Mapping[str, Tensor]) -> tuple[PeftModel, list[float]]:
    """Train the same adapters on the same data with peft and torch's optimizer."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    export_adapter(_origin(config, begin, None), folder / "initial")
    model = PeftModel.from_pretrained(model, folder / "initial", is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # torch's AdamW multiplies in another order than the swarm's AdamW.
    adamw = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        tokens = torch.from_numpy(Samples().tokens(step)).long()
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        adamw.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("name", CASES)
def test_training_follows_peft_and_goes_home_in_both_forms(name: str, tmp_path: Path) -> None:
    config = _import(tmp_path, name)
    chain = _chain(config, tmp_path)
    begin = {name: value.clone() for name, value in _trained(chain).items()}
    losses = [chain.step(step) for step in range(STEPS)]
    reference, expected_losses = _in_peft(tmp_path, config, begin)
    assert losses == pytest.approx(expected_losses, abs=1e-4)
    assert all(bool(value.any()) for value in _trained(chain).values())

    found = _origin(config, _trained(chain), run_folder.open_weights(tmp_path / "run", config))
    export_adapter(found, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = {name: value for name, value in reference.state_dict().items() if "lora_" in name}
    ours = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert ours.keys() == expected.keys()
    for key, value in ours.items():
        assert float((value - expected[key]).abs().max()) < 1e-4, key

    export_model(found, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = loaded(make_tokens()).logits
        assert float((merged(make_tokens()).logits - logits).abs().max()) < 1e-4
        assert float((reference.eval()(make_tokens()).logits - logits).abs().max()) < 1e-3


def test_our_adapters_are_all_that_peft_would_make(tmp_path: Path) -> None:
    """That also holds for the matrices that `all-linear` means."""
    for name in CASES:
        config = _import(tmp_path / name, name)
        begin = _trained(_chain(config, tmp_path / name))
        export_adapter(_origin(config, begin, None), tmp_path / name / "adapter")
        values = json.loads((tmp_path / name / "adapter" / "adapter_config.json").read_text())
        base = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        targets = "all-linear" if CASES[name] == ("all-linear",) else list(CASES[name])
        options = {"fan_in_fan_out": name == "gpt2", "task_type": "CAUSAL_LM"}
        theirs = get_peft_model(base, PeftConfig(r=4, lora_alpha=6, target_modules=targets, **options))
        shapes = {key: value.shape for key, value in theirs.state_dict().items() if "lora_" in key}
        base = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        ours = PeftModel.from_pretrained(base, tmp_path / name / "adapter")
        assert {key: value.shape for key, value in ours.state_dict().items() if "lora_" in key} == shapes
        assert (values["r"], values["lora_alpha"], values["fan_in_fan_out"]) == (4, 6, name == "gpt2")


def test_weights_in_16_bits_compute_as_in_32(tmp_path: Path) -> None:
    """The source's type is kept, and every product is in float32: as in peft on a model that is loaded in float32."""
    config = _import(tmp_path, "qwen2", torch.bfloat16)
    chain = _chain(config, tmp_path)
    held = {parameter.dtype for p in chain.stages for parameter in p.module.parameters() if parameter.ndim > 1}
    assert held == {torch.bfloat16, torch.float32}
    begin = {name: value.clone() for name, value in _trained(chain).items()}
    losses = [chain.step(step) for step in range(STEPS)]
    _, expected_losses = _in_peft(tmp_path, config, begin)
    assert losses == pytest.approx(expected_losses, abs=1e-4)


def test_without_the_model_only_adapters_go_home(tmp_path: Path) -> None:
    config = _import(tmp_path, "qwen2")
    found = _origin(config, _trained(_chain(config, tmp_path)), None)
    with pytest.raises(IntegrityError, match="name it with --base, as the run's first peer did"):
        export_model(found, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    base = run_folder.open_weights(tmp_path / "run", config)
    for weights, fault in (("0" * 64, r"other weights .* \(000000000000\)"), ("", r"\(random ones\)")):
        other = dataclasses.replace(config, model=dataclasses.replace(config.model, weights=weights))
        with pytest.raises(IntegrityError, match=fault):
            origin.of_trained(other, lambda _: {}, base, found.card, tokenizer="bytes")
    plain = dataclasses.replace(config, lora=LoraConfig())
    with pytest.raises(ValueError, match="leave --base out"):
        origin.of_trained(plain, lambda _: {}, base, found.card, tokenizer="bytes")
    with pytest.raises(ValueError, match="export it without --adapter"):
        export_adapter(
            origin.of_trained(plain, lambda _: {}, None, found.card, tokenizer="bytes"), tmp_path / "adapter"
        )
