"""The values that cross package borders: peers' announcements and the names of microbatches and rounds.

Frozen records without behaviour. Announcements are pydantic models because they come from strangers:
unknown fields are ignored (forward compatibility), wrong ones refused.
"""

from enum import StrEnum
from typing import Annotated, NewType

from pydantic import BaseModel, ConfigDict, Field

PeerId = NewType("PeerId", str)
"""40 hexadecimal digits: the digest of a peer's public key (see swarm.credentials.identity)."""

PROTOCOL_VERSION = 8
"""Peers of different protocol versions refuse each other."""

LARGEST_COUNT = 1 << 48
"""The largest round, number of samples, microbatch, attempt or size in a message. No run gets so far."""

TRAINER_STAGE = -1
"""A trainer is "stage -1": it hands microbatches to stage 0 with the code every stage uses."""


class PeerState(StrEnum):
    """What a stage peer announces about itself."""

    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"


LONGEST_NAME = 64
"""Characters in the name that people give a peer."""
NAME_PATTERN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""What is shown to people has no control characters, which a terminal takes for commands."""


ENDPOINT_PATTERN = r"^[A-Za-z0-9._:\[\]@-]*$"
TUNNEL = "tunnel:"
"""What an endpoint begins with that leads through a meeting point."""
DHT_ADDRESS_PATTERN = r"^[A-Za-z0-9._:/-]*$"
MOST_DHT_ADDRESSES = 4
"""How many addresses of one node of the DHT others are told."""


class _Announcement(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    peer_id: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    name: Annotated[str, Field(max_length=LONGEST_NAME, pattern=NAME_PATTERN)] = ""
    """What people call the peer: host name and process id unless the user chose one."""
    protocol_version: int = PROTOCOL_VERSION
    software_version: Annotated[str, Field(max_length=32, pattern=NAME_PATTERN)] = ""
    announced_at: float
    """The announcing machine's wall clock, seconds since the epoch."""


MOST_BANS = 4
"""How many of one sender's bans others are told."""
LONGEST_REASON = 100
LONGEST_WAIT = 200
"""Characters of what a peer waits for."""


class Ban(BaseModel):
    """A peer of the next stage that a sender leaves alone, as it says itself."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer_id: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    reason: Annotated[str, Field(max_length=LONGEST_REASON, pattern=NAME_PATTERN)] = ""
    until: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """The end of the ban, by the sender's wall clock, in seconds since the epoch."""


class _Sender(_Announcement):
    bans: Annotated[tuple[Ban, ...], Field(max_length=MOST_BANS)] = ()
    """The bans that last longest."""


class PeerRecord(_Sender):
    """A stage peer's announcement: key `RUN.stage.N`, one subkey a peer."""

    stage: Annotated[int, Field(ge=0, le=4095)]
    endpoint: Annotated[str, Field(max_length=320, pattern=ENDPOINT_PATTERN)]
    """How its gRPC server is reached, the best way: host:port, or tunnel:PEER_ID@HOST:PORT, through that meeting
    point."""
    other_endpoints: Annotated[
        tuple[Annotated[str, Field(max_length=320, pattern=ENDPOINT_PATTERN)], ...], Field(max_length=7)
    ] = ()
    """Further ways, in the order in which they are to be tried."""
    certificate_pem: Annotated[str, Field(max_length=4096)] = ""
    """The TLS certificate its server shows; empty when the run is --insecure."""
    state: PeerState
    samples_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How fast it computes a forward and a backward, its own work alone; 0 while it has not been measured."""
    queue_length: Annotated[int, Field(ge=0)] = 0
    round: Annotated[int, Field(ge=0)] = 0
    samples: Annotated[int, Field(ge=0)] = 0
    """Samples the run had committed when this peer's round began."""
    lineage: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    """Hash chain over the committed rounds of its blocks."""
    dht_address: Annotated[str, Field(max_length=255, pattern=DHT_ADDRESS_PATTERN)] = ""
    """A multiaddress at which newcomers can enter the DHT, the best one; empty if not at this peer."""
    other_dht_addresses: Annotated[
        tuple[Annotated[str, Field(max_length=255, pattern=DHT_ADDRESS_PATTERN)], ...],
        Field(max_length=MOST_DHT_ADDRESSES - 1),
    ] = ()
    """Further ones of the same node: of another version of IP, say."""
    device: Annotated[str, Field(max_length=32, pattern=NAME_PATTERN)] = ""
    """What it computes on, as PyTorch names it; earlier releases do not say, and leave it empty."""
    movable: bool = False
    """Whether it goes to another stage by itself when that one needs it more."""
    moves: Annotated[int, Field(ge=0)] = 0
    """How often it has gone to another stage since it started."""
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")] = ""
    """Drawn anew at each start of the peer's process."""
    started_at: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """When the process started, by the announcing machine's wall clock, in seconds since the epoch."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All ways to its server, the best first."""
        return self.endpoint, *self.other_endpoints

    @property
    def dht_addresses(self) -> tuple[str, ...]:
        """All addresses of its node of the DHT, the best first; none if newcomers cannot enter it at this peer."""
        return tuple(address for address in (self.dht_address, *self.other_dht_addresses) if address)

    @property
    def place(self) -> str:
        """What stays the same as long as the peer is there: its address, or its id where meeting points may change."""
        return self.peer_id if self.endpoint.startswith(TUNNEL) else self.endpoint


class ClaimState(StrEnum):
    """How far a peer is on its way to a stage."""

    PENDING = "pending"
    """The peer waits to see whether another one wants the same."""
    CONFIRMED = "confirmed"
    """The peer is under way."""
    WITHDRAWN = "withdrawn"
    """The peer has arrived, or will not come."""


class ClaimRecord(_Announcement):
    """A peer's word that it is about to serve a stage: key `RUN.claims`, one subkey a peer."""

    stage: Annotated[int, Field(ge=0, le=4095)]
    from_stage: Annotated[int, Field(ge=0, le=4095)] | None = None
    """The stage that it serves until then; None for a peer that joins the run."""
    state: ClaimState
    waiting_for: Annotated[str, Field(max_length=LONGEST_WAIT, pattern=NAME_PATTERN)] = ""
    """What it waits for on its way, in words."""
    claimed_at: Annotated[float, Field(allow_inf_nan=False)]
    """When it first claimed, by its own wall clock, seconds since the epoch: of two claims the earlier counts."""


class TrainerRecord(_Sender):
    """A trainer's announcement: key `RUN.trainers`."""

    step: Annotated[int, Field(ge=0)] = 0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    tokens: Annotated[int, Field(ge=0)] = 0
    tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    in_flight: Annotated[int, Field(ge=0)] = 0


class RunRecord(BaseModel):
    """A peer's statement of what its run is: key `swarm.runs`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer_id: str
    protocol_version: int = PROTOCOL_VERSION
    config_json: Annotated[str, Field(max_length=12_000)]
