"""Real DHT nodes on the loopback, records for them, and strangers beside them; conftest starts the nodes."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psutil
from pydantic import BaseModel

from swarm.credentials import identity
from swarm.dht import keys
from swarm.dht.node import DhtNode
from swarm.dht.records import seal
from swarm.types import Block

if TYPE_CHECKING:
    from tests.support.dht_stranger import Stranger

OWNER, THIEF = identity.generate(), identity.generate()
KEYS = [
    "notes", "nothing", "forged.1", "forged.2", "forged.3", "prolonged", "ahead", "rubbish", "lies", "cached", "after",
    "and others can join there", "a client finds it", "own", "parted", "survives",
    "again", "whatever",
    *(f"restart {number}" for number in range(2)), *keys.of_run("run.0", [Block(0)]),
]  # fmt: skip
Start = Callable[..., DhtNode]


class Note(BaseModel):
    text: str = "hello"


def sealed_note(key: str, expiration: float, signer: identity.Identity = OWNER) -> bytes:
    return seal(signer, key, Note(), expiration)


def stranger_at(node: DhtNode, *, is_client: bool = True) -> "Stranger":
    from tests.support.dht_stranger import Stranger

    return Stranger(node.addresses()[0], is_client=is_client)


def send(stranger: "Stranger", to: DhtNode, key: str, signers: Sequence[identity.Identity], seconds: float) -> int:
    """Let a stranger store valid records at a node. Return how many the node accepted."""
    expiration = time.time() + seconds
    records = [(signer.peer_id, sealed_note(key, expiration, signer)) for signer in signers]
    return sum(stranger.send(to.addresses()[0], key, records, expiration))


def p2pd_of(node: DhtNode) -> psutil.Process:
    port = node.addresses()[0].split("/")[4]
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess):
            if any(argument.endswith(f"/tcp/{port}") for argument in child.cmdline()):
                return child
    raise AssertionError("p2pd does not run")
