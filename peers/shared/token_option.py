"""Finds the token with which a program joins a run: in an option, in the address, or in the environment.

The run's peers decide whether the token is good.
"""

from collections.abc import Mapping, Sequence

from peers.shared.cli import spelled_out
from peers.shared.stopping import FAREWELL_SECONDS, in_utc
from swarm.credentials.identity import Identity
from swarm.credentials.rights import require_program
from swarm.credentials.token import Token
from swarm.machine.clock import Clock

VARIABLE = "SWARM_TOKEN"
"""The environment variable with a token. It is used only if no option and no address has a token."""


def read_token(text: str) -> Token:
    """Read a token, or the one in a file (@FILE). Raises ValueError, or OSError if the file cannot be read."""
    return Token.parse(spelled_out(text))


def find_token(
    option: str | None, given_addresses: Sequence[str], environment: Mapping[str, str], *, prog: str, insecure: bool,
    clock: Clock,
) -> tuple[tuple[str, ...], Token | None]:  # fmt: skip
    """The given addresses, each without `#` and what follows it, and the token, which is None for an open run.

    Args:
        option: the value of `--token`.
        prog: the program; rights.PROGRAMS has the roles that it can work with.

    Raises:
        ValueError: a token is malformed, empty, expired, or of a role with which the program cannot work; or there
            are two different ones; or the run has no TLS.
        OSError: a file with a token cannot be read.
    """
    parted = [address.partition("#") for address in given_addresses]
    addresses = tuple(address for address, _, _ in parted)
    sources = [("--token", option), *((f"what follows {address}#", text) for address, mark, text in parted if mark)]
    given = [(where, text) for where, text in sources if text is not None]
    if not given and VARIABLE in environment:
        given = [(VARIABLE, environment[VARIABLE])]
    for where, text in given:
        # An empty token, for example from an unset shell variable, is an error: it must not open a run that was to be
        # locked.
        if not text:
            raise ValueError(f"{where} is empty: it takes a token; for an open run leave it out")
    tokens = {str(token): token for token in (read_token(text) for _, text in given)}
    if len(tokens) > 1:
        raise ValueError("--token and the addresses bring different tokens: leave all but one out")
    if not tokens:
        return addresses, None
    token = next(iter(tokens.values()))
    if token.expires_at <= clock.time() + FAREWELL_SECONDS:
        how = "expired on" if token.expires_at <= clock.time() else "is about to end, at"
        raise ValueError(f"the token {how} {in_utc(token.expires_at)}: ask the run's owner for a new one")
    require_program(token.role, prog)
    if insecure:
        raise ValueError("--insecure leaves nothing locked: a run with a token needs TLS")
    return addresses, token


def admitted(identity: Identity, token: Token | None) -> Identity:
    """The identity with which to join the run: with a certificate made with the token, if there is a token."""
    return identity if token is None else token.admit(identity)
