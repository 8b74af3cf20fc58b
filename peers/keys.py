"""swarm-keys: makes a run's owner key and the tokens with which others join it, and amends the run.

    swarm-keys new owner.pem
    swarm-keys issue owner.pem --role peer --expires 30d
    swarm-keys show TOKEN
    swarm-keys amend owner.pem INVITE --set optimizer.learning_rate=3e-4 --at-round 120
    swarm-keys tokens owner.pem INVITE
    swarm-keys amend owner.pem INVITE --revoke NAME

Whoever has the owner's key file decides who may join, and how the run goes on. `tokens` and `amend` need the network.
"""

import asyncio
import contextlib
import dataclasses
import datetime
import json
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from peers.shared import cli
from peers.shared.cli import Command
from peers.shared.entrance import find_entrance, reading
from peers.shared.network import Membership, newest_round
from peers.shared.option_types import one_of
from peers.shared.process import cache_folder
from peers.shared.run_options import RunOptions
from peers.shared.token_option import read_token
from swarm.config import Amendment, with_settings
from swarm.credentials.authority import is_token_id, token_id
from swarm.credentials.rights import Role
from swarm.credentials.token import PREFIX, OwnerKey, new_owner
from swarm.dht.directory import Announcement
from swarm.errors import NotAllowed, PeerUnavailable
from swarm.machine.clock import SystemClock, run_loop
from swarm.machine.words import counted
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import AmendmentsRecord

PROG = "swarm-keys"
PACE_SECONDS = 5.0
"""How long rounds are counted, to know how soon the next ones come."""
SPARE_ROUNDS = 3
HEARD_SECONDS = 60.0
"""All peers hear of an amendment within this time, if the DHT works: they look every five seconds."""
TRAINERS_PROTOCOL = 13
"""Trainers that speak this protocol follow amendments."""
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Make an owner's key: whoever has the file may let others into the runs that are begun with it."""

    file: tyro.conf.Positional[Path]
    """File to make; only this user can read it."""


@dataclass(frozen=True, kw_only=True)
class OwnerOptions:
    """What every command is told that acts for the owner."""

    file: tyro.conf.Positional[Path]
    """The owner's key file."""


@dataclass(frozen=True, kw_only=True)
class OwnersRunOptions(OwnerOptions):
    """What every command is told that enters the owner's run."""

    invite: tyro.conf.Positional[str]
    """The invite to the run, swarm://..., as every swarm-peer prints it."""


@dataclass(frozen=True, kw_only=True)
class IssueOptions(OwnerOptions):
    """Print a token: whoever has it can join until it expires, with any number of processes."""

    role: Annotated[Role, one_of(tuple(Role)), tyro.conf.arg(help=" ".join(f"{role}: {role.may}." for role in Role))]
    expires: str = "30d"
    """How long it holds: a number of days (30d), hours (12h) or minutes (45m)."""
    name: str = "token"
    """What to call it, for `swarm-keys tokens` and `--revoke`: who gets it, say."""

    def __post_init__(self) -> None:
        number, unit = self.expires[:-1], self.expires[-1:]
        if not (number.isascii() and number.isdigit() and 0 < int(number) < 10**6 and unit in _UNITS):
            raise ValueError(f"--expires takes a number and d, h or m (30d, 12h, 45m), not {self.expires!r}")

    @property
    def lifetime(self) -> datetime.timedelta:
        return datetime.timedelta(**{_UNITS[self.expires[-1]]: int(self.expires[:-1])})


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Say what a token is."""

    token: tyro.conf.Positional[str]
    """The token, or @FILE."""


@dataclass(frozen=True, kw_only=True)
class TokensOptions(OwnersRunOptions):
    """List the tokens with which the processes of a running run have joined."""


@dataclass(frozen=True, kw_only=True)
class AmendOptions(OwnersRunOptions):
    """Change settings of a running run, at all its peers from one round on, or revoke tokens, at once."""

    set: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(
            metavar="SECTION.KEY=VALUE",
            help="A setting, such as optimizer.learning_rate=3e-4; may be given several times. docs/security.md says "
            "which can be amended.",
        ),
    ] = ()
    revoke: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(
            metavar="TOKEN",
            help="A token that lets nobody in any more: its name or its digits, as `swarm-keys tokens` lists them, or "
            "the token itself, or @FILE. Whoever has joined with it is shut out within seconds. May be given several "
            "times.",
        ),
    ] = ()
    at_round: int | None = None
    """The first round with these settings; without it the next one that all peers surely hear of in time."""

    def __post_init__(self) -> None:
        if not (self.set or self.revoke):
            raise ValueError(
                "--set says what to amend, such as --set optimizer.learning_rate=3e-4, or --revoke a token"
            )


@dataclass(frozen=True, kw_only=True)
class TokenInUse:
    """A token with which processes have joined a run.

    Attributes:
        digits: see authority.token_id.
        bearers: the names of these processes.
    """

    name: str
    role: str
    digits: str
    bearers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.digits}), a {self.role}'s: {', '.join(self.bearers)}"


def main(argv: Sequence[str]) -> int:
    return cli.run(PROG, __doc__, _COMMANDS, argv)


def new(options: NewOptions) -> None:
    """Make an owner's key."""
    owner = new_owner(_now())
    owner.save(options.file)
    print(f"{options.file}: the key of owner {owner.authority.fingerprint}")
    print(f"  a token: {PROG} issue {options.file} --role peer")


