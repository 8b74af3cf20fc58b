"""The values that cross package borders: peers' announcements and the names of blocks, microbatches and rounds.

Frozen records without behaviour. Announcements are pydantic models because they come from strangers: unknown fields are
ignored (for compatibility with later releases), and wrong ones are refused.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, NewType, Self

from pydantic import BaseModel, ConfigDict, Field

PeerId = NewType("PeerId", str)
"""40 hexadecimal digits: the digest of a peer's public key (see swarm.credentials.identity)."""


class Protocols(NamedTuple):
    """The protocols that a release speaks, by number: these two and all between them."""

    oldest: int
    newest: int

    @classmethod
    def of(cls, stated: Any) -> Self:
        """What the sender of an announcement, or of a request with this address, speaks."""
        newest: int = stated.protocol_version
        # Releases that spoke one protocol alone state no oldest one.
        return cls(min(stated.oldest_protocol or newest, newest), newest)

    def meets(self, other: "Protocols") -> bool:
        """Whether the two have a protocol in common. Then their peers train together."""
        return self.oldest <= other.newest and other.oldest <= self.newest

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


PROTOCOLS = Protocols(oldest=12, newest=13)
"""What this release speaks: its own protocol, and that of the release before. docs/protocol.md says what a new one may
change."""


def common_protocol(spoken: Iterable[Protocols]) -> int:
    """The newest protocol that this release and all of these, which meet it, speak. What all of them have to do alike
    depends on it, and not on PROTOCOLS."""
    return min([PROTOCOLS.newest, *(each.newest for each in spoken)])


LARGEST_COUNT = 1 << 48
"""The largest round, number of samples, microbatch, attempt or size in a message. No run gets this far."""

LARGEST_NUMBER = 1e300
"""The largest of all other numbers in a message or a record. Many of them can be added up without overflow."""

LATEST_TIME = 4e9
"""The latest time that a record may name, in seconds since the epoch; it is in the year 2096. Later ones make functions
of the calendar fail."""

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Rate = Annotated[float, Field(ge=0, le=LARGEST_NUMBER)]
Time = Annotated[float, Field(ge=0, le=LATEST_TIME)]
"""Seconds since the epoch, by the announcing machine's wall clock."""

LEASE_SECONDS = 8.0
"""Lifetime of a trainer's lease that is not renewed. An ack of its trainer may arrive even later. Synchronous: if
another trainer has run the microbatch by then, one of the two copies is taken out before the average. DiLoCo: no other
trainer ever runs it."""

TRAINER_ACK_SECONDS = LEASE_SECONDS - 1.0
"""After this long without a renewal a trainer acknowledges nothing, because another one may soon run the microbatch,
and stage 0 accepts no acknowledgement later than this after its answer. A trainer acknowledges an answer as soon as it
has it, but the network may delay the acknowledgement until another trainer has the microbatch."""

LARGEST_STAGE, LARGEST_VARIANT = 4095, 4095


class Block(NamedTuple):
    """What a peer serves, announces, averages and writes checkpoints of: one variant of one stage of the pipeline. A
    stage that has no variants is the block of its variant 0."""

    stage: int
    variant: int = 0

    def __str__(self) -> str:
        """The block's name: 2 for variant 0 of stage 2, and 2.1 for its variant 1."""
        return f"{self.stage}.{self.variant}" if self.variant else str(self.stage)

    @property
    def label(self) -> int | str:
        return str(self) if self.variant else self.stage

    @classmethod
    def parse(cls, name: str) -> Self:
        """The block with a name. Raises ValueError."""
        stage, point, variant = name.partition(".")
        if not all(part.isascii() and part.isdecimal() for part in (stage, variant if point else "0")):
            raise ValueError(f"{name!r} names no block: give a stage, such as 2, or a stage and a variant, such as 2.1")
        block = cls(int(stage), int(variant or 0))
        if block.stage > LARGEST_STAGE or block.variant > LARGEST_VARIANT:
            raise ValueError(f"{name!r} names no block: the largest is {LARGEST_STAGE}.{LARGEST_VARIANT}")
        return block


_Stage = Annotated[int, Field(ge=0, le=LARGEST_STAGE)]
_Variant = Annotated[int, Field(ge=0, le=LARGEST_VARIANT)]
_NumStages = Annotated[int, Field(ge=1, le=LARGEST_STAGE + 1)]

TRAINER_STAGE = -1
"""A trainer is "stage -1": it hands microbatches to stage 0 with the code that every stage uses."""


class PeerState(StrEnum):
    """What a stage peer announces about itself."""

    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"


