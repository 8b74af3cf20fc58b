"""One start of a peer's process, and whether another process serves under the same identity.

Key files may be copied, for example with a disk image. Then two processes replace each other's records under one id. A
record says which process announced it. If it was another one under this peer's id, which may be dead, this peer asks
it, itself or through other peers, and the answer is signed with the key that both have. If both are alive, the one that
came later has to end. Clocks do not decide that, because a copy may say any time: a process that was announced alone
for a while has seen for itself that it was first.
"""

import datetime
import json
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from peers.shared.network import Membership
from swarm.credentials.identity import verify
from swarm.errors import Fatal, IntegrityError, PeerUnavailable
from swarm.machine.clock import Clock
from swarm.rpc.entry import where
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import LATEST_TIME, PeerRecord

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
FIRST_SECONDS = 30.0
"""A process whose record was the only one under its id for so long, and in sight of the DHT, was there before any other
one whose record appears. No record comes into sight that late."""
NUM_ASKED = 3
"""How many other peers are asked to ask the rival, if it does not answer this one."""
REMEMBERED_SECONDS = 2.0
"""How long an answer about another peer's identity is reused: each such answer costs a call to a third peer."""


@dataclass(kw_only=True)
class Incarnation:
    """One start of a peer's process.

    Its nonce is a word that no other start has, and is empty where no peer checks for rivals. `alone_since` is since
    when its record is the only one under its id, by its monotonic clock, as Rivals.watch finds; infinity while it is
    not.
    """

    nonce: str = ""
    started_at: float = 0.0
    alone_since: float = math.inf

    def stays(self, rival_nonce: str, now: float) -> bool:
        """Whether this process stays if another one is alive. If neither has seen that it was first, chance decides."""
        return now - self.alone_since >= FIRST_SECONDS or self.nonce < rival_nonce


def begin(clock: Clock) -> Incarnation:
    return Incarnation(nonce=secrets.token_hex(8), started_at=clock.time())


