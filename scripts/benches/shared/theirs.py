"""Models of transformers, for the benches that compare with them. Importing this takes seconds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn


def be_quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def llama(*, width: int, layers: int, vocabulary: int, longest: int, d_ff: int = 0, head_width: int = 64) -> Any:
    """A Llama with random weights, which are always the same ones."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=d_ff or 4 * width, num_hidden_layers=layers,
        num_attention_heads=width // head_width, max_position_embeddings=longest, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    be_quiet()
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def writer(
    model: Any, prompt: Sequence[int], count: int, device: str | torch.device = "cpu"
) -> Callable[[], list[int]]:
    """A function that writes so many tokens after the prompt, greedily."""

    def write() -> list[int]:
        inputs = torch.tensor([prompt], device=device)
        written = model.generate(inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        tokens: list[int] = written[0, len(prompt) :].tolist()
        return tokens

    return write


def loss_of(model: Any, tokens_BT1: Tensor, reduction: str = "mean") -> Tensor:
    """The loss of each token but the first, in nats, as their mean or sum."""
    logits_BTV = model(input_ids=tokens_BT1[:, :-1]).logits
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten(), reduction=reduction)
