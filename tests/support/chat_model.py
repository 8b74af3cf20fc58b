"""The folder of a model that can chat: a small Llama with random weights, a tokenizer of words, and a chat template."""

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM

END_OF_TURN = "<|end|>"
LONGEST = 256
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
NUM_WORDS = 120


def save_chat_model(folder: Path) -> Path:
    torch.manual_seed(0)
    words = ["[UNK]", END_OF_TURN, *_ROLES, *(f"word{number}" for number in range(NUM_WORDS))]
    sizes = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + float(parameter.ndim == 1))
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TURN, *_ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END_OF_TURN, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