LONGEST_NAME = 64
"""The most characters in the name that people give a peer."""
NAME_PATTERN = r"^[^\x00-\x1f\x7f-\x9f]*$"
"""Texts that are shown to people must have no control characters, because a terminal takes these for commands."""


HOST_PATTERN = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?)"
"""A host's name or IP address, of which an IPv6 address stands in brackets."""
TUNNEL = "tunnel:"
"""The beginning of an endpoint that leads through a meeting point."""
ENDPOINT_PATTERN = rf"^(?:(?:{TUNNEL}[0-9a-f]{{40}}@)?{HOST_PATTERN}:[0-9]{{1,5}})?$"
DHT_ADDRESS_PATTERN = r"^[A-Za-z0-9._:/-]*$"
MOST_DHT_ADDRESSES = 4
"""The most addresses of its DHT node that a peer announces."""


class _Statement(BaseModel):
    """What every record says: which protocols its sender speaks."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    protocol_version: Count = PROTOCOLS.newest
    """The newest protocol that the sender speaks."""
    oldest_protocol: Count = PROTOCOLS.oldest


class _Announcement(_Statement):
    peer_id: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    name: Annotated[str, Field(max_length=LONGEST_NAME, pattern=NAME_PATTERN)] = ""
    """The peer's name for people: host name and process id, unless the user chose another."""
    software_version: Annotated[str, Field(max_length=32, pattern=NAME_PATTERN)] = ""
    announced_at: Time

    @property
    def display_name(self) -> str:
        """The peer's name, or the beginning of its id if it has none."""
        return self.name or self.peer_id[:8]


MOST_BANS = 4
"""The most bans that a sender announces."""
LONGEST_REASON = 100
LONGEST_WAIT = 200
"""The most characters of the text that says what a peer waits for."""


class Ban(BaseModel):
    """A sender's announcement that it leaves a peer of the next stage alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer_id: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    reason: Annotated[str, Field(max_length=LONGEST_REASON, pattern=NAME_PATTERN)] = ""
    until: Time
    """The end of the ban, by the sender's wall clock, in seconds since the epoch."""


class _Sender(_Announcement):
    bans: Annotated[tuple[Ban, ...], Field(max_length=MOST_BANS)] = ()
    """The sender's bans that last longest."""


class PeerRecord(_Sender):
    """A stage peer's announcement of one block that it serves: key `RUN.stage.N`, or `RUN.stage.N.V` for a variant V
    other than 0, one subkey a peer.

    To add another field, give it a default, because the last release does not send it, and a limit: a whole record must
    fit into MAX_RECORD_BYTES (dht/records.py). peers/stage_peer/presence.py fills it, from PeerOptions if the user says
    it, and peers/status/peer_row.py shows it."""

    stage: _Stage
    variant: _Variant = 0
    endpoint: Annotated[str, Field(max_length=320, pattern=ENDPOINT_PATTERN)]
    """The best way to the peer's gRPC server: host:port, or tunnel:PEER_ID@HOST:PORT through that meeting point."""
    other_endpoints: Annotated[
        tuple[Annotated[str, Field(max_length=320, pattern=ENDPOINT_PATTERN)], ...], Field(max_length=7)
    ] = ()
    """Further ways, in the order in which they are to be tried."""
    certificate_pem: Annotated[str, Field(max_length=4096)] = ""
    """The TLS certificate that the peer's server shows; empty if the run is --insecure."""
    state: PeerState
    samples_per_second: Rate = 0.0
    """How fast the peer itself computes forward and backward, without other stages; 0 while that is not measured."""
    queue_length: Count = 0
    round: Count = 0
    samples: Count = 0
    """How many samples the run had committed when this peer's round began."""
    lineage: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    """The hash chain over the committed rounds of the peer's state."""
    dht_address: Annotated[str, Field(max_length=255, pattern=DHT_ADDRESS_PATTERN)] = ""
    """The best multiaddress at which newcomers can enter the DHT; empty if they cannot at this peer."""
    other_dht_addresses: Annotated[
        tuple[Annotated[str, Field(max_length=255, pattern=DHT_ADDRESS_PATTERN)], ...],
        Field(max_length=MOST_DHT_ADDRESSES - 1),
    ] = ()
    """Further multiaddresses of the same node, for example of another version of IP."""
    device: Annotated[str, Field(max_length=32, pattern=NAME_PATTERN)] = ""
    """The device on which the peer computes, as PyTorch names it. Earlier releases leave it empty."""
    movable: bool = False
    """Whether the peer moves to another stage by itself when that stage needs it more."""
    moves: Count = 0
    """How often the peer has moved to another stage since it started."""
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{0,32}$")] = ""
    """A random string, drawn anew at each start of the peer's process."""
    started_at: Time = 0.0
    """When the process started."""

    @property
    def block(self) -> Block:
        return Block(self.stage, self.variant)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self.endpoint, *self.other_endpoints

    @property
    def dht_addresses(self) -> tuple[str, ...]:
        """All addresses of the peer's DHT node, the best first; none if newcomers cannot enter the DHT there."""
        return tuple(address for address in (self.dht_address, *self.other_dht_addresses) if address)

    @property
    def place(self) -> str:
        """A name for the peer that does not change while it runs, and that no other peer's record can have: its id,
        with its endpoint unless it is reached through meeting points."""
        return self.peer_id if self.endpoint.startswith(TUNNEL) else f"{self.peer_id}@{self.endpoint}"


