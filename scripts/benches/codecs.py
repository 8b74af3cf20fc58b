"""How small, how exact and how fast are the codecs that averaging can use?

Error and size of `topk` are measured on pseudo-gradients of a small model, against the format of the templar trainer
(the same elements with four levels of each tensor's statistics). Its speed is compared with hivemind's uniform 8 bits,
in turns, in processor seconds of one thread.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hivemind.compression import CompressionInfo, Uniform8BitQuantization
from torch import Tensor

from scripts.benches.shared import paired
from scripts.benches.shared.common import BenchOptions, compute_like_peers, run_of, say, with_corpus
from scripts.benches.sides.reference import Reference
from swarm.compression import buffers
from swarm.compression.buffers import SIDE, TILE
from swarm.compression.codec import Codec, contribution_codec
from swarm.compression.values import quantize_statistically
from swarm.config import AveragingConfig, RunConfig

TOP_K = 64
OURS = AveragingConfig(codec="topk", top_k=TOP_K, values="2bit", indices="elias-fano")
CODECS = {
    **{name: AveragingConfig(codec=name) for name in ("fp16", "bf16", "int8", "int4", "dct-lowpass")},
    "topk-2bit-elias-fano": OURS,
    "topk-lut8-12bit": AveragingConfig(codec="topk", values="lut8", indices="12bit"),
    "dct-topk-lut8-12bit": AveragingConfig(codec="dct-topk", values="lut8", indices="12bit"),
}


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Measure the codecs, against hivemind's and templar's format."""

    inner_steps: int = 60
    """AdamW steps that make up a pseudo-gradient, after as many to the point from which both start."""
    num_elements: int = 20_000_000
    """Elements of the vector that is timed."""
    repetitions: int = 5
    """How often each is measured, after a first time that does not count."""


def run(options: Options) -> dict[str, Any]:
    compute_like_peers()
    gradients = enumerate(_pseudo_gradients(options), start=1)
    tensors = [_compare(f"pseudo-gradient {order}", gradient) for order, gradient in gradients]
    vector_N = torch.randn(options.num_elements, generator=torch.Generator().manual_seed(0))
    speeds = _speed_ratios(vector_N, options.repetitions)
    codecs = {name: _measure(name, config, vector_N, options.repetitions) for name, config in CODECS.items()}
    return {"tensors": tensors, **speeds, "codecs": codecs, "num_elements": options.num_elements}


def _config(options: Options) -> RunConfig:
    return run_of(
        "codecs", width=256, layers=4, stages=3, length=128, microbatch=8, round_samples=16, dataset=options.dataset,
        data={"max_tokens": 4_000_000}, optimizer={"learning_rate": 1e-3, "warmup_samples": 160},
    )  # fmt: skip


def _pseudo_gradients(options: Options) -> Iterator[dict[str, Tensor]]:
    """The pseudo-gradients of two peers (old weights minus new weights). Both start from one point, and take inner
    steps on different stretches of text."""
    config, data = with_corpus(_config(options))
    say(f"{options.inner_steps} steps to a shared point")
    shared = Reference(config, data)
    for number in range(options.inner_steps):
        shared.step(number)
    for peer in range(2):
        say(f"{options.inner_steps} inner steps of peer {peer + 1}")
        reference = copy.deepcopy(shared, {id(data): data})
        first = options.inner_steps + peer * options.inner_steps
        for number in range(first, first + options.inner_steps):
            reference.step(number)
        yield {name: weight - reference.weights[name] for name, weight in shared.weights.items()}


