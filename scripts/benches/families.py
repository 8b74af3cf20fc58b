"""Do models of Hugging Face compute the same here as there, and are they unchanged after import and export?"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from scripts.benches.shared import theirs
from scripts.benches.shared.common import OutputOptions, say
from swarm.config import RunConfig
from swarm.errors import IntegrityError
from swarm.interchange import origin, run_folder
from swarm.interchange.export import export_model
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source
from swarm.model.stages import build_stage, parameter_shapes

NUM_STAGES, NUM_LAYERS, WIDTH, VOCABULARY = 3, 6, 128, 512
POSITIONS = 64  # Tokens of each of four samples
MOST_LOGIT_DIFF, MOST_KL = 1e-4, 1e-8


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Compare every family with transformers, before and after import and export."""


def run(options: Options) -> dict[str, Any]:
    theirs.be_quiet()
    found = {}
    for name, make in _models().items():
        say(name)
        with tempfile.TemporaryDirectory(prefix="bench-families-") as folder:
            found[name] = _measure(make(), Path(folder))
    passed = all(
        figures["max_logit_diff"] < MOST_LOGIT_DIFF and figures["kl"] < MOST_KL and figures["roundtrip_exact"]
        for figures in found.values()
    )
    return {"families": found, "passed": passed}


def _models() -> dict[str, Callable[[], Any]]:
    """Functions that make models with random weights, by family; together they cover all differences."""
    num_heads = WIDTH // 16
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH + 16,
        "num_hidden_layers": NUM_LAYERS, "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2, "max_position_embeddings": POSITIONS,
    }  # fmt: skip
    llama3 = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": POSITIONS // 4,
    }  # fmt: skip
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": NUM_LAYERS}
    t = transformers
    return {
        "llama-2": lambda: t.LlamaForCausalLM(t.LlamaConfig(**{**sizes, "num_key_value_heads": num_heads})),
        "llama-3": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, rope_parameters=llama3)),
        "llama-3-tied": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**sizes, rope_parameters=llama3, tie_word_embeddings=True)
        ),
        "llama-linear-biases": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**sizes, rope_parameters=linear, attention_bias=True, mlp_bias=True)
        ),
        "smollm2": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=True)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**sizes, head_dim=24, sliding_window=None)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**sizes, tie_word_embeddings=True)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes, head_dim=32)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, n_head=num_heads, n_positions=POSITIONS)),
    }


@torch.no_grad()
def _measure(model: Any, folder: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Norms and biases get random values as well, so that a missing one is noticed.
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1.0 + 0.1 * noise if parameter.ndim == 1 else noise / WIDTH**0.5)
    model.eval().save_pretrained(folder / "in")
    config = import_model(Source(folder / "in"), folder / "run", ImportOptions(num_stages=NUM_STAGES))
    tokens_BT = torch.randint(0, VOCABULARY, (4, POSITIONS), generator=generator)
    ours, theirs = _logits(config, folder / "run", tokens_BT), model(tokens_BT).logits
    log_ours, log_theirs = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
    export_model(origin.from_run_folder(folder / "run"), folder / "out")
    return {
        "max_logit_diff": float((ours - theirs).abs().max()),
        "kl": float((log_theirs.exp() * (log_theirs - log_ours)).sum(-1).abs().max()),
        "roundtrip_exact": _is_same(folder / "in", folder / "out"),
    }


def _logits(config: RunConfig, folder: Path, tokens_BT: Tensor) -> Tensor:
    """The logits of all stages, computed one after the other. Each stage reads its own weights."""
    weights = run_folder.open_weights(folder, config)
    hidden = tokens_BT
    for stage in range(NUM_STAGES):
        given = weights.load(parameter_shapes(config, stage))
        hidden = build_stage(config, stage, device="cpu", weights=given)(hidden, dropout_key=None)
    return hidden


def _is_same(before: Path, after: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in (before, after))
    if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
        return False
    _, report = transformers.AutoModelForCausalLM.from_pretrained(after, output_loading_info=True)
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise IntegrityError(f"transformers reports {report}")
    return True