class ClaimState(StrEnum):
    """How far a peer is on its way to a stage."""

    PENDING = "pending"
    """The peer waits, in case another peer claims the same place."""
    CONFIRMED = "confirmed"
    """The peer is on its way."""
    WITHDRAWN = "withdrawn"
    """The peer has arrived, or will not come."""


MOST_CLAIMED = 512
"""The most blocks that a claim lists."""
_Blocks = Annotated[tuple[tuple[_Stage, _Variant], ...], Field(max_length=MOST_CLAIMED)]


class ClaimRecord(_Announcement):
    """A peer's announcement that it is about to serve a block, or several of adjacent stages: key `RUN.claims`, one
    subkey a peer."""

    stage: _Stage
    variant: _Variant = 0
    num_stages: _NumStages = 1
    """How many adjacent stages the peer will serve, of which `stage` is the first."""
    blocks: _Blocks = ()
    """All blocks that the peer will serve, where they are not `num_stages` ones of one variant. Peers of earlier
    releases see only the first one."""
    from_stage: _Stage | None = None
    from_variant: _Variant = 0
    from_num_stages: _NumStages = 1
    from_blocks: _Blocks = ()
    """With `from_stage` and the like, what the peer serves until then; None for a peer that joins the run."""
    state: ClaimState
    waiting_for: Annotated[str, Field(max_length=LONGEST_WAIT, pattern=NAME_PATTERN)] = ""
    """What the peer waits for on its way, in words."""
    claimed_at: Time
    """When the peer first claimed. Of two claims the earlier counts."""

    @property
    def span(self) -> tuple[Block, ...]:
        return _listed(self.blocks) or _span(self.stage, self.num_stages, self.variant)

    @property
    def from_span(self) -> tuple[Block, ...]:
        """What the peer serves until then; nothing for a peer that joins the run."""
        if self.from_stage is None:
            return ()
        return _listed(self.from_blocks) or _span(self.from_stage, self.from_num_stages, self.from_variant)

    @classmethod
    def fields_of(cls, span: Sequence[Block], *, before: bool = False) -> dict[str, Any]:
        """The fields that say that a peer will serve these blocks, or has served them `before`. Of more than a claim
        lists it names the first ones."""
        first, listed = span[0], tuple(span[:MOST_CLAIMED])
        is_even = tuple(span) == _span(first.stage, len(span), first.variant)
        fields = {
            "stage": first.stage, "variant": first.variant, "num_stages": len(span) if is_even else 1,
            "blocks": () if is_even else listed,
        }  # fmt: skip
        return {f"from_{name}": value for name, value in fields.items()} if before else fields


def _span(stage: int, num_stages: int, variant: int) -> tuple[Block, ...]:
    return tuple(Block(each, variant) for each in range(stage, stage + num_stages))


def _listed(blocks: Sequence[tuple[int, int]]) -> tuple[Block, ...]:
    return tuple(dict.fromkeys(Block(*block) for block in blocks))


MOST_NAMED_PATHS = 64
"""The most paths that a trainer announces."""


class TrainerRecord(_Sender):
    """A trainer's announcement: key `RUN.trainers`."""

    paths: Annotated[tuple[Count, ...], Field(max_length=MOST_NAMED_PATHS)] = ()
    """The first paths that the trainer feeds; empty if it feeds all."""
    step: Count = 0
    loss: Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)] | None = None
    tokens: Count = 0
    tokens_per_second: Rate = 0.0
    in_flight: Count = 0


class AmendmentsRecord(_Announcement):
    """The amendments of a locked run (config/amendments), as a peer knows them: key `RUN.amendments`, one subkey a
    peer."""

    amendments: Annotated[tuple[Annotated[str, Field(max_length=10_000)], ...], Field(max_length=64)]


class RunRecord(_Statement):
    """A peer's statement of what its run is: key `swarm.runs`."""

    peer_id: str
    config_json: Annotated[str, Field(max_length=12_000)]
