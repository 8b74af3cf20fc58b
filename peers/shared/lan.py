"""Runs in the local network: a peer announces the invite to its run there, and programs without an INVITE find it.

This uses DNS service discovery over multicast (RFC 6763 and 6762), as printers do, and only with --lan. An announcement
is a claim, read like an invite from a stranger: it names peers by their keys, and holds no secret. If several runs are
announced, and more than one has a peer that answers, the user has to choose.
"""

import asyncio
import contextlib
import dataclasses
import logging
import re
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from peers.shared.entrance import Entrance
from peers.shared.network import in_turns
from peers.shared.run_options import EntranceOptions
from swarm.errors import DeadlineExceeded, PeerUnavailable, SwarmError
from swarm.machine import extras
from swarm.machine.clock import SystemClock, run_loop, wait
from swarm.rpc.endpoint import ip_of
from swarm.rpc.invite import Invite

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

logger = logging.getLogger(__name__)

SERVICE = "_swarm-run._tcp.local."
LOOK_SECONDS, SAY_SECONDS = 5.0, 2.0
"""How long to look for a run, and after how long a log line says so."""
SETTLE_SECONDS = 1.0
"""How long to wait for further runs once one was found: answers come within some tenths of a second."""
ANSWER_SECONDS = 3.0
"""How long the peers of a run that is announced beside others have to answer."""
MOST_FOUND, MOST_ASKED = 64, 1024
"""The most announcements that are accepted, and the most that are queried for their invite; the rest is ignored."""
MOST_ENTRIES = 8
"""The most peers that the merged invite to one run names."""
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}\.[0-9a-f]{16}")
_INVITE, _NAME = b"invite", b"run"
"""The keys of an announcement's TXT record. Each entry of that has 255 bytes at most."""


Options = TypeVar("Options", bound=EntranceOptions)


def with_invite(options: Options) -> Options:
    """The options, with --lan replaced by the invite to the only run in this network. Raises as found_invite does."""
    if not options.lan:
        return options
    return dataclasses.replace(options, invite=found_invite(insecure=options.insecure), lan=False)


def found_invite(*, insecure: bool) -> str:
    """The invite to the only run in this network; if there are several, to the only one with TLS, or without it if
    `insecure`. Raises ValueError if there are several, or as `find` does, and PeerUnavailable if there is none."""
    runs = _found(insecure=insecure)
    if len(runs) > 1:
        found = ", ".join(f"{name}: {invite}" for name, invite in sorted(runs.items()))
        raise ValueError(f"several runs are in this network; give one of these invites instead of --lan: {found}")
    [(name, invite)] = runs.items()
    logger.info("found run %s in this network", name)
    return str(invite)


def found_invites(*, insecure: bool) -> list[str]:
    """The invites to all runs in this network, in the order of their ids. Raises PeerUnavailable if there are none.
    `insecure` is as in `found_invite`."""
    return [str(invite) for _, invite in sorted(_found(insecure=insecure).items())]


def _found(*, insecure: bool) -> dict[str, Invite]:
    runs = run_loop(find())
    if not runs:
        raise PeerUnavailable(
            f"no run was found in this network in {LOOK_SECONDS:.0f} s: start one of its peers with --lan, or give "
            "its INVITE, which is needed also where the network passes on no multicast"
        )
    return runs if len(runs) == 1 else run_loop(answering(runs, insecure=insecure)) or runs


async def answering(runs: Mapping[str, Invite], *, insecure: bool) -> dict[str, Invite]:
    """The runs of which some peer in the invite answers: anybody can announce a run that does not exist. `insecure`
    says whether runs without TLS are wanted, or runs with TLS. An invite does not say whether its run has TLS. Runs of
    the other kind are left out as well, and named in the log."""
    async with asyncio.TaskGroup() as tasks:
        answers = {run_id: tasks.create_task(_answers(invite, insecure=insecure)) for run_id, invite in runs.items()}
        others = {run_id: tasks.create_task(_answers(invite, insecure=not insecure)) for run_id, invite in runs.items()}
    wanted = {run_id: invite for run_id, invite in runs.items() if answers[run_id].result()}
    for run_id in sorted(runs.keys() - wanted.keys()):
        if others[run_id].result():
            way = "with TLS: leave --insecure out to enter it" if insecure else "without TLS: enter it with --insecure"
            logger.warning("run %s is in this network as well, %s", run_id, way)
    return wanted


async def _answers(invite: Invite, *, insecure: bool) -> bool:
    """Whether some peer lets this process read the run's records. For a locked run, a peer that refuses is enough."""
    entrance = Entrance(entries=invite.entries, run=invite.run, token=None, insecure=insecure)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            async with entrance.asking(SystemClock()) as (member, _):
                await member.known.look(member.directory, member.blocks)
    except (TimeoutError, PeerUnavailable, DeadlineExceeded):
        return False
    except ValueError:
        return invite.is_locked
    except SwarmError:
        # The run is there, but speaks another version, for example.
        pass
    return True


