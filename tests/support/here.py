"""Where servers of tests listen: on loopback, at any free port, without a DHT."""

from contextlib import AbstractAsyncContextManager, nullcontext

from peers.reach.listen import Announced


class Here:
    """Does as Reach does, and asks nobody."""

    host, port = "127.0.0.1", 0

    def announced(self, own_port: int) -> Announced:
        return Announced(endpoints=(f"127.0.0.1:{own_port}",))

    def held(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()


HERE = Here()
