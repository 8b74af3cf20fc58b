"""What fits where, before there is a run: each stage's memory, the bytes over its line, and the seconds of a step.

Memory is computed, by shared/needs.py, and one layer of the model is measured. Of a model on the hub only the
configuration is downloaded, and its tokenizer where a text is named.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from peers.doctor import machine
from peers.doctor.options import DoctorOptions
from peers.shared import needs
from peers.shared.devices import Device
from peers.shared.needs import Needs
from peers.shared.process import EXIT_FAILURE, cache_folder
from peers.shared.room import Room, written
from peers.shared.run_options import begun, named_config
from swarm import config as configs
from swarm.config import RunConfig, StagesConfig, WireConfig
from swarm.data import hub, tokenizer_files
from swarm.interchange import run_folder
from swarm.interchange.families.known import read_config
from swarm.machine.out_of_memory import in_words, is_out_of_memory
from swarm.machine.words import counted
from swarm.model.stages import build_stage, layer_ranges

COMMON_GIB, RESERVED_BYTES = (8, 12, 16, 24, 80), 1 << 30
"""Memory of common GPUs, and what the driver, PyTorch itself and gaps between tensors take of it."""
_LINE_BYTES_PER_SECOND = 100e6 / 8
_MEASURING_SECONDS, _FIRST_TOKENS = 3.0, 32


@dataclass(frozen=True, kw_only=True)
class StageFit:
    """What a stage takes of each of its peers. `sent` are the bytes that a peer sends in a step; it receives about as
    many."""

    layers: int
    needs: Needs
    sent: int

    def verdict(self, free_bytes: int) -> str:
        if self.needs.least > free_bytes:
            return f"lacks {in_words(self.needs.least - free_bytes)}"
        return "fits" if self.needs.whole <= free_bytes else "fits if forwards are computed again"

    @property
    def figures(self) -> dict[str, int]:
        """All figures by name, in bytes but for two counts."""
        sizes = vars(self.needs) | {"other": self.needs.other + self.needs.turns, "least": self.needs.least}
        return {"layers": self.layers, **sizes, "sent": self.sent}


def planned(options: DoctorOptions) -> RunConfig:
    """The configuration of the run that the options name. Sizes that it leaves out fit its text, or plenty of text if
    none is named. Raises ValueError, PeerUnavailable."""
    of_model: RunConfig | None = None
    has_text = options.model is None or any(setting.startswith("data.dataset=") for setting in options.set)
    if options.model is not None:
        folder = Path(options.model).expanduser()
        if not folder.is_dir():
            tokenizer = tokenizer_files.FILES if has_text else ()
            folder = hub.download(options.model, ("config.json", "generation_config.json", *tokenizer))
        if (folder / run_folder.CONFIG).is_file():
            of_model, has_text = run_folder.load_config(folder), True
        else:
            _, model = read_config(folder / "config.json")
            # The run begins with the model's weights, which decides the optimizer. They are not read for that.
            model = dataclasses.replace(model, weights="0" * 64, autocast="auto")
            data = run_folder.OPEN_DATA
            if (folder / tokenizer_files.TOKENIZER).is_file():
                data = dataclasses.replace(data, tokenizer=str(folder))
            of_model = RunConfig(
                model=model, stages=StagesConfig(num_stages=min(2, model.num_layers)), wire=WireConfig(dtype="auto"),
                data=data, rounds=run_folder.OPEN_ROUNDS,
            )  # fmt: skip
    config = named_config(options, of_model, preset=options.preset)
    if options.lora_rank is not None:
        config = configs.with_settings(config, [f"lora.rank={options.lora_rank}"])
    if config.model.custom_class:
        raise ValueError("what a model.custom_class takes is measured of a run that is there: give its INVITE")
    return begun(config, None, cache_folder()) if has_text else config.begun()


def of_stages(config: RunConfig, num_peers: int, *, on_gpu: bool) -> list[StageFit]:
    config = needs.computing_on(config, on_gpu=on_gpu)
    each, found = needs.of_stages(config, on_gpu=on_gpu, num_peers=num_peers), list[StageFit]()
    for stage, layers in enumerate(layer_ranges(config)):
        wire, share = needs.wire_bytes(config, stage), -(-needs.most_microbatches(config, stage) // num_peers)
        averaged = needs.exchanged_bytes(config, stage, num_members=num_peers)
        sent = share * (wire["input"] + wire["output"]) + averaged
        found.append(StageFit(layers=len(layers), needs=each[stage], sent=sent))
    return found


def helpful(config: RunConfig, free_bytes: int, num_peers: int, *, on_gpu: bool) -> list[list[str]]:
    """The settings with which all stages would fit: of each kind the mildest that does by itself, or else as few and
    mild ones together as there can be."""

    def fits(settings: Sequence[str]) -> bool:
        try:
            stages = of_stages(configs.with_settings(config, settings), num_peers, on_gpu=on_gpu)
        except ValueError:
            return False
        return all(stage.needs.least <= free_bytes for stage in stages)

    kinds = [kind for kind in _kinds(config) if kind]
    if alone := [choice for kind in kinds if (choice := next(filter(fits, kind), None)) is not None]:
        return alone
    chosen = [kind[-1] for kind in kinds]
    if not fits([*chain(*chosen)]):
        return []
    for place in reversed(range(len(kinds))):
        for choice in ([], *kinds[place]):
            changed = [*chosen[:place], choice, *chosen[place + 1 :]]
            if fits([*chain(*changed)]):
                chosen = changed
                break
    return [[*chain(*chosen)]]


def _kinds(config: RunConfig) -> Iterator[list[list[str]]]:
    """Kinds of settings with which a stage takes less memory, each with its choices, the mildest first."""
    data, num_stages, num_layers = config.data, config.stages.num_stages, config.model.num_layers
    yield [[f"data.microbatch_size={data.microbatch_size >> n}"] for n in range(1, data.microbatch_size.bit_length())]
    yield [] if config.model.gradient_checkpointing else [["model.gradient_checkpointing=true"]]
    yield [] if config.model.autocast != "off" else [["model.autocast=bf16"]]
    yield [] if config.lora.is_on else [["lora.rank=16"]]
    more = {min(num_stages << n, num_layers) for n in range(1, 8)} - {num_stages}
    yield [_in_stages(config, number) for number in sorted(more)]
    yield [[f"data.sequence_length={data.sequence_length >> n}"] for n in (1, 2, 3) if data.sequence_length >> n]


def _in_stages(config: RunConfig, number: int) -> list[str]:
    even = ["stages.layers_per_stage=[]"] if config.stages.layers_per_stage else []
    return [*even, f"stages.num_stages={number}"]


def measured_step(config: RunConfig, stages: Sequence[StageFit], num_peers: int, device: Device) -> float | None:
    """The seconds of a step if all peers had this device, and lines took no time; None if a layer has no room on it.
    Blocks for some seconds, while one layer is measured, with as many tokens as there is time for."""
    model = dataclasses.replace(
        config.model, num_layers=3, block_types="", num_shards=1, weights="", gradient_checkpointing=False,
        bottleneck_dim=0, bottleneck="fixed", bottleneck_layers=(),
    )  # fmt: skip
    alone = dataclasses.replace(config.uncut, model=model, stages=StagesConfig(num_stages=3))
    alone = needs.computing_on(alone, on_gpu=device.kind == "cuda")
    if 4 * sum(needs.state_bytes(alone, 1).values()) > 3 * device.free_bytes:
        return None
    data, begun, a_token = config.data, time.monotonic(), math.inf
    # Small microbatches first, up to a whole one: on a slow device a large layer has time for no more.
    sizes = [_FIRST_TOKENS << n for n in range(max(1, (data.tokens_per_microbatch // _FIRST_TOKENS).bit_length()))]
    try:
        module = build_stage(alone, 1, device=device.name)
        for tokens in chain.from_iterable((size,) * 3 for size in sizes):
            shape = (max(1, tokens // data.sequence_length), min(tokens, data.sequence_length), model.hidden_width)
            hidden_BTR = torch.randn(shape, device=device.name, requires_grad=True)
            started = time.monotonic()
            module(hidden_BTR, dropout_key=None).sum().backward()
            assert hidden_BTR.grad is not None
            hidden_BTR.grad.sum().item()  # waits for the device
            a_token = min(a_token, (time.monotonic() - started) / (shape[0] * shape[1]))
            if time.monotonic() - begun > _MEASURING_SECONDS:
                break
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    layer = a_token * data.tokens_per_microbatch
    head = layer * model.vocab_size * model.d_model / (needs.num_own_parameters(alone, 1) or 1)
    again = 4 / 3 if config.model.gradient_checkpointing else 1.0
    slowest = max(again * layer * stage.layers + head * (stage is stages[-1]) for stage in stages)
    return slowest * (-(-config.microbatches_per_round // num_peers) + len(stages) - 1)


def report(options: DoctorOptions) -> int:
    """Print what the run would take and where it fits. Return an exit code, which is 1 if it does not fit here."""
    config, num_peers = planned(options), options.peers
    finding, device = machine.device(options.device, options.memory)
    if device is None:
        raise ValueError(finding.text)
    here = device.kind == "cuda"
    places = [(device.name, device.all_bytes, here)]
    places += [(f"a GPU of {size} GiB", (size << 30) - RESERVED_BYTES, True) for size in COMMON_GIB]
    fits = list[dict[str, Any]]()
    for name, free_bytes, on_gpu in places:
        there = of_stages(config, num_peers, on_gpu=on_gpu)
        verdicts = [stage.verdict(free_bytes) for stage in there]
        lacks = any(verdict.startswith("lacks") for verdict in verdicts)
        settings = helpful(config, free_bytes, num_peers, on_gpu=on_gpu) if lacks else []
        # RAM is not bounded here: of the GPUs of other machines it is not known.
        each = {number: stage.needs for number, stage in enumerate(there)}
        span = Room(device=name, device_bytes=free_bytes, ram_bytes=sys.maxsize, each=each).largest(range(len(there)))
        fits.append({"device": name, "free_bytes": free_bytes, "stages": verdicts, "would_fit_with": settings})
        fits[-1]["together"] = None if span is None else written(span)
        fits[-1]["fits"] = not lacks
    stages = of_stages(config, num_peers, on_gpu=here)
    seconds = measured_step(config, stages, num_peers, device)
    if options.json:
        rows = [stage.figures for stage in stages]
        print(json.dumps({"fits": fits[0]["fits"], "stages": rows, "devices": fits, "step_seconds": seconds}))
    else:
        _print(config, stages, fits, seconds)
    return 0 if fits[0]["fits"] else EXIT_FAILURE


def _in_words(stages: Sequence[str], verdict: str) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]} {verdict}"
    verb, space, rest = verdict.partition(" ")
    return f"stages {', '.join(stages)} {verb.removesuffix('s')}{space}{rest}"


def _print(
    config: RunConfig, stages: Sequence[StageFit], fits: Sequence[dict[str, Any]], seconds: float | None
) -> None:
    data, columns = config.data, ("weights", "frozen", "optimizer", "other", "graphs", "ram", "sent")
    microbatches = counted(config.microbatches_per_round, "microbatch")
    print(f"A step has {microbatches} of {data.microbatch_size} x {data.sequence_length} tokens.\n")
    print(f"stage  layers  in flight  {'  '.join(f'{column:>9}' for column in columns)}")
    for number, stage in enumerate(stages):
        figures = stage.figures
        sizes = "  ".join(f"{in_words(figures[column]):>9}" for column in columns)
        print(f"{number:>5}  {stage.layers:>6}  {stage.needs.in_flight:>9}  {sizes}")
    print("\nAll but ram is memory of the device. Graphs are of the microbatches in flight; sent is for each step.\n")
    for fit in fits:
        said = {text: [str(n) for n, verdict in enumerate(fit["stages"]) if verdict == text] for text in fit["stages"]}
        text = "; ".join(_in_words(who, what) for what, who in said.items())
        if fit["together"] is not None and "-" in fit["together"]:
            text += f"; {fit['together']} together"
        print(f"{fit['device']:<15}  {in_words(fit['free_bytes']):>9} free  {text}")
        for settings in fit["would_fit_with"]:
            print(f"{'':<33}fits with {' '.join(f'--set {setting}' for setting in settings)}")
    sent = max(stage.sent for stage in stages) / _LINE_BYTES_PER_SECOND
    timed = "is not known: a layer has no room here" if seconds is None else f"takes {seconds:,.1f} s with this device"
    print(f"\nA step {timed}; beside it a line of 100 Mbit/s upwards takes {sent:,.1f} s")