async def find() -> dict[str, Invite]:
    """The runs that are announced in this network, by id. Cancellation ends the search. Raises ValueError if zeroconf
    is not installed, or this machine has no multicast."""
    told = dict[str, tuple[str, Invite]]()
    asking = dict[str, asyncio.Task[None]]()
    first = asyncio.Event()
    async with _multicast() as network:
        from zeroconf import Error, ServiceStateChange
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

        async def ask(name: str) -> None:
            # Anybody can announce a name that is none, which zeroconf refuses only here.
            with contextlib.suppress(Error):
                info = AsyncServiceInfo(SERVICE, name)
                if await info.async_request(network.zeroconf, int(LOOK_SECONDS * 1000)):
                    claim = claimed(info.properties)
                    if claim is not None and len(told) < MOST_FOUND:
                        told[name] = claim
                        first.set()

        async with asyncio.TaskGroup() as tasks:

            def note(zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
                if state_change is ServiceStateChange.Added and name not in asking and len(asking) < MOST_ASKED:
                    asking[name] = tasks.create_task(ask(name))

            browser = AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[note])
            await wait(first, SAY_SECONDS)
            if not first.is_set():
                logger.warning("looking for a run in this network: %.0f s so far, of %.0f", SAY_SECONDS, LOOK_SECONDS)
            await wait(first, LOOK_SECONDS - SAY_SECONDS)
            if first.is_set():
                await asyncio.sleep(SETTLE_SECONDS)
            await browser.async_cancel()
            for task in asking.values():
                task.cancel()
    return merged(told.values())


def require_installed() -> None:
    extras.require("--lan", "zeroconf", "lan", modules=["zeroconf"])


def claimed(properties: Mapping[bytes, bytes | None]) -> tuple[str, Invite] | None:
    """The run's id and the invite in an announcement; None if they cannot be read or do not fit each other."""
    try:
        name = (properties.get(_NAME) or b"").decode("ascii")
        invite = Invite.parse((properties.get(_INVITE) or b"").decode("ascii"))
    except ValueError:
        return None
    return (name, invite) if _RUN.fullmatch(name) and invite.is_to(name) else None


def merged(claims: Iterable[tuple[str, Invite]]) -> dict[str, Invite]:
    """One invite to each run, with entries from all of its peers' claims: a false claim does not hide the others."""
    by_run: dict[str, list[Invite]] = defaultdict(list)
    for name, invite in claims:
        by_run[name].append(invite)
    return {
        name: dataclasses.replace(
            invites[0],
            # Who says falsely that a run is locked keeps nobody out, nor does who says that it is open.
            is_locked=all(invite.is_locked for invite in invites),
            # The first entry of each claim, then the second of each, and so on.
            entries=tuple(dict.fromkeys(in_turns(invite.entries for invite in invites)))[:MOST_ENTRIES],
        )
        for name, invites in by_run.items()
    }


class Announcer:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._invite: asyncio.Future[Invite] = asyncio.get_running_loop().create_future()

    def tell(self, invite: Invite) -> None:
        """Announce this invite from now on. Later ones are ignored: they name the same peer at the same address."""
        if not self._invite.done():
            self._invite.set_result(invite)

    async def run(self) -> None:
        """Announce the first invite until cancelled, and then withdraw it. Without multicast, log a warning."""
        invite = await self._invite
        try:
            async with _multicast() as network:
                from zeroconf.asyncio import AsyncServiceInfo

                info = AsyncServiceInfo(
                    SERVICE, f"{secrets.token_hex(8)}.{SERVICE}", port=invite.entries[0].port,
                    properties={_INVITE: str(invite), _NAME: self._run_id}, server=f"{secrets.token_hex(8)}.local.",
                    parsed_addresses=_addresses(invite),
                )  # fmt: skip
                await network.async_register_service(info)
                logger.info("announces the invite in this network (--lan)")
                await asyncio.Event().wait()
        except ValueError as error:
            logger.warning("the run is not announced in this network: %s", error)


def _addresses(invite: Invite) -> list[str]:
    """The peer's IP addresses. Joiners read the invite instead, but an announcement must have an address."""
    ips = [ip_of(entry.host) for entry in invite.entries]
    return [str(ip) for ip in ips if ip is not None] or ["127.0.0.1"]


@asynccontextmanager
async def _multicast() -> "AsyncIterator[AsyncZeroconf]":
    require_installed()
    from zeroconf import IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    # zeroconf warns of every interface on which it cannot send, such as the loopback.
    logging.getLogger("zeroconf").setLevel(logging.ERROR)
    try:
        network = AsyncZeroconf(ip_version=IPVersion.All)
    except OSError as error:
        raise ValueError(f"--lan: this machine has no multicast ({error.strerror}): give INVITE instead") from None
    try:
        yield network
    finally:
        await network.async_close()
