"""Whether a run's layers are compiled (torch.compile) on this machine. StageModule.compile_layers does it.

Results stay the same up to rounding. Compiled code is kept in torch's own folder (peers/shared/process.py).
"""

import logging
from typing import Literal

import torch

from swarm.config import RunConfig

logger = logging.getLogger(__name__)

Compile = Literal["auto", "on", "off"]
"""What a user wants; `auto` is `on` on a CUDA GPU if the run's layers can be compiled, and else `off`."""


def require_compilable(config: RunConfig) -> None:
    """Raise ValueError if a run's layers cannot be compiled."""
    if config.model.custom_class:
        raise ValueError("--compile on is for the built-in model, not for a model.custom_class")
    if config.model.dropout or config.lora.dropout:
        raise ValueError("--compile on is not for runs with dropout: every microbatch's masks would be compiled anew")


def compiles(wanted: Compile, config: RunConfig, device: torch.device) -> bool:
    """Whether to compile a run's layers for a device. Blocks for seconds.

    A machine without a compiler does not. A CPU needs one for C++, and a GPU needs Triton.

    Raises:
        ValueError: it is wanted, but the run's layers cannot be compiled.
    """
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return False
    try:
        require_compilable(config)
    except ValueError:
        if wanted == "on":
            raise
        return False
    try:
        torch.compile(torch.sin)(torch.zeros(8, device=device))
    except Exception as error:  # noqa: BLE001 - torch, Triton and compilers raise errors of many kinds
        go_on_uncompiled(error, device)
        return False
    return True


def go_on_uncompiled(error: Exception, device: torch.device) -> None:
    """Say that code cannot be made, and have this process run uncompiled what it compiled before."""
    # torch wraps what a compiler says.
    error = getattr(error, "inner_exception", error)
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    logger.warning("goes on uncompiled, and so slower: this machine makes no code for %s (%s)", device, reason)
    torch.compiler.set_stance("force_eager")
