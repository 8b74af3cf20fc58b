"""Block types: tp is the ordinary layer, all follow docs/block-types.md, and shards may be in several processes."""

import dataclasses
import threading
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from swarm.config import DataConfig, LoraConfig, ModelConfig, RunConfig, StagesConfig
from swarm.model.adapters import trained_parameters
from swarm.model.cache import KeyValueCache
from swarm.model.masks import DropoutKey
from swarm.model.shards import Shards, cut_axis, part_of, sum_here, sum_over, whole_of
from swarm.model.stage_module import stage_loss
from swarm.model.stages import Transformer, build_stage, build_transformer

LLAMA = ModelConfig(num_layers=4, d_model=32, num_heads=4, num_kv_heads=2, vocab_size=40, init_std=0.2, dropout=0.1)
QWEN = dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True, head_width=12, tied_embeddings=True)
GPT2 = ModelConfig(
    num_layers=4, d_model=32, num_heads=4, vocab_size=40, init_std=0.2, dropout=0.1, positions="learned",
    max_positions=16, norm="layer", feed_forward="gelu", qkv_bias=True, attention_output_bias=True,
    feed_forward_bias=True,
)  # fmt: skip
FAMILIES = {"llama": LLAMA, "qwen": QWEN, "gpt2": GPT2}
MIXTURE = ("tp", "parallel", "parallel", "spd")
TYPES = ["tp", "spd", "parallel", MIXTURE]
KEY = DropoutKey(seed=3, microbatch=11)


def make_config(model: ModelConfig = LLAMA, cut: tuple[int, ...] = (4,), **changes: Any) -> RunConfig:
    lora = changes.pop("lora", LoraConfig())
    return RunConfig(
        model=dataclasses.replace(model, **changes), lora=lora,
        stages=StagesConfig(num_stages=len(cut), layers_per_stage=cut), data=DataConfig(sequence_length=12, seed=5),
    )  # fmt: skip


def make(model: ModelConfig = LLAMA, **changes: Any) -> Transformer:
    """A model in which nothing is 0 or 1 by chance."""
    return randomised(build_transformer(make_config(model, **changes), device="cpu"))


def randomised(module: Transformer) -> Transformer:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("adapter.b"):
                parameter.uniform_(-0.1, 0.1, generator=generator)
            elif parameter.ndim < 2:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return module


def make_tokens() -> Tensor:
    return torch.randint(0, LLAMA.vocab_size, (3, 13), generator=torch.Generator().manual_seed(0))


def loss_and_gradients(module: Transformer, key: DropoutKey | None = KEY) -> tuple[Tensor, dict[str, Tensor]]:
    loss = module.loss(make_tokens(), key)
    torch.autograd.backward(loss)
    return loss.detach(), {name: p.grad for name, p in trained_parameters(module).items() if p.grad is not None}