def issue(options: IssueOptions) -> None:
    owner = OwnerKey.load(options.file)
    print(owner.issue(options.role, name=options.name, now=_now(), lifetime=options.lifetime))


def show(options: ShowOptions) -> None:
    """Say what a token is."""
    token = read_token(options.token)
    expires = datetime.datetime.fromtimestamp(token.expires_at, datetime.UTC)
    state = "holds until" if expires > _now() else "expired on"
    print(f"{token.name}: a {token.role}'s token of owner {token.authority.fingerprint}")
    print(f"  its digits are {token.token_id}")
    print(f"  {state} {expires:%Y-%m-%d %H:%M} UTC")


@contextlib.asynccontextmanager
async def _entered(options: OwnersRunOptions) -> AsyncIterator[tuple[OwnerKey, Membership]]:
    """The owner, in the run of an invite, with a token that is made for that."""
    owner, clock = OwnerKey.load(options.file), SystemClock()
    token = owner.issue(Role.PEER, name="owner", now=_now(), lifetime=datetime.timedelta(hours=1))
    way = RunOptions(invite=options.invite.partition("#")[0], token=str(token))
    async with reading(find_entrance(way, {}, prog=PROG, clock=clock), clock) as member:
        yield owner, member


async def tokens(options: TokensOptions) -> None:
    """List the tokens with which a run's processes have joined."""
    async with _entered(options) as (_, member):
        print("\n".join(map(str, await tokens_of(member))) or "no process of the run is listed")


async def tokens_of(member: Membership) -> list[TokenInUse]:
    """The tokens with which the peers and trainers of a locked run have joined, without those that are revoked. Raises
    PeerUnavailable."""
    bearers: dict[tuple[str, str, str], list[str]] = {}
    for name, chain_pem in await member.directory.members(member.blocks):
        assert member.identity.authority is not None, "only a locked run's owner looks for tokens"
        with contextlib.suppress(NotAllowed):
            one = member.identity.authority.member(chain_pem, member.clock.time())
            bearers.setdefault((one.token_name, one.role, token_id(chain_pem)), []).append(name)
    return [
        TokenInUse(name=name, role=role, digits=digits, bearers=tuple(sorted(names)))
        for (name, role, digits), names in sorted(bearers.items())
    ]


def digits_of(text: str, owner: OwnerKey, in_use: Sequence[TokenInUse]) -> str:
    """The digits of the token that --revoke names. Raises ValueError if it names none, several, or another owner's."""
    if text.startswith((PREFIX, "@")):
        token = read_token(text)
        if token.authority.fingerprint != owner.authority.fingerprint:
            raise ValueError(f"the token {token.name!r} is of owner {token.authority.fingerprint[:16]}: not this run's")
        return token.token_id
    if is_token_id(text):
        return text
    named = [token.digits for token in in_use if token.name == text]
    if len(named) == 1:
        return named[0]
    number = f"{len(named)} tokens in use have" if named else "no token in use has"
    listed = "; ".join(map(str, in_use)) or "none"
    raise ValueError(f"{number} the name {text!r}: give the digits of one, or the token itself; in use are {listed}")


async def _revocation(member: Membership, owner: OwnerKey, tokens: Sequence[str]) -> str:
    """The setting that revokes tokens, besides those that are revoked already. This process shuts their bearers out at
    once: whatever they say of the run must not keep the owner from amending it. Raises what tokens_of and digits_of
    raise."""
    in_use = await tokens_of(member)
    revoked = {*member.timeline.revoked, *(digits_of(text, owner, in_use) for text in tokens)}
    assert member.identity.authority is not None
    member.identity.authority.revoke(revoked)
    return f"revoked={json.dumps(sorted(revoked))}"


