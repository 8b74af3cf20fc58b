"""Small tokenizers: a tokenizer.json of a few words, and the folder of one that knows how to chat."""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace


def write_tokenizer(path: Path, words: Sequence[str]) -> str:
    """Write a tokenizer that knows these words. Any other word becomes `[UNK]`, which is 0. Return its path, for an
    option."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return str(path)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML. It marks what the assistant says, with the token that ends it, as generated."""


def write_chat_tokenizer(folder: Path, template: str = CHAT_TEMPLATE) -> str:
    """Write a tokenizer of bytes and of ChatML's tokens. Return the path of its tokenizer.json, for an option."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder / "tokenizer.json")
