"""Classes of the users' own (`model.custom_class`): they are imported and tried out, and what they take is measured.

stage_module.py says what such a class has to be.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Size, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from swarm.config import RunConfig
from swarm.errors import in_one_line
from swarm.machine.extras import own_class
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.types import Block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a block of an own class takes.

    Attributes:
        trained: the shapes of the parameters that are trained, by name.
        frozen_bytes: of its other parameters, and of buffers.
        graph_bytes: what autograd keeps of one microbatch's forward, without the parameters.
    """

    trained: dict[str, Size]
    frozen_bytes: int
    graph_bytes: int


def imported(config: RunConfig, block: Block) -> type[nn.Module]:
    """Import the class that makes a block. Raises ValueError if that fails, or if this is no class of torch modules."""
    name = config.classes[block]
    found = own_class("model.custom_class", name)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"model.custom_class {name!r} is not a class derived from torch.nn.Module")
    return found


@contextmanager
def blamed(config: RunConfig, block: Block, fails: str) -> Iterator[None]:
    """Have errors of the class's own code inside become a ValueError of one line, but for lack of memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"model.custom_class {config.classes[block]!r} {fails} stage {block}: {reason}") from error


def try_out(
    module: nn.Module, config: RunConfig, block: Block, device: torch.device | str, num_samples: int = 1
) -> None:
    """Have a module compute samples of the run's length.

    Raises:
        ValueError: it fails, or its output is not what the next stage, or the loss, takes. Of one line.
    """
    model, shape = config.model, (num_samples, config.data.sequence_length)
    if block.stage == 0:
        inputs = torch.zeros(shape, dtype=torch.int64, device=device)
    else:
        inputs = torch.zeros(*shape, model.hidden_width, device=device, requires_grad=torch.is_grad_enabled())
    with blamed(config, block, f"cannot compute {_in_words(inputs)} at"):
        outputs: object = module(inputs, dropout_key=None)
    is_last = block.stage == config.stages.num_stages - 1
    width, taker = (model.vocab_size, "the loss") if is_last else (model.hidden_width, "the next stage")
    wanted = torch.empty(*shape, width, device="meta")
    if not isinstance(outputs, Tensor) or (outputs.dtype, outputs.shape) != (wanted.dtype, wanted.shape):
        raise ValueError(
            f"model.custom_class {config.classes[block]!r} gives {_in_words(outputs)} at stage {block}, and {taker} "
            f"takes {_in_words(wanted)} ({'model.vocab_size' if is_last else 'model.d_model'})"
        )


def _in_words(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


@lru_cache
def measured(config: RunConfig, block: Block, layers: range) -> Measured | None:
    """Measure what a block takes, by having it compute a microbatch on the meta device, where no tensor has memory;
    None if its class cannot do that. Raises what `imported` raises."""
    made, kept = imported(config, block), set[torch.UntypedStorage]()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage())
        return tensor

    try:
        with torch.device("meta"):
            module = made(config, block.stage, layers)
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                try_out(module, config, block, "meta", config.data.microbatch_size)
    except Exception as error:  # noqa: BLE001 - code of the user's own may raise anything
        logger.info("how much memory stage %s takes is not known: %s", block, in_one_line(error))
        return None
    held = [*module.parameters(), *module.buffers()]
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    own = sum(tensor.nbytes for tensor in held)
    return Measured(
        trained={name: parameter.shape for name, parameter in trained.items()},
        frozen_bytes=own - sum(parameter.nbytes for parameter in trained.values()),
        graph_bytes=sum(storage.nbytes() for storage in kept - {tensor.untyped_storage() for tensor in held}),
    )
