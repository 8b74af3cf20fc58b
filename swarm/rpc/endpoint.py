"""HOST:PORT, written and read; an IPv6 address stands in brackets. Pure."""

import ipaddress

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def endpoint_of(host: str, port: int) -> str:
    """HOST:PORT, for a name or an IP address without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The inverse of `endpoint_of`; the host may be missing. Raises ValueError if the text is no endpoint."""
    host, _, port = endpoint.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint[:80]!r} is no host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def ip_of(host: str) -> Ip | None:
    """The IP address that the text of a host stands for; None if that is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
