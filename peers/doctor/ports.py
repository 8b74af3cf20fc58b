"""What is found of this machine's two ports.

Used by examination.py. That others reach them from outside only others can say.
"""

from peers.doctor.finding import Finding, fine, not_checked, wrong
from swarm.dht import addresses


def own(host: str, port: int, dht_port: int) -> list[Finding]:
    """Whether each port is free here, where it was chosen."""
    return [_own("gRPC port", "--port", host, port), _own("DHT port", "--dht-port", host, dht_port)]


def _own(what: str, option: str, host: str, port: int) -> Finding:
    if not port:
        return not_checked(what, f"a free one is taken, another one each time: {option} fixes it")
    try:
        for one in [host] if host else addresses.everywhere():
            addresses.free_port(one, port)
    except ValueError as error:
        return wrong(what, f"{option} {port} cannot be had: {error}; choose another port")
    return fine(what, f"{port} is free here; whether others reach it is not checked")
