"""Finds the run that is announced in a DHT, and its configuration, for a process that joins it or looks at it."""

from swarm import __version__, config
from swarm.credentials.authority import Authority
from swarm.dht import keys
from swarm.dht.known_records import KnownRecords, RecordStore
from swarm.errors import IncompatibleVersion, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.types import PROTOCOLS, Protocols, RunRecord


async def discover_config(
    store: RecordStore, clock: Clock, *, address: str, authority: Authority | None = None, run: str = ""
) -> config.RunConfig:
    """Find the configuration of the run that the peers at `address` train; errors name this address.

    `authority` is the owner of the wanted run, as the token names it, and `run` the digest at the end of its id:
    without it only one run may be announced.

    Raises PeerUnavailable if the DHT cannot be reached, or no run is announced in it, IncompatibleVersion, and
    ValueError if there are several runs, or another one than the wanted one, if this version cannot read the run's
    configuration, or if the token is missing or another run's.
    """
    runs, faults = await _announced_runs(store, clock, address, authority)
    if authority is not None:
        runs = {run_id: found for run_id, found in runs.items() if found.owner == authority.fingerprint}
    others = [run_id for run_id in runs if run and not run_id.endswith(f".{run}")]
    runs = {run_id: found for run_id, found in runs.items() if run_id not in others}
    if others and not runs:
        raise ValueError(f"the invite is to another run than the one at {address}, {others[0]}: ask for a new invite")
    if len(runs) > 1:
        names = ", ".join(sorted(runs))
        raise ValueError(f"several runs share the DHT at {address}: {names}; start every run on a DHT of its own")
    if runs:
        found = next(iter(runs.values()))
        if found.owner and authority is None:
            raise ValueError(
                f"the run at {address} is locked: ask its owner for a token, and join with {address}#TOKEN"
            )
        return found
    if faults:
        raise faults[0]
    if authority is not None:
        foreign, _ = await _announced_runs(store, clock, address, None)
        for other in foreign.values():
            theirs = f"is owned by {other.owner[:16]}" if other.owner else "is open"
            raise ValueError(
                f"the token is for the run of owner {authority.fingerprint[:16]}, and the run at {address} {theirs}: "
                "take the address and the token from one line"
            )
    raise PeerUnavailable(
        f"no run is announced at {address}: nobody has begun one there, or its peers have left; a run's first peer is "
        "started without an invite and without --initial-peers"
    )


async def discover_runs(
    store: RecordStore, clock: Clock, *, address: str, authority: Authority | None = None, run: str = ""
) -> list[config.RunConfig]:
    """The configurations of all runs at `address` that this process may read, with its token or without one.

    The run whose id ends with the digest `run` comes first, because any node of the DHT can announce made-up runs.
    Raises what discover_config does, if there is no such run.
    """
    runs, _ = await _announced_runs(store, clock, address, authority)
    owner = "" if authority is None else authority.fingerprint
    open_to_us = [found for found in runs.values() if found.owner == owner]
    if not open_to_us:
        return [await discover_config(store, clock, address=address, authority=authority, run=run)]
    return sorted(open_to_us, key=lambda found: (not found.run_id.endswith(f".{run}"), found.run_id))


async def _announced_runs(
    store: RecordStore, clock: Clock, address: str, authority: Authority | None
) -> tuple[dict[str, config.RunConfig], list[Exception]]:
    """Return the configurations by run id, and the errors of those that cannot be read."""
    runs: dict[str, config.RunConfig] = {}
    faults: list[Exception] = []
    for record in await KnownRecords(store, keys.RUNS, RunRecord, authority, clock).read():
        if not PROTOCOLS.meets(theirs := Protocols.of(record)):
            faults.append(
                IncompatibleVersion(
                    f"the run at {address} speaks protocol {theirs}, and this release of swarm, {__version__}, speaks "
                    f"{PROTOCOLS}: install the release that its peers have"
                    + (", or update these" if theirs.newest < PROTOCOLS.oldest else "")
                )
            )
            continue
        try:
            found = config.from_json(
                record.config_json,
                source=f"the configuration of the run at {address}",
                if_unknown="this release does not have it yet: install the one of the run's peers",
            )
            if found.lacks_sizes:
                raise ValueError(
                    f"the configuration of the run at {address} leaves out sizes: its first peer is broken"
                )
        except ValueError as error:
            faults.append(error)
        else:
            # The run's id is computed from the configuration, so that a record cannot claim another run's id.
            runs[found.run_id] = found
    return runs, faults
