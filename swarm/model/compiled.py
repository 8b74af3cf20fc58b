"""Whether a run's layers can be compiled (torch.compile) on this machine. StageModule.compile_layers does it.

Used by swarm-peer and swarm-static if the user asks for it. Results stay the same up to rounding.
"""

import torch

from swarm.config import RunConfig
from swarm.errors import Fatal


def require_compilable(config: RunConfig) -> None:
    """Raise ValueError if a run's layers cannot be compiled."""
    if config.model.custom_class:
        raise ValueError("--compile is for the built-in model, not for a model.custom_class")
    if config.model.dropout or config.lora.dropout:
        raise ValueError("--compile is not for runs with dropout: every microbatch's masks would be compiled anew")


def require_compiler(device: torch.device) -> None:
    """Raise Fatal if torch.compile makes no code for this device. Blocks for seconds.

    On a CPU it needs a C++ compiler, on a GPU Triton.
    """
    try:
        torch.compile(torch.sin)(torch.zeros(8, device=device))
    except RuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Fatal(f"--compile: this machine makes no code for {device}, so leave it out ({reason})") from None
