"""Rows of several documents: each is computed as if it were alone."""

from typing import Any

import pytest
import torch

from swarm.config import DataConfig, ModelConfig, RunConfig, StagesConfig
from swarm.model.masks import DropoutKey
from swarm.model.stages import Transformer, build_stage, build_transformer
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS, Samples

LENGTHS = ((5, 9, 1, 6), (21,), (2, 2, 17))
KINDS: dict[str, dict[str, Any]] = {
    "rotary": {}, "grouped": {"num_kv_heads": 2}, "scaled": {"rope_scaling": "linear", "rope_factor": 4.0},
    "learned": {"positions": "learned", "max_positions": 24, "norm": "layer", "feed_forward": "gelu"},
    "bottleneck": {"bottleneck_dim": 8}, "checkpointed": {"gradient_checkpointing": True},
}  # fmt: skip


def _config(num_stages: int = 1, **model: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=3, d_model=32, num_heads=4, vocab_size=64, **model),
        stages=StagesConfig(num_stages=num_stages),
        data=DataConfig(dataset="x.jsonl", format="chat", sequence_length=20),
    )


def _packed() -> Samples:
    tokens_BT1 = torch.randint(64, (3, 21), generator=torch.Generator().manual_seed(0))
    documents = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
    targets_BT1 = (torch.rand(3, 21, generator=torch.Generator().manual_seed(1)) < 0.5).int()
    return {TOKENS: tokens_BT1.int(), TARGETS: targets_BT1, DOCUMENTS: torch.stack(documents).int()}


def _alone(packed: Samples) -> list[Samples]:
    """The documents of the packed rows, one by one."""
    found: list[Samples] = []
    for row, lengths in enumerate(LENGTHS):
        pieces = {name: torch.split(packed[name][row : row + 1], list(lengths), dim=1) for name in (TOKENS, TARGETS)}
        found += [{name: piece[number] for name, piece in pieces.items()} for number in range(len(lengths))]
    return found


def _gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_alone(kind: str) -> None:
    """Logits, losses and gradients are those of the documents alone."""
    config, packed = _config(**KINDS[kind]), _packed()
    model, other = build_transformer(config, device="cpu"), build_transformer(config, device="cpu")
    logits_BTV = model(packed[TOKENS].long(), documents_BT=packed[DOCUMENTS])
    alone = [other(document[TOKENS].long())[0] for document in _alone(packed)]
    torch.testing.assert_close(logits_BTV.flatten(0, 1), torch.cat(alone), rtol=0, atol=1e-5)
    loss = model.summed_loss(packed)
    # A token that is alone predicts nothing.
    longer = [document for document in _alone(packed) if document[TOKENS].shape[1] > 1]
    expected = sum((other.summed_loss(document) for document in longer), torch.zeros(()))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.autograd.backward([loss, expected])
    for name, gradient in _gradients(model).items():
        torch.testing.assert_close(gradient, _gradients(other)[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_stay_apart_under_any_cut(kind: str, num_stages: int) -> None:
    packed, key = _packed(), DropoutKey(seed=0, microbatch=1)
    config = _config(num_stages, dropout=0.1, **KINDS[kind])
    documents_BT, tokens_BT = packed[DOCUMENTS], packed[TOKENS].long()
    expected = build_transformer(config, device="cpu")(tokens_BT, dropout_key=key, documents_BT=documents_BT)
    hidden = tokens_BT
    for stage in range(num_stages):
        module = build_stage(config, stage, device="cpu")
        extra = {"tokens_BT": tokens_BT} if kind == "bottleneck" and stage else {}
        hidden = module(hidden, dropout_key=key, documents_BT=documents_BT, **extra)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)
