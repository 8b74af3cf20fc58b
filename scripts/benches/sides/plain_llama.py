"""For the bench `gpu`: the training loop that one would write with torch alone, with the weights and data of a run."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.benches.sides.gpu_stage import synchronise
from scripts.benches.sides.reference import torch_adamw
from swarm.config import ModelConfig, RunConfig
from swarm.data.microbatches import Microbatches
from swarm.model.transformer import build_transformer
from swarm.training.samples import TOKENS


class PlainLayer(nn.Module):
    """A layer of Llama."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, wide, self.num_heads = model.d_model, model.feed_forward_width, model.num_heads
        self.attention_norm = nn.RMSNorm(width, model.norm_epsilon)
        self.q, self.k, self.v, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.feed_forward_norm = nn.RMSNorm(width, model.norm_epsilon)
        self.gate, self.up = nn.Linear(width, wide, bias=False), nn.Linear(width, wide, bias=False)
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, hidden_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        normed_BTD = self.attention_norm(hidden_BTD)
        q, k, v = (
            each(normed_BTD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = (heads * cos_TK + _turned(heads) * sin_TK for heads in (q, k))
        mixed = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        hidden_BTD = hidden_BTD + self.output(mixed.transpose(1, 2).flatten(2))
        normed_BTD = self.feed_forward_norm(hidden_BTD)
        output_BTD: Tensor = self.down(F.silu(self.gate(normed_BTD)) * self.up(normed_BTD))
        return hidden_BTD + output_BTD


def _turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainLlama(nn.Module):
    """The model, with the weights of a run's."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        model, length = config.model, config.data.sequence_length
        self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.d_model, model.norm_epsilon)
        self.head = nn.Linear(model.d_model, model.vocab_size, bias=False)
        width = model.width_of_heads
        frequencies = model.rope_theta ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos_TK", angles.cos())
        self.register_buffer("sin_TK", angles.sin())
        renamed = {_own_name(name): value for name, value in build_transformer(config, device="cpu").named_parameters()}
        self.load_state_dict(renamed, strict=False)
        assert renamed.keys() == dict(self.named_parameters()).keys(), "each weight has its place"

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, self.cos_TK, self.sin_TK)
        logits_BTV = self.head(self.norm(hidden_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def _own_name(name: str) -> str:
    for ours, own in (
        ("attention.", ""), ("feed_forward.", ""), ("head.norm", "norm"), ("head.output", "head"),
    ):  # fmt: skip
        name = name.replace(ours, own)
    return name


@dataclass(frozen=True, kw_only=True)
class PlainFigures:
    """What a training came to, with the mean loss of each step."""

    tokens_per_second: float
    losses: list[float]
    peak_bytes: int


def train(
    config: RunConfig, data: Microbatches, device: torch.device, *, warm_up: int, steps: int, compiles: bool
) -> PlainFigures:
    """Train a synchronous run: some steps to warm up, and then those whose time counts."""
    cuda, optimizer_config = device.type == "cuda", config.gradient_step
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
        torch.set_float32_matmul_precision("high")
    model = PlainLlama(config).to(device)
    compute = torch.compile(model) if compiles else model
    optimizer = torch_adamw(model, optimizer_config, fused=True)
    size, narrow = config.microbatches_per_round, config.model.autocast == "bf16"
    losses, began_at = [], 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            synchronise(device)
            began_at = time.perf_counter()
        total = torch.zeros((), device=device)
        for number in range(step * size, (step + 1) * size):
            tokens = data.samples(number)[TOKENS].to(device, non_blocking=True).long()
            with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                loss = compute(tokens[:, :-1], tokens[:, 1:]) / size
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), optimizer_config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    synchronise(device)
    seconds = time.perf_counter() - began_at
    return PlainFigures(
        tokens_per_second=steps * size * config.data.tokens_per_microbatch / seconds,
        losses=[float(loss) for loss in losses],
        peak_bytes=int(torch.cuda.max_memory_allocated(device)) if cuda else 0,
    )
