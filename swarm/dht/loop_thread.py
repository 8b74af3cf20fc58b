"""A thread with an event loop of its own.

Used by node, so that a busy program does not delay the DHT's answers, nor the DHT the program.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines in a thread until it is closed. As a daemon thread it does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self.loop = _Loop()
        # When neighbours or p2pd die, hivemind leaves failed tasks behind. Their tracebacks are of no use, so only a
        # debug line is logged.
        self.loop.set_exception_handler(lambda _, context: logger.debug("%s: %s", name, context.get("message")))
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the thread still takes work."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work to its end while the calling thread waits. If the wait is interrupted, the work is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work to its end, awaited in another loop. Cancellation cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def close(self) -> None:
        """Cancel all work, close the connections that it leaves open, and end the thread."""
        self.run(self._end_work())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_work(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for connection in list(self.loop.connections):
            connection.abort()
        # Closed connections and cancelled tasks end in the loop's next turn.
        await asyncio.sleep(0)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that keeps a list of its connections to p2pd, because hivemind leaves one open when a call that uses it is
    cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    async def create_unix_connection(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().create_unix_connection(*args, **options)
        self.connections.add(transport)
        return transport, protocol
