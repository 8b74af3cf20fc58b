"""scripts/bench NAME [--json] [options]: run a bench and print its figures.

A bench is a module beside this one, with a class `Options` and a function `run(options) -> figures`.
"""

import sys
from importlib import import_module
from types import ModuleType

from peers.shared import process, stopping
from scripts.benches.menu import run_named

PROG = "scripts/bench"
BENCHES = {
    "parity": "a swarm follows the trajectory of one process",
    "exactly-once": "every microbatch counts once, whatever fails (slow)",
    "families": "models of Hugging Face, against transformers, and there and back",
    "finetune": "a good model trained further by a swarm with defaults, against transformers and peft",
    "generate": "tokens/s of text from three stages, against transformers, and training meanwhile",
    "pipeline": "tokens/s of two stages, against what the cores can do",
    "spans": "tokens/s of two stages in one process, against plain training; what unequal peers use that choose theirs",
    "peers": "tokens/s of two stages, against hivemind.moe and a static pipeline",
    "methods": "the ways to train, of a swarm and without one, on the same model and data (slow)",
    "nanogpt": "nanoGPT's Shakespeare model as a swarm (slow)",
    "blocks": "held-out loss of nanoGPT's Shakespeare model with each block type, or with bottlenecks (slow)",
    "thin-lines": "time to a loss over 20 Mbit/s with int8, a fixed and a learned bottleneck (slow; needs root)",
    "closing": "what the end of a round holds up, of a stage of 100 million parameters",
    "launches": "operators that a microbatch and an inner step launch on a GPU, counted on a CPU",
    "memory": "bytes of a stage peer, against arithmetic; the cost of computing forwards again",
    "hop": "activations there and gradients back, 8 MiB and 16 KiB, against hivemind.moe",
    "allreduce": "an averaging round of four processes, against hivemind's averager",
    "codecs": "size, error and speed of the codecs, against hivemind's and templar's format",
    "routing": "a choice among many peers, and what it costs to know them",
    "intruders": "what honest traffic keeps beside an intruder",
    "liars": "who of eight peers gives wrong numbers, in ten ways, and who is named falsely (slow)",
    "nat": "peers behind routers: how soon they serve, by which way, and how fast (needs root and nftables)",
    "gpu": "tokens/s of swarms, swarm-static and text on a GPU, against plain torch and transformers (needs a GPU)",
    "diloco": "validation loss and bytes of each way to average (slow)",
    "dipaco": "held-out loss of paths through variants of stages, against dense models (slow)",
    "learning": "held-out loss of a swarm at equal tokens and seconds, against plain training (slow)",
}


def module_of(name: str) -> ModuleType:
    return import_module(f"scripts.benches.{name.replace('-', '_')}")


def main() -> int:
    return run_named(PROG, "benches", BENCHES, module_of, is_about_speed=True)


if __name__ == "__main__":
    process.prepare_environment()
    sys.exit(stopping.run_program(PROG, main))
