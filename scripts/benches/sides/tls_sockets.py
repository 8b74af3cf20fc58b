"""Two processes that send each other bytes over TLS and do nothing else, for the bench `hop`.

There is a socket for each direction, with a thread at either end, since OpenSSL does not let two threads read from a
connection and write to it at once.
"""

import socket
import ssl
import threading
from pathlib import Path
from queue import Queue

from peers.local.supervisor import Supervisor
from scripts.benches.shared.common import side, wait_for_json, write_json
from swarm.credentials import identity

IN_FLIGHT = 4  # Pieces that are under way at a time


class Pair:
    """The calling end of the two sockets."""

    def __init__(self, children: Supervisor, folder: Path, *, num_bytes: int) -> None:
        folder.mkdir()
        ready_file = folder / "tls.json"
        child = children.start("tls-sockets", side("tls_sockets", ready_file, num_bytes))
        ready = wait_for_json(ready_file, children)
        self.pid = child.pid
        context = ssl.create_default_context(cadata=ready["certificate_pem"])
        context.check_hostname = False
        self._out, self._back = (
            context.wrap_socket(socket.create_connection(("127.0.0.1", ready["port"]))) for _ in range(2)
        )
        self._piece, self._answer = bytes(num_bytes), bytearray(num_bytes)

    def exchange(self, number: int) -> None:
        room = threading.Semaphore(IN_FLIGHT)

        def send() -> None:
            for _ in range(number):
                room.acquire()
                self._out.sendall(self._piece)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        for _ in range(number):
            assert _fill(self._back, self._answer)
            room.release()
        sender.join()

    def close(self) -> None:
        self._out.close()
        self._back.close()


def _fill(sock: ssl.SSLSocket, buffer: bytearray) -> bool:
    """Receive as many bytes as the buffer has; False at the end."""
    rest = memoryview(buffer)
    while rest:
        num_bytes = sock.recv_into(rest)
        if not num_bytes:
            return False
        rest = rest[num_bytes:]
    return True


def main(ready_file: Path, num_bytes: int) -> None:
    own = identity.generate()
    key_file = ready_file.with_name("own.pem")
    key_file.write_text(own.key_pem + own.certificate_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(key_file)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        write_json(ready_file, {"port": listener.getsockname()[1], "certificate_pem": own.certificate_pem})
        taken, back = (context.wrap_socket(listener.accept()[0], server_side=True) for _ in range(2))
    whole: Queue[bytearray | None] = Queue()
    free: Queue[bytearray] = Queue()
    for _ in range(IN_FLIGHT):
        free.put(bytearray(num_bytes))

    def take() -> None:
        while _fill(taken, buffer := free.get()):
            whole.put(buffer)
        whole.put(None)

    threading.Thread(target=take, daemon=True).start()
    while (buffer := whole.get()) is not None:
        back.sendall(buffer)
        free.put(buffer)
