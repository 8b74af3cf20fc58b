"""This peer's claim in the DHT: it says which stage the peer is about to serve, until the peer arrives or gives up.

Used by rebalancer.py. A peer goes on even if its claim cannot be stored: others then learn of it when it serves.
"""

import logging

from peers.shared.network import Membership
from swarm.errors import PeerUnavailable
from swarm.types import LONGEST_WAIT, ClaimRecord, ClaimState

logger = logging.getLogger(__name__)

CLAIM_SECONDS = 20.0
"""Lifetime of a claim. A peer that dies before it arrives is counted for at most this long."""
RENEW_SECONDS = 5.0
WITHDRAWN_SECONDS = 5.0
"""Lifetime of a withdrawn claim's record."""


class Claim:
    """The claim of one peer."""

    def __init__(self, membership: Membership, name: str) -> None:
        self._membership = membership
        self._clock = membership.clock
        self._name = name
        self._record: ClaimRecord | None = None

    @property
    def stage(self) -> int | None:
        """The stage that is claimed; None without a claim."""
        return None if self._record is None else self._record.stage

    async def make(self, stage: int, *, from_stage: int | None, confirmed: bool = False) -> ClaimRecord:
        """Claim a stage. Another peer's claim may still take precedence over it, unless it is confirmed at once."""
        now = self._clock.time()
        self._record = ClaimRecord(
            peer_id=self._membership.peer_id, name=self._name, announced_at=now, stage=stage, from_stage=from_stage,
            state=ClaimState.CONFIRMED if confirmed else ClaimState.PENDING, claimed_at=now,
        )  # fmt: skip
        await self._announce(self._record, CLAIM_SECONDS)
        return self._record

    async def confirm(self, stage: int) -> None:
        """Confirm the claim: the peer goes to this stage, which may be another one than it claimed at first."""
        assert self._record is not None, "what is confirmed was claimed"
        self._record = self._record.model_copy(update={"state": ClaimState.CONFIRMED, "stage": stage})
        await self._announce(self._record, CLAIM_SECONDS)

    async def withdraw(self) -> None:
        """Withdraw the claim, if there is one: the peer has arrived, or will not come."""
        if self._record is not None:
            withdrawn = self._record.model_copy(update={"state": ClaimState.WITHDRAWN})
            self._record = None
            await self._announce(withdrawn, WITHDRAWN_SECONDS)

    async def keep(self) -> None:
        """Renew the claim, if there is one, until cancelled."""
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            if self._record is not None:
                await self._announce(self._record, CLAIM_SECONDS)

    async def _announce(self, record: ClaimRecord, lifetime_seconds: float) -> None:
        waiting_for = self._membership.waits.present[:LONGEST_WAIT]
        record = record.model_copy(update={"announced_at": self._clock.time(), "waiting_for": waiting_for})
        try:
            await self._membership.directory.announce_claim(record, lifetime_seconds)
        except PeerUnavailable as error:
            logger.debug("the claim of stage %d was not announced: %s", record.stage, error)
