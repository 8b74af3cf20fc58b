"""The caller's side of a call with many messages as its answer. It may take hours, but must never stand still.

Used by content and by averaging/wire/transport.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.rpc.failures import translate

SLOWEST_BYTES_PER_SECOND = 32 << 10
"""A download that is slower than this on average is given up, since another peer may be faster. One longest silence is
not counted."""


async def download(call: Any, peer_id: str, *, silence_seconds: float) -> AsyncGenerator[Any, None]:
    """Yield the messages of a grpc.aio.UnaryStreamCall. Closing this generator cancels the call.

    Args:
        silence_seconds: the longest wait for the next message.

    Raises:
        DeadlineExceeded: the peer was silent, or too slow.
        PeerUnavailable: the call ended early.
        SwarmError: the error with which the peer ended the call.
    """
    time = asyncio.get_running_loop().time
    waited_seconds = num_bytes = 0.0
    try:
        while True:
            asked_at = time()
            async with asyncio.timeout(silence_seconds):
                reply = await call.read()
            if reply is grpc.aio.EOF:
                # A bad status is known only at the end of the stream.
                if await call.code() is not grpc.StatusCode.OK:
                    raise PeerUnavailable(f"the download from {peer_id} ended early")
                return
            waited_seconds += time() - asked_at
            num_bytes += reply.ByteSize()
            if waited_seconds > silence_seconds + num_bytes / SLOWEST_BYTES_PER_SECOND:
                raise DeadlineExceeded(f"only {num_bytes:.0f} bytes came from {peer_id} in {waited_seconds:.0f} s")
            yield reply
    except TimeoutError:
        raise DeadlineExceeded(f"nothing came from {peer_id} for {silence_seconds} s") from None
    except grpc.aio.AioRpcError as error:
        raise translate(error) from None
    finally:
        call.cancel()