def assert_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4, dropout=0.2)], ids=["whole", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tp_is_the_ordinary_model(family: str, lora: LoraConfig) -> None:
    expected = loss_and_gradients(make(FAMILIES[family], lora=lora))
    assert len(expected[1]) > 20
    assert_same(loss_and_gradients(make(FAMILIES[family], lora=lora, block_types="tp", num_shards=2)), expected)


def by_hand(module: Transformer, tokens_BT: Tensor, types: tuple[str, ...], num_shards: int) -> Tensor:
    """Logits of a GPT-2, computed as docs/block-types.md says: shard by shard, with each weight cut by hand."""
    model, weights = module.model, {name: p.detach() for name, p in module.named_parameters()}

    def cut(name: str, shard: int) -> Tensor:
        return weights[name].chunk(num_shards, dim=1 if name.endswith(("output.weight", "down.weight")) else 0)[shard]

    def cut_pair(name: str, shard: int) -> tuple[Tensor, Tensor]:
        return cut(f"{name}.weight", shard), cut(f"{name}.bias", shard)

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], model.norm_epsilon)

    def attention(layer: str, x: Tensor, shard: int) -> Tensor:
        normed, heads = norm(f"{layer}.attention_norm", x), model.num_heads // num_shards
        q, k, v = (
            rearrange(F.linear(normed, *cut_pair(f"{layer}.attention.{which}", shard)), "b t (h k) -> b h t k", h=heads)
            for which in "qkv"
        )
        scores = (q @ k.transpose(2, 3)) / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        added = F.linear(mixed, cut(f"{layer}.attention.output.weight", shard))
        return added + weights[f"{layer}.attention.output.bias"] / num_shards

    def feed_forward(layer: str, x: Tensor, shard: int) -> Tensor:
        normed = norm(f"{layer}.feed_forward_norm", x)
        wide = F.gelu(F.linear(normed, *cut_pair(f"{layer}.feed_forward.up", shard)), approximate="tanh")
        added = F.linear(wide, cut(f"{layer}.feed_forward.down.weight", shard))
        return added + weights[f"{layer}.feed_forward.down.bias"] / num_shards

    def met(x: Tensor, streams: list[Tensor]) -> Tensor:
        return x + torch.stack([stream - x for stream in streams]).sum(dim=0)

    def run(layers: list[str], x: Tensor) -> Tensor:
        streams = []
        for shard in range(num_shards):
            stream = x
            for layer in layers:
                stream = stream + attention(layer, stream, shard)
                stream = stream + feed_forward(layer, stream, shard)
            streams.append(stream)
        return met(x, streams)

    x = weights["embedding.weight"][tokens_BT] + weights["positions.weight"][: tokens_BT.shape[1]]
    waiting: list[str] = []
    for number, kind in enumerate(types):
        layer = f"layers.{number}"
        if kind == "parallel":
            waiting.append(layer)
            continue
        x, waiting = (run(waiting, x) if waiting else x), []
        if kind == "spd":
            x = run([layer], x)
        else:
            x = x + sum(attention(layer, x, shard) for shard in range(num_shards))
            x = x + sum(feed_forward(layer, x, shard) for shard in range(num_shards))
    x = run(waiting, x) if waiting else x
    return norm("head.norm", x) @ weights["head.output.weight"].T


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_each_type_computes_what_the_documentation_says(types: str | tuple[str, ...], num_shards: int) -> None:
    module = make(GPT2, block_types=types, num_shards=num_shards).double()
    expected = by_hand(module, make_tokens(), module.model.types_of_blocks, num_shards)
    torch.testing.assert_close(module(make_tokens()).double(), expected, rtol=0, atol=1e-5)
    ordinary = make(GPT2).double()(make_tokens()).double()
    assert ((ordinary - expected).abs().max() < 1e-5) == (types == "tp")


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize(("types", "calls"), [("tp", 16), ("spd", 8), ("parallel", 2), (MIXTURE, 4 + 2 + 2)], ids=str)
def test_sums_over_shards(types: str | tuple[str, ...], calls: int, gradient_checkpointing: bool) -> None:
    """Half of the sums are in the forward. A backward that computes a layer again takes no further sum."""
    module, made = make(block_types=types, num_shards=2, gradient_checkpointing=gradient_checkpointing), list[int]()
    expected = loss_and_gradients(make(block_types=types, num_shards=2))

    def counted(parts_N: Tensor) -> Tensor:
        made.append(len(parts_N))
        return sum_here(parts_N)

    counting = Transformer(make_config(**vars_of(module)), Shards(num_shards=2, num_held=2, reduce=counted))
    counting.load_state_dict(module.state_dict())
    counting.loss(make_tokens())
    assert len(made) == calls / 2
    made.clear()
    assert_same(loss_and_gradients(counting), expected)
    assert made == [2] * calls


def vars_of(module: Transformer) -> dict[str, Any]:
    model = module.model
    return {name: getattr(model, name) for name in ("block_types", "num_shards", "gradient_checkpointing")}


