"""Endpoints in a peer's record: host:port, or the way through a meeting point, tunnel:PEER_ID@HOST:PORT. Pure."""

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

from swarm.rpc.endpoint import host_and_port
from swarm.rpc.entry import Entry
from swarm.types import TUNNEL


def tunnel_through(meeting_point: Entry) -> str:
    """The endpoint of a peer that waits at a meeting point."""
    return f"{TUNNEL}{meeting_point}"


def meeting_point_of(endpoint: str) -> Entry | None:
    """The meeting point through which an endpoint leads; None if it is reached directly. Raises ValueError."""
    return Entry.parse(endpoint.removeprefix(TUNNEL)) if endpoint.startswith(TUNNEL) else None


def points_of(endpoints: Iterable[str]) -> list[Entry]:
    """The meeting points through which these endpoints lead, each once. What is no endpoint is left out."""
    found = dict[Entry, None]()
    for endpoint in endpoints:
        with suppress(ValueError):
            if (point := meeting_point_of(endpoint)) is not None:
                found[point] = None
    return list(found)


def where(endpoint: str) -> str:
    """An endpoint in words for people: `at HOST:PORT`, or `by way of HOST:PORT` if a meeting point there leads on."""
    return f"by way of {endpoint.rpartition('@')[2]}" if endpoint.startswith(TUNNEL) else f"at {endpoint}"


def direct(endpoints: Iterable[str]) -> list[str]:
    """The endpoints that lead through no meeting point."""
    return [endpoint for endpoint in endpoints if not endpoint.startswith(TUNNEL)]


def versions(endpoints: Iterable[str]) -> set[int]:
    """The versions of IP, 4 or 6, by which direct endpoints are reached; a name counts for both."""
    found = set[int]()
    for endpoint in endpoints:
        try:
            found.add(ipaddress.ip_address(host_and_port(endpoint)[0]).version)
        except ValueError:
            found |= {4, 6}
    return found
