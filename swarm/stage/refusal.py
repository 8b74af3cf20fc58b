"""Ends calls to a stage that fail. Used by its servicers."""

import logging

from swarm.errors import PeerUnavailable, SwarmError
from swarm.machine.out_of_memory import is_out_of_memory, what_was_asked
from swarm.rpc.failures import abort
from swarm.stage.incoming import Context

logger = logging.getLogger(__name__)


async def refuse(context: Context, error: Exception) -> None:
    """End a call with an error. Any error but a SwarmError or lack of memory is a bug of this peer."""
    if is_out_of_memory(error):
        logger.warning("a call failed for want of memory: no room for %s", what_was_asked(error))
        error = PeerUnavailable("this peer is out of memory")
    if not isinstance(error, SwarmError):
        logger.exception("a call failed", exc_info=error)
        error = PeerUnavailable(f"internal error: {type(error).__name__}")
    await abort(context, error)