@pytest.mark.parametrize("cut", [(4,), (1, 3), (2, 0, 2)], ids=str)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_stages_compute_what_one_process_computes(types: str | tuple[str, ...], cut: tuple[int, ...]) -> None:
    config = make_config(cut=cut, block_types=types, num_shards=2)
    expected = build_transformer(config, device="cpu").summed_loss({"tokens": make_tokens()}, KEY)
    hidden, last = make_tokens()[:, :-1], len(cut) - 1
    stages = [build_stage(config, stage, device="cpu") for stage in range(len(cut))]
    for stage in stages[:-1]:
        hidden = stage(hidden, dropout_key=KEY)
    parameters = dict(stages[last].named_parameters())
    loss = stage_loss(stages[last], parameters, hidden, make_tokens()[:, 1:], dropout_key=KEY)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_parallel_blocks_meet_at_the_ends_of_stages() -> None:
    """So results depend on a run's cut, and single parallel blocks are like spd."""
    tokens = make_tokens()

    def logits(cut: tuple[int, ...], types: str) -> Tensor:
        found: Tensor = build_transformer(make_config(cut=cut, block_types=types, num_shards=2), device="cpu")(tokens)
        return found

    assert not torch.allclose(logits((4,), "parallel"), logits((2, 2), "parallel"), atol=1e-3)
    torch.testing.assert_close(logits((1, 1, 1, 1), "parallel"), logits((4,), "spd"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_cached_equals_uncached(types: str | tuple[str, ...], family: str) -> None:
    module, tokens_BT, cache = (
        make(FAMILIES[family], block_types=types, num_shards=2),
        make_tokens()[:1],
        KeyValueCache(13),
    )
    with torch.no_grad():
        whole_BTV = module(tokens_BT)
        steps = [module(tokens_BT[:, :5], cache=cache)]
        steps += [module(tokens_BT[:, place : place + 1], cache=cache) for place in range(5, 13)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole_BTV[:, 4:], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_shards", "num_processes"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_spread_shards_compute_what_shards_in_one_process_compute(
    types: str | tuple[str, ...], num_shards: int, num_processes: int
) -> None:
    config = make_config(GPT2, block_types=types, num_shards=num_shards)
    whole, store = randomised(build_transformer(config, device="cpu")), HashStore()
    expected = loss_and_gradients(whole)
    found: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}

    def run(process: int) -> None:
        # The processes are threads here, which Gloo does not mind.
        group = cast(dist.ProcessGroup, ProcessGroupGloo(store, process, num_processes, timedelta(seconds=60)))
        shards = Shards(num_shards=num_shards, num_held=num_shards // num_processes, reduce=sum_over(group))
        module = Transformer(config, shards)
        module.load_state_dict(
            {name: part_of(name, tensor, process, num_processes) for name, tensor in whole.state_dict().items()}
        )
        found[process] = loss_and_gradients(module)

    threads = [threading.Thread(target=run, args=(process,)) for process in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == num_processes
    for process in range(num_processes):
        torch.testing.assert_close(found[process][0], expected[0], rtol=0, atol=1e-5)
    for name, gradient in expected[1].items():
        parts = [found[process][1][name] for process in range(num_processes)]
        if cut_axis(name) is None and name.startswith("layers."):
            parts = [torch.stack(parts).sum(dim=0)] * num_processes
        torch.testing.assert_close(whole_of(name, parts), gradient, rtol=1e-5, atol=1e-5, msg=name)


def test_dropout_of_adapters_is_refused_where_shards_are_spread() -> None:
    config = make_config(block_types="spd", num_shards=2, lora=LoraConfig(rank=4, dropout=0.1))
    with pytest.raises(ValueError, match=r"lora\.dropout is not for shards in several processes"):
        Transformer(config, Shards(num_shards=2, num_held=1))