def _compare(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compare our codec on all tensors as one vector with the templar quantiser, which gets the kept elements of each
    tensor."""
    vector_D = buffers.flatten(tensors, torch.empty(sum(tensor.numel() for tensor in tensors.values())))
    codec = contribution_codec(OURS)
    encoded = codec.encode(vector_D)
    decoded_D = codec.decode(encoded, vector_D.numel())
    # The vector begins with the full tiles of each tensor. The remaining elements of all tensors count as one more
    # tensor.
    matrices = [tensors[name] for name in sorted(tensors) if tensors[name].ndim == 2]
    sizes = [TILE * math.prod(length // SIDE for length in matrix.shape) for matrix in matrices]
    pieces = torch.split(vector_D, [*sizes, vector_D.numel() - sum(sizes)])
    energy = float(vector_D.double().square().sum())
    figures = {
        "name": name,
        "ratio": vector_D.nbytes / len(encoded),
        "nmse_ours": float((decoded_D - vector_D).double().square().sum()) / energy,
        "nmse_templar": sum(map(_templar_error, pieces)) / energy,
    }
    say(f"{name}: {figures['ratio']:.1f} x, error {figures['nmse_ours']:.4f}, templar {figures['nmse_templar']:.4f}")
    return figures


def _templar_error(vector_N: Tensor) -> float:
    """Squared error of the templar format, which keeps the largest elements of each tile and rounds all of them to four
    levels."""
    tiles_TE = torch.nn.functional.pad(vector_N, (0, -vector_N.numel() % TILE))
    tiles_TE = tiles_TE.view(tiles_TE.numel() // TILE, TILE)
    indices_TK = tiles_TE.abs().topk(TOP_K).indices
    codes_TK, table = quantize_statistically(tiles_TE.gather(1, indices_TK).numpy(), 4)
    decoded_TE = torch.zeros_like(tiles_TE).scatter_(1, indices_TK, torch.from_numpy(table[codes_TK]))
    return float((decoded_TE - tiles_TE).double().square().sum())


def _speed_ratios(vector_N: Tensor, repetitions: int) -> dict[str, Any]:
    """Seconds of our codec and of hivemind's 8 bits, measured in turns, and how many times faster ours is."""
    ours, theirs = contribution_codec(OURS), Uniform8BitQuantization()
    info = CompressionInfo.from_tensor(vector_N)
    our_bytes, their_bytes = ours.encode(vector_N), theirs.compress(vector_N, info)
    turns = _in_turns(
        {
            "encode": lambda: ours.encode(vector_N),
            "hivemind_encode": lambda: theirs.compress(vector_N, info),
            "decode": lambda: ours.decode(our_bytes, vector_N.numel()),
            "hivemind_decode": lambda: theirs.extract(their_bytes),
        },
        repetitions,
    )
    seconds = paired.medians(turns)
    ratios = {
        "encode_speed_ratio": paired.ratio(turns["hivemind_encode"], turns["encode"]),
        "decode_speed_ratio": paired.ratio(turns["hivemind_decode"], turns["decode"]),
    }
    return {
        **paired.figures(ratios),
        "hivemind": {
            "bytes_per_element": len(their_bytes.buffer) / vector_N.numel(),
            "relative_error": _relative_error(theirs.extract(their_bytes), vector_N),
            "encode_seconds": seconds["hivemind_encode"],
            "decode_seconds": seconds["hivemind_decode"],
        },
    }


def _measure(name: str, config: AveragingConfig, vector_N: Tensor, repetitions: int) -> dict[str, float]:
    codec: Codec = contribution_codec(config)
    encoded = codec.encode(vector_N)
    turns = _in_turns(
        {"encode": lambda: codec.encode(vector_N), "decode": lambda: codec.decode(encoded, vector_N.numel())},
        repetitions,
    )
    seconds = paired.medians(turns)
    say(f"{name}: {1e3 * seconds['encode']:.0f} ms in, {1e3 * seconds['decode']:.0f} ms out")
    return {
        "bytes_per_element": len(encoded) / vector_N.numel(),
        "relative_error": _relative_error(codec.decode(encoded, vector_N.numel()), vector_N),
        "encode_seconds": seconds["encode"],
        "decode_seconds": seconds["decode"],
    }


def _in_turns(actions: Mapping[str, Callable[[], object]], repetitions: int) -> paired.Turns:
    def timed(action: Callable[[], object], number: int) -> float:
        start = time.process_time()
        action()
        return time.process_time() - start

    for action in actions.values():
        action()
    return paired.in_turns({name: partial(timed, action) for name, action in actions.items()}, repetitions)


def _relative_error(decoded_N: Tensor, vector_N: Tensor) -> float:
    return float((decoded_N - vector_N).norm() / vector_N.norm())
