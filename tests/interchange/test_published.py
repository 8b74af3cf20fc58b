"""Models are taken in with the config.json that their authors published, whatever keys it has.

published.json has these files, and says of each where it comes from. The models are made here at a fraction of their
size, with the same keys and random weights, by transformers.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swarm.interchange.families.known import read_config
from swarm.interchange.source import Source
from tests.interchange.small_models import logits_of

_FILE = json.loads((Path(__file__).parent / "published.json").read_text())
PUBLISHED: dict[str, dict[str, Any]] = _FILE["found"] | _FILE["composed"]
REFUSED = {
    "microsoft/Phi-3.5-mini-instruct": "rotary positions of type 'longrope' are not supported",
    "microsoft/Phi-4-mini-instruct": "partial_rotary_factor = 0.75 is not supported",
    "google/gemma-2-2b-it": "the architecture 'Gemma2ForCausalLM' is not supported",
}
VOCABULARY, POSITIONS, HEAD_WIDTH = 131, 64, 8


def _small(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with smaller numbers: as many query heads for each key head, and the same ratios."""
    heads = "n_head" if "n_head" in config else "num_attention_heads"
    num_kv_heads = min(2, config.get("num_key_value_heads", config[heads]))
    num_heads = num_kv_heads * config[heads] // config.get("num_key_value_heads", config[heads])
    width = config.get("hidden_size") or config["n_embd"]
    longest = config.get("max_position_embeddings") or config["n_positions"]
    small = {
        "num_key_value_heads": num_kv_heads,
        heads: num_heads,
        "head_dim": HEAD_WIDTH * config.get("head_dim", 0) * config[heads] // width,
        "intermediate_size": 40,
        **dict.fromkeys(("hidden_size", "n_embd"), HEAD_WIDTH * num_heads),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "max_window_layers"), 2),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), POSITIONS),
        "vocab_size": VOCABULARY,
    }
    if config.get("sliding_window"):
        small["sliding_window"] = max(8, POSITIONS * config["sliding_window"] // longest)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = config.get(key)
        small[key] = [one % VOCABULARY for one in token] if isinstance(token, list) else token and token % VOCABULARY
    if isinstance(scaling := config.get("rope_scaling"), dict):
        original = POSITIONS * scaling["original_max_position_embeddings"] // longest
        small["rope_scaling"] = scaling | {"original_max_position_embeddings": original}
    return {key: small.get(key, value) for key, value in config.items()}


def _save(config: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Save a small model, with its config.json as published, and return it."""
    path = folder / "config.json"
    path.write_text(json.dumps(_small(config)))
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.ndim == 1) + 0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    path.write_text(json.dumps(_small(config)))
    return model


@pytest.mark.parametrize("name", PUBLISHED)
@torch.no_grad()
def test_a_published_model_computes_what_transformers_computes(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, full = read_config(tmp_path / "config.json")
    assert full.num_layers == config.get("num_hidden_layers", config.get("n_layer"))
    model = _save(config, tmp_path)
    source = Source(tmp_path)
    longest = min(POSITIONS, source.model.max_positions)
    tokens_BT = torch.randint(0, VOCABULARY, (2, longest), generator=torch.Generator().manual_seed(1))
    theirs = model(tokens_BT).logits
    assert theirs.std() > 0.1
    assert (logits_of(source, tokens_BT) - theirs).abs().max() < 1e-4
    assert not [record for record in caplog.records if record.name.startswith("swarm")]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_with_our_switches_is_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_FILE["refused"][name]))
    with pytest.raises(ValueError, match=REFUSED[name]):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "rope_interleaved", True),
        ("Qwen/Qwen3-0.6B", "logits_soft_cap", 30.0),
        ("openai-community/gpt2", "add_cross_attention", True),
    ],
)
def test_a_value_that_changes_the_computation_is_refused_by_name(
    name: str, key: str, value: object, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name] | {key: value}))
    with pytest.raises(ValueError, match=rf"{key} = {value}"):
        read_config(tmp_path / "config.json")


def test_unknown_keys_without_a_value_are_ignored_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = PUBLISHED["meta-llama/Llama-3.2-1B"] | {"novel": False, "newer": None, "newest": {}, "bos": ""}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        read_config(tmp_path / "config.json")
    (line,) = caplog.messages
    assert "bos, newer, newest, novel" in line
    assert str(tmp_path) in line