async def amend(options: AmendOptions) -> None:
    """Sign an amendment, and have the run's peers hear of it."""
    async with _entered(options) as (owner, member):
        clock, timeline, settings = member.clock, member.timeline, list(options.set)
        if options.revoke:
            settings.append(await _revocation(member, owner, options.revoke))
        settings = await _with_digests(member, settings)
        await require_trainers(member, settings)
        before = await _peers_of(member)
        print(f"{counted(len(before), 'peer')} at round {newest_round(before)}: measuring how fast rounds go by")
        await clock.sleep(PACE_SECONDS)
        now = await _peers_of(member)
        await member.hear_amendments()
        if {reply.amended for reply in now} - {timeline.last}:
            raise PeerUnavailable("an earlier amendment is still on its way to some peers: try again in a minute")
        pace = (newest_round(now) - newest_round(before)) / PACE_SECONDS
        last = timeline.amendments[-1].round if timeline.amendments else 0
        least = max(last, newest_round(now) + SPARE_ROUNDS + math.ceil(pace * HEARD_SECONDS))
        wanted = least if options.at_round is None else options.at_round
        if wanted < least:
            raise ValueError(
                f"--at-round {wanted} is too near: the run is at round {newest_round(now)}, all peers have to hear of "
                f"it in time, and it comes after earlier amendments, so give {least} or more"
            )
        amendment = Amendment.sign(owner, timeline, wanted, settings)
        timeline.add((*timeline.texts, amendment.text))
        record = AmendmentsRecord(peer_id=member.peer_id, announced_at=clock.time(), amendments=timeline.texts)
        announcing = asyncio.create_task(
            Announcement(member.directory, "the amendment", lambda: record, clock, level=logging.WARNING).keep()
        )
        try:
            await _until_known(member, amendment)
        finally:
            announcing.cancel()


async def _with_digests(member: Membership, settings: list[str]) -> list[str]:
    """The settings, with the digests of the text that they name, which has to be on this machine."""
    keys = {setting.partition("=")[0].strip() for setting in settings}
    if "data.digest" in keys or not keys & {"data.dataset", "data.paths"}:
        return settings
    # These import torch, which takes seconds.
    from peers.shared.tokenizer import have_tokenizer
    from swarm.data import corpora

    data = with_settings(member.timeline.under(member.timeline.last), settings).data
    print("reading the text, whose digest trainers compare")
    local = dataclasses.replace(data, tokenizer=await have_tokenizer(member, cache_folder()))
    return [*settings, *await asyncio.to_thread(corpora.digest_settings, local, cache_dir=cache_folder() / "corpora")]


async def _until_known(member: Membership, amendment: Amendment) -> None:
    """Wait until all peers that answer know of an amendment, and say so. Raises PeerUnavailable if some do not in
    time."""
    deadline, late = member.clock.monotonic() + HEARD_SECONDS, ["the run's peers"]
    while late and member.clock.monotonic() < deadline:
        await member.clock.sleep(1.0)
        replies = await _peers_of(member)
        late = sorted({reply.name or reply.peer_id[:8] for reply in replies if reply.amended != amendment.digest})
    if late:
        raise PeerUnavailable(f"{', '.join(late)} may not have heard of it yet; what others know does not get lost")
    print(f"{amendment}: all peers know of it")


async def _peers_of(member: Membership) -> list[pb.DescribeReply]:
    """What the run's peers that answer say of themselves. Raises PeerUnavailable if there are none, or some are of a
    release that knows no amendments."""
    await member.known.look(member.directory, member.blocks)
    replies = await member.poll().replies(member.known.everyone())
    if not replies:
        raise PeerUnavailable("no peer of the run answers")
    if old := [reply.name or reply.peer_id[:8] for reply in replies if not reply.HasField("amended")]:
        raise PeerUnavailable(f"{', '.join(old)} run a release that knows no amendments")
    return replies


async def require_trainers(member: Membership, settings: Sequence[str]) -> None:
    """Raise PeerUnavailable if a trainer's release knows no amendments, and the settings are for trainers."""
    trainers = await member.directory.trainers()
    old = [each.display_name for each in trainers if each.protocol_version < TRAINERS_PROTOCOL]
    if old and any(setting.startswith("data.") for setting in settings):
        raise PeerUnavailable(f"{', '.join(old)} run a release whose trainers know no amendments")


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


_COMMANDS: dict[str, Command] = {
    "new": (NewOptions, new),
    "issue": (IssueOptions, issue),
    "show": (ShowOptions, show),
    "tokens": (TokensOptions, lambda options: run_loop(tokens(options))),
    "amend": (AmendOptions, lambda options: run_loop(amend(options))),
}
