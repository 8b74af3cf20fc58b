"""An invite, swarm://1...: one word that names a run, and the peers through which a joiner enters it.

"1" is the version of the form; base58 digits follow, which have no 0, O, I or l (docs/protocol.md has the bytes). It
holds no secret: the token of a locked run is written behind it, INVITE#TOKEN. Pure.
"""

import hashlib
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Self

import base58

from swarm.rpc.endpoint import ip_of
from swarm.rpc.entry import Entry
from swarm.types import PeerId

SCHEME = "swarm://"
LONGEST = 120
"""The most characters of an invite, unless its only peer has a very long name."""
_VERSION = "1"
_LOCKED = 1
"""The flag of a locked run; there is no other flag."""
_RUN_BYTES, _ID_BYTES, _PORT_BYTES, _CHECK_BYTES = 8, 20, 2, 4
_FOLLOWED = 0x80
"""Set in an endpoint's first byte if another endpoint of the same peer follows."""
_IP_BYTES = {0: 4, 1: 16}
"""The lengths of IP addresses by the other bits of an endpoint's first byte: 0 for IPv4 and 1 for IPv6. For a name
these bits are its length plus one."""
_LONGEST_NAME = 126
_MOST_DIGITS = 1024
"""The most digits that are decoded, far more than any invite has."""


@dataclass(frozen=True, kw_only=True)
class Invite:
    run: str
    """The last 16 hexadecimal digits of its id, which are a digest of its configuration."""
    is_locked: bool
    entries: tuple[Entry, ...]
    """Peers through which to enter, the best first. A peer with several addresses has several entries."""

    @classmethod
    def fitting(cls, run_id: str, entries: Sequence[Entry], *, is_locked: bool) -> Self:
        """An invite with as many of the entries as there is room for, in their order, and with the first in any case.

        Entries whose host has a name of more than 126 characters are left out.

        Raises ValueError if no entry is left.
        """
        writable = [entry for entry in dict.fromkeys(entries) if len(entry.host) <= _LONGEST_NAME]
        if not writable:
            raise ValueError(
                f"an invite names no host of more than {_LONGEST_NAME} characters: announce an IP address instead"
            )
        invite = cls(run=_digest(run_id), is_locked=is_locked, entries=(writable[0],))
        for entry in writable[1:]:
            longer = replace(invite, entries=(*invite.entries, entry))
            invite = longer if len(str(longer)) <= LONGEST else invite
        return invite

    def is_to(self, run_id: str) -> bool:
        return _digest(run_id) == self.run

    def __str__(self) -> str:
        body = bytes([_LOCKED if self.is_locked else 0]) + bytes.fromhex(self.run) + _packed(self.entries)
        return f"{SCHEME}{_VERSION}{base58.b58encode(body + _check(body)).decode()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError, which says whether the text is no invite, one of another version,
        or one that is not whole."""
        if not text.startswith(SCHEME):
            raise ValueError(
                f"{text[:40]!r} is no invite, which begins with {SCHEME}: copy one from the screen of a swarm-peer; "
                "addresses go behind --initial-peers"
            )
        version, digits = text[len(SCHEME) :][:1], text[len(SCHEME) + 1 :]
        if version.isdecimal() and version != _VERSION:
            raise ValueError(
                f"the invite is of version {version}, and this software reads version {_VERSION}: install the release "
                "that the run's peers have"
            )
        try:
            # The time that decoding takes grows with the square of the length.
            data = base58.b58decode(digits) if len(digits) <= _MOST_DIGITS else b""
        except ValueError:
            data = b""
        body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if version != _VERSION or not body or _check(body) != check:
            raise ValueError("the invite is cut off or mistyped: copy the whole word again, from swarm:// to its end")
        run, packed = body[1 : 1 + _RUN_BYTES], body[1 + _RUN_BYTES :]
        try:
            entries = tuple(_unpacked(packed))
        except (IndexError, ValueError):
            entries = ()
        if body[0] not in (0, _LOCKED) or not entries:
            raise ValueError(
                "the invite has something that this software does not know: install the release that the run's peers "
                "have"
            )
        return cls(run=run.hex(), is_locked=body[0] == _LOCKED, entries=entries)


def _digest(run_id: str) -> str:
    return run_id.rpartition(".")[2]


def _check(body: bytes) -> bytes:
    return hashlib.sha256(_VERSION.encode() + body).digest()[:_CHECK_BYTES]


def _packed(entries: Iterable[Entry]) -> bytes:
    data = bytearray()
    for peer_id, of_peer in groupby(entries, key=lambda entry: entry.peer_id):
        data += bytes.fromhex(peer_id)
        endpoints = [_packed_endpoint(entry) for entry in of_peer]
        for number, endpoint in enumerate(endpoints, start=1):
            data.append(endpoint[0] | (_FOLLOWED if number < len(endpoints) else 0))
            data += endpoint[1:]
    return bytes(data)


def _packed_endpoint(entry: Entry) -> bytes:
    port = entry.port.to_bytes(_PORT_BYTES, "big")
    address = ip_of(entry.host)
    if address is None:
        return bytes([len(entry.host) + 1]) + entry.host.encode("ascii") + port
    return bytes([0 if address.version == 4 else 1]) + address.packed + port


def _unpacked(data: bytes) -> Iterable[Entry]:
    """The inverse of `_packed`. Raises ValueError or IndexError for any other bytes."""
    while data:
        peer_id, data = _split(data, _ID_BYTES)
        is_followed = True
        while is_followed:
            is_followed, kind, data = bool(data[0] & _FOLLOWED), data[0] & ~_FOLLOWED, data[1:]
            address, data = _split(data, _IP_BYTES.get(kind, kind - 1))
            port, data = _split(data, _PORT_BYTES)
            host = address.decode("ascii") if kind not in _IP_BYTES else str(ipaddress.ip_address(address))
            yield Entry.at(PeerId(peer_id.hex()), host, int.from_bytes(port, "big"))


def _split(data: bytes, length: int) -> tuple[bytes, bytes]:
    if len(data) < length:
        raise ValueError("it ends too soon")
    return data[:length], data[length:]
