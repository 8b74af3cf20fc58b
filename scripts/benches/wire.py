"""What do smaller activations cost? Validation loss and bytes of each wire type, and of a bottleneck, at equal tokens.

Every arm trains the same small model in three stages on the same samples, in this process and with one thread. Hidden
states and gradients travel as real messages. After so few steps two runs differ a little whatever was changed. The arm
`fp32-nudged` shows how much: it rounds nothing, and its initial weights are a millionth larger. The bench also measures
the CPU time of encoding and decoding, compared with a copy in memory.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from peers.shared import cli
from scripts.benches.shared import paired
from scripts.benches.shared.common import BenchOptions, compute_like_peers, require_multiple, say, with_corpus
from scripts.benches.shared.judged import MORE
from scripts.benches.sides.wire_chain import WireChain
from swarm import config as configs
from swarm.config import RunConfig
from swarm.stage.boundary import GRADIENT, HIDDEN, TOKENS, Boundary
from swarm.stage.staging import Staging

NARROWER = 16
"""With the bottleneck, a token has this many times fewer numbers on the wire."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to hand on hidden states."""

    dtype: str
    """The type of numbers on the wire."""
    is_narrow: bool = False
    """Whether there is a bottleneck."""
    nudge: float = 0.0
    """The share by which the initial weights are larger than usual."""


ARMS: Mapping[str, Arm] = {
    "fp32": Arm(dtype="fp32"),
    "fp32-nudged": Arm(dtype="fp32", nudge=1e-6),
    "bf16": Arm(dtype="bf16"),
    "int8": Arm(dtype="int8"),
    "bottleneck": Arm(dtype="fp32", is_narrow=True),
    "bottleneck-int8": Arm(dtype="int8", is_narrow=True),
}
BOUND = 0.005
"""Difference in loss, relative to fp32, below which the goal is reached by bf16 and int8."""
HELD_OUT_SAMPLES = 512
CODEC_SHAPE = (16, 512, 256)
"""8 MiB of float32."""
CODEC_REPETITIONS = 20

JUDGED = {"arms.*.reached": MORE, "arms.*.bytes_ratio*": MORE}

Figures = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare what travels between stages."""

    seeds: int = 3
    """Seeds of data and initial weights: 0, 1, ..."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Arms to train. fp32 is always trained."""
    steps: int = 600
    """Optimizer steps, of 8 samples of 64 tokens."""
    d_model: int = 128
    """Width of the model; a multiple of 64."""

    def __post_init__(self) -> None:
        cli.require_known(self, "arms", ARMS, at_least=0)
        cli.require_at_least(self, {"seeds": 1, "steps": 1})
        require_multiple("d-model", self.d_model, 64)


def run(options: Options) -> dict[str, Any]:
    """Train all arms and time the codecs, and return the figures."""
    compute_like_peers()
    by_arm: dict[str, list[Figures]] = {name: [] for name in ("fp32", *(arm for arm in options.arms if arm != "fp32"))}
    for seed in range(options.seeds):
        for name, runs in by_arm.items():
            runs.append(train(name, seed, options))
            say(f"{name}, seed {seed}: {runs[-1]['val_loss']:.4f} after {runs[-1]['cpu_seconds']:.0f} s of CPU time")
    codecs = codec_times()
    say(f"CPU time a MiB: {codecs}")
    return {"arms": summary(by_arm), "codecs": codecs, "steps": options.steps}


def run_config(name: str, seed: int, options: Options) -> RunConfig:
    """The run that an arm trains."""
    arm = ARMS[name]
    samples = 8 * options.steps
    values = {
        "run": "bench-wire",
        "model": {
            "num_layers": 3,
            "d_model": options.d_model,
            "num_heads": 4,
            "bottleneck_dim": options.d_model // NARROWER if arm.is_narrow else 0,
        },
        "stages": {"num_stages": 3},
        "data": {"dataset": options.dataset, "seed": seed, "sequence_length": 64, "microbatch_size": 8},
        "rounds": {"setting": "synchronous", "round_samples": 8},
        "optimizer": {
            "learning_rate": 3e-3,
            "schedule": "cosine",
            "total_samples": samples,
            "warmup_samples": samples // 20,
        },
        "wire": {"dtype": arm.dtype},
    }
    return configs.from_dict(values, source="the wire bench")


