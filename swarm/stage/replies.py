"""How a stage ends its answers: tensors in chunks, and errors as the caller is to understand them.

Used by stage/servicer and stage/evaluation.
"""

import logging
from collections.abc import Mapping
from typing import TypeVar

import torch

from swarm.errors import PeerUnavailable, SwarmError
from swarm.machine.out_of_memory import is_out_of_memory, what_was_asked
from swarm.rpc.channels import abort, send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import filled
from swarm.stage.incoming import Context

logger = logging.getLogger(__name__)

_Reply = TypeVar("_Reply", pb.TrainReply, pb.EvaluateReply)


async def send_tensors(context: Context, tensors: Mapping[str, torch.Tensor], first: _Reply) -> _Reply:
    """Send all messages of the tensors but the last, which is given: with room for what else is to be said."""
    messages = filled(first, tensors)
    last = next(messages)
    for following in messages:
        await send(context, last)
        last = following
    return last


async def refuse(context: Context, error: Exception) -> None:
    """End a call with an error; one that is not ours is a bug, and this peer's fault."""
    if is_out_of_memory(error):
        logger.warning("a call failed for want of memory: no room for %s", what_was_asked(error))
        error = PeerUnavailable("this peer is out of memory")
    if not isinstance(error, SwarmError):
        logger.exception("a call failed", exc_info=error)
        error = PeerUnavailable(f"internal error: {type(error).__name__}")
    await abort(context, error)