class Rivals:
    """Finds other processes that run under the identity of this peer, or under that of a peer that asks this one."""

    def __init__(self, membership: Membership, *, own: Incarnation, endpoint: Callable[[], str] = str) -> None:
        self._membership = membership
        self._identity = membership.identity
        self._known = membership.known
        self._poll = membership.poll()
        self._own = own
        self._endpoint = endpoint
        self._asked: dict[str, tuple[float, str, pb.Incarnation | None]] = {}
        """The latest check for each peer that asked: its time, the asker's nonce, and the result."""

    async def require_alone(self, *, begins: bool = True) -> None:
        """Raise Fatal, which names the other's endpoint, if another process under this identity answers that it stays.
        If this one only begins, and is not announced yet, any other one stays."""
        own = self._identity.peer_id
        if not (records := self._announced_by_others(own, self._own.nonce)):
            return
        caller = pb.Incarnation(peer_id=own, nonce=self._own.nonce, started_at=self._own.started_at, begins=begins)
        rival = await self._ask(records, caller)
        if rival is None:
            logger.info("the process that served under this identity before does not answer: asking others about it")
            rival = await self._ask(self._known.everyone()[:NUM_ASKED], caller)
        if rival is not None:
            since = datetime.datetime.fromtimestamp(min(max(0.0, rival.started_at), LATEST_TIME), datetime.UTC)
            raise Fatal(
                f"another process serves under this identity {where(rival.endpoint)} since "
                f"{since.strftime('%Y-%m-%d %H:%M:%S UTC')}: start this one with an --identity FILE of its own, which "
                "it makes, or stop the other one"
            )

    async def watch(self) -> None:
        """Check again at intervals, until cancelled, because the other process may not have been visible at first.
        Raises Fatal if the other process was there first."""
        clock, directory, own = self._membership.clock, self._membership.directory, self._own
        has_warned, looked_at, num_returns = False, clock.monotonic(), directory.num_returns
        while True:
            await clock.sleep(LOOK_SECONDS)
            before, looked_at = looked_at, clock.monotonic()
            records = self._announced_by_others(self._identity.peer_id, own.nonce)
            was_away = looked_at - before > 3 * LOOK_SECONDS or directory.num_returns != num_returns
            num_returns = directory.num_returns
            if was_away or not (records or self._is_announced):
                # Another process may have come meanwhile, and did not see this one.
                own.alone_since = math.inf
            elif not records:
                own.alone_since = min(own.alone_since, looked_at)
            if not all(own.stays(record.nonce, looked_at) for record in records):
                await self.require_alone(begins=False)
            elif records and not has_warned:
                logger.warning(
                    "another process has started under this identity, %s: it is to leave", where(records[0].endpoint)
                )
                has_warned = True

    async def of(self, caller: pb.Incarnation) -> pb.Incarnation | None:
        """The process that serves under the asking peer's identity and stays beside it, perhaps this one; None if there
        is none. Others are asked that have announced that identity."""
        if caller.peer_id == self._identity.peer_id:
            stays = caller.begins or self._own.stays(caller.nonce, self._membership.clock.monotonic())
            return self._signed(caller.nonce) if stays and caller.nonce != self._own.nonce else None
        if not (records := self._announced_by_others(caller.peer_id, caller.nonce)):
            return None
        now = self._membership.clock.monotonic()
        self._asked = {peer: asked for peer, asked in self._asked.items() if now - asked[0] < REMEMBERED_SECONDS}
        if caller.peer_id not in self._asked:
            # An entry is made before the rival is asked, so that one caller cannot cause many questions at the same
            # time.
            self._asked[caller.peer_id] = (now, caller.nonce, None)
            self._asked[caller.peer_id] = (now, caller.nonce, await self._ask(records, caller))
        _, nonce, rival = self._asked[caller.peer_id]
        return rival if nonce == caller.nonce else None

    @property
    def _is_announced(self) -> bool:
        own = (self._identity.peer_id, self._own.nonce)
        return any((record.peer_id, record.nonce) == own for record in self._announced)

    def _announced_by_others(self, peer_id: str, nonce: str) -> list[PeerRecord]:
        """The records under an id that were announced by processes with another nonce than this one."""
        return [one for one in self._announced if one.peer_id == peer_id and one.nonce not in ("", nonce)]

    @property
    def _announced(self) -> list[PeerRecord]:
        return [record for row in self._known.records.values() for record in row]

    async def _ask(self, records: Sequence[PeerRecord], caller: pb.Incarnation) -> pb.Incarnation | None:
        """The caller's rival, as one of these peers names it. The signature is checked only if this peer is the caller,
        because checking needs the caller's key."""
        with suppress(PeerUnavailable):
            for reply in await self._poll.replies(records, caller=caller):
                is_own = caller.peer_id == self._identity.peer_id
                if reply.HasField("rival") and (not is_own or self._is_signed(reply.rival)):
                    rival: pb.Incarnation = reply.rival
                    return rival
        return None

    def _signed(self, nonce: str) -> pb.Incarnation:
        said = pb.Incarnation(
            peer_id=self._identity.peer_id, nonce=self._own.nonce, started_at=self._own.started_at,
            endpoint=self._endpoint(),
        )  # fmt: skip
        said.signature = self._identity.sign(_signed_bytes(said, nonce))
        return said

    def _is_signed(self, rival: pb.Incarnation) -> bool:
        """Whether a process with this peer's key has signed this answer just now. Without the signature, another peer
        could have made the answer up."""
        if (rival.peer_id, rival.nonce) == (self._identity.peer_id, self._own.nonce):
            return False
        try:
            verify(self._identity.certificate_pem, _signed_bytes(rival, self._own.nonce), rival.signature)
        except IntegrityError as error:
            logger.debug("a rival that was made up: %s", error)
            return False
        return True


def _signed_bytes(said: pb.Incarnation, nonce: str) -> bytes:
    return json.dumps(["swarm incarnation", said.peer_id, said.nonce, said.started_at, said.endpoint, nonce]).encode()