def train(name: str, seed: int, options: Options) -> dict[str, Any]:
    """Train an arm with a seed. Bytes in the figures are those of one microbatch at one boundary."""
    config, data = with_corpus(run_config(name, seed, options))
    chain = WireChain(config, data, nudge=ARMS[name].nudge)
    started_at = time.process_time()
    for number in range(options.steps):
        chain.step(number)
    crossings = options.steps * (config.stages.num_stages - 1)
    held_out = torch.cat([batch[TOKENS] for batch in data.held_out(HELD_OUT_SAMPLES)])
    return {
        "val_loss": chain.held_out_loss(torch.split(held_out, config.data.microbatch_size)),
        "hidden_bytes": chain.sent_bytes[HIDDEN] // crossings,
        "gradient_bytes": chain.sent_bytes[GRADIENT] // crossings,
        "token_bytes": chain.sent_bytes[TOKENS] // crossings,
        "cpu_seconds": time.process_time() - started_at,
    }


def summary(by_arm: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    """Each arm's figures over its seeds.

    `loss_difference` is relative to fp32 with the same seed, `bytes_ratio` how many times fewer bytes hidden states and
    gradients take, and `bytes_ratio_with_tokens` the same with the token ids that every stage gets.
    """
    baseline = by_arm["fp32"]
    found = {}
    for name, runs in by_arm.items():
        losses = [figures["val_loss"] for figures in runs]
        differences = [loss / other["val_loss"] - 1.0 for loss, other in zip(losses, baseline, strict=True)]
        found[name] = {
            "val_loss": statistics.mean(losses),
            "val_loss_std": paired.spread(losses),
            "loss_difference": statistics.mean(differences),
            "loss_difference_std": paired.spread(differences),
            "reached": statistics.mean(differences) < BOUND if name in ("bf16", "int8") else None,
            "bytes_ratio": _bytes(baseline[0]) / _bytes(runs[0]),
            "bytes_ratio_with_tokens": _bytes(baseline[0], "token_bytes") / _bytes(runs[0], "token_bytes"),
            **{key: runs[0][key] for key in ("hidden_bytes", "gradient_bytes", "token_bytes")},
            "cpu_seconds": statistics.mean(figures["cpu_seconds"] for figures in runs),
        }
    return found


def _bytes(figures: Figures, *others: str) -> int:
    return sum(int(figures[name]) for name in ("hidden_bytes", "gradient_bytes", *others))


def codec_times() -> dict[str, Any]:
    """Medians of milliseconds of CPU time for each MiB of float32. `over_copy` is encoding and decoding over two
    copies."""
    num_samples, length, width = CODEC_SHAPE
    tensor_BTR = torch.randn(CODEC_SHAPE, generator=torch.Generator().manual_seed(0))
    copy_ms, staging = _ms_per_mib(tensor_BTR.clone), Staging()
    times: dict[str, Any] = {"copy": copy_ms}
    for name in ("bf16", "int8"):
        boundary = Boundary(encoding=name, width=width)
        wire = boundary.encode(tensor_BTR, staging).wait()
        encode_ms = _ms_per_mib(partial(boundary.encode, tensor_BTR, staging))
        decode_ms = _ms_per_mib(partial(boundary.decode, wire, num_samples, length, staging))
        times[name] = {"encode": encode_ms, "decode": decode_ms, "over_copy": (encode_ms + decode_ms) / (2 * copy_ms)}
    return times


def _ms_per_mib(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(CODEC_REPETITIONS):
        started_at = time.process_time()
        work()
        seconds.append(time.process_time() - started_at)
    return 1e3 * statistics.median(seconds) / (4 * math.prod(CODEC_SHAPE) / 2**20)
