"""Does a swarm make a good model better at a new text, with nothing but defaults, as transformers and peft do?

transformers trains a small Llama of bytes on the help topics of Python. Then a swarm of two stages, begun as the README
begins one, trains it further on Python's sources. Beside it a plain loop of transformers (and peft) trains on as many
tokens of the same text, with AdamW and the usual rate that falls to zero. Losses are nats a byte on held-out text.
"""

import inspect
import pydoc_data.topics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from peers.commands import command_line
from peers.local.supervisor import Supervisor
from scripts.benches.shared.common import OutputOptions, require_distinct, say, workplace
from scripts.benches.shared.swarm import SwarmProcesses
from scripts.benches.shared.theirs import llama, loss_of
from swarm.config import RunConfig
from swarm.errors import PeerUnavailable

Kind = Literal["whole", "lora"]
KINDS: tuple[Kind, ...] = ("whole", "lora")
RATES: Mapping[Kind, float] = {"whole": 2e-5, "lora": 2e-4}  # The usual rates of fine-tuning, of the plain loops
BASE_RATE = 2e-3
LORA_RANK, LORA_ALPHA = 8, 16  # The rank that is asked for, and the default of the other one
SEQUENCE, BATCH = 128, 16
"""Bytes of a sample, and samples of a plain loop's batch. The model takes no longer samples, and so neither does the
run that is begun with it."""
MODULES = ("argparse", "ast", "datetime", "decimal", "inspect", "ipaddress", "pathlib", "pickle", "tarfile", "typing")
HELD_OUT_BYTES = 48 << 10
MOST_OVER_PLAIN = 1.01


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Fine-tune a small model by a swarm, and by a plain loop."""

    kinds: tuple[Kind, ...] = KINDS
    """What to train: all weights (whole), or adapters (lora)."""
    base_steps: int = 800
    """Steps of 16 samples that make the model good before."""
    steps: int = 10
    """Steps of the swarm, of 256 samples each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct(self, ("kinds",))


def run(options: Options) -> dict[str, Any]:
    old, old_held_out = _split("\n".join(pydoc_data.topics.topics.values()).encode())
    new, new_held_out = _split("".join(inspect.getsource(import_module(name)) for name in MODULES).encode())
    held_out = {"new": new_held_out, "old": old_held_out}
    with workplace("finetune") as (folder, children):
        (folder / "new.txt").write_bytes(new)
        model = llama(width=128, layers=4, head_width=32, d_ff=352, vocabulary=256, longest=SEQUENCE)
        _train(model, old, options.base_steps * BATCH, BASE_RATE)
        model.save_pretrained(folder / "base")
        before = _losses(model, held_out)
        say(f"the model is good: {_in_words(before)}")
        figures: dict[str, Any] = {"held_out_before": before}
        for kind in options.kinds:
            found = figures[kind] = _compare(kind, options.steps, new, held_out, folder, children)
            found["passed"] = found["over_plain"] <= MOST_OVER_PLAIN and found["held_out_after"]["new"] < before["new"]
    return figures | {"passed": all(figures[kind]["passed"] for kind in options.kinds)}


def _compare(
    kind: Kind, steps: int, text: bytes, held_out: Mapping[str, bytes], folder: Path, children: Supervisor
) -> dict[str, Any]:
    tokens, rate = _swarm(kind, steps, folder, children)
    after = _losses(_loaded(folder / kind / "out"), held_out)
    say(f"{kind}, swarm: {_in_words(after)}")
    model = _loaded(folder / "base")
    if kind == "lora":
        # Importing it takes seconds.
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    _train(model, text, tokens // SEQUENCE, RATES[kind])
    plain = _losses(model, held_out)
    say(f"{kind}, plain: {_in_words(plain)}")
    return {
        "held_out_after": after, "plain_after": plain, "over_plain": after["new"] / plain["new"], "tokens": tokens,
        "last_learning_rate": rate,
    }  # fmt: skip


def _swarm(kind: Kind, steps: int, folder: Path, children: Supervisor) -> tuple[int, float]:
    """Fine-tune by a swarm, and export the model to the folder KIND/out. Return the number of tokens, and the last
    learning rate."""

    def command(program: str, arguments: Sequence[str]) -> list[str]:
        begins = program == "peer" and "--initial-peers" not in arguments
        own = ["--dataset", str(folder / "new.txt"), "--stages", "2", "--steps", str(steps)]
        own += ["--lora-rank", str(LORA_RANK)] if kind == "lora" else []
        return command_line(program, [*arguments, *(own if begins else [])])

    swarm = SwarmProcesses(RunConfig(), children, folder / kind, program=command, model=folder / "base")
    swarm.start_peers([0, 1])
    rows = swarm.train("trainer", steps)
    addresses = [peer.dht_address for peer in swarm.peers]
    arguments = ["export", "--initial-peers", *addresses, "--output", str(folder / kind / "out")]
    exported = subprocess.run(command_line("model", arguments), check=False, capture_output=True, text=True)
    if exported.returncode:
        raise PeerUnavailable(f"the export failed: {exported.stderr.strip()}")
    swarm.stop()
    return rows[-1]["train/total_tokens"], rows[-1]["train/learning_rate"]


def _split(text: bytes) -> tuple[bytes, bytes]:
    return text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]


def _loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _samples(text: bytes) -> Tensor:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens.unfold(0, SEQUENCE + 1, SEQUENCE)


def _train(model: Any, text: bytes, num_samples: int, rate: float) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    num_steps = num_samples // BATCH
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, num_steps // 20, num_steps)
    model.train()
    for _, batch_BT1 in zip(range(num_steps), _batches(_samples(text)), strict=False):
        torch.autograd.backward(loss_of(model, batch_BT1))
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _batches(samples_NT1: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(samples_NT1), generator=generator)
        for places in order[: len(order) // BATCH * BATCH].chunk(len(order) // BATCH):
            yield samples_NT1[places].long()


@torch.no_grad()
def _losses(model: Any, held_out: Mapping[str, bytes]) -> dict[str, float]:
    model.eval()
    return {name: float(loss_of(model, _samples(text).long())) for name, text in held_out.items()}


def _in_words(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{loss:.4f} on the {name} text" for name, loss in losses.items())
