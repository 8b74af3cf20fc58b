"""Amendments: changes of a locked run's configuration that its owner signs, and so the configuration of each round.

An amendment is a text of a few lines. It travels in the DHT, with a leader's Begin, with states and with checkpoints,
and counts for its signature alone, whoever passes it on. Each names the one before it, so they are one chain.
"""

import base64
import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

from swarm.config.checks import is_sha256
from swarm.config.reading import differences, with_settings
from swarm.config.run import RunConfig
from swarm.config.stages import WireDtype
from swarm.credentials import certificates
from swarm.credentials.token import OwnerKey
from swarm.errors import IntegrityError
from swarm.types import LARGEST_COUNT

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 10_000
"""The most characters of all amendments of a run together: they have to fit into one record of the DHT."""


def _amendable(section: Any, prefix: str = "") -> Iterator[str]:
    for each in dataclasses.fields(section):
        if dataclasses.is_dataclass(each.type):
            yield from _amendable(each.type, f"{each.name}.")
        elif "is_amendable" in each.metadata:
            yield prefix + each.name


AMENDABLE = frozenset(_amendable(RunConfig))
"""The fields that can be amended: those with the mark of that name (config/checks)."""
_FORM = "swarm amendment 1"
_DIGEST_DIGITS = 32


@dataclass(frozen=True, kw_only=True)
class Amendment:
    """One change.

    Attributes:
        number: its place in the chain, from 1 on.
        round: the first round that it is in force in, at every block.
        settings: as `section.key=value`, see with_settings.
        previous: the digest of the amendment before it; empty for the first.
        text: the lines that the owner signed, and the signature.
    """

    number: int
    round: int
    settings: tuple[str, ...]
    previous: str
    text: str

    @classmethod
    def sign(cls, owner: OwnerKey, timeline: "Timeline", round_number: int, settings: Sequence[str]) -> Self:
        """Make the amendment that follows those of a timeline. Raises ValueError for settings that cannot be amended,
        or that are no configuration together with the others, and for another owner's run."""
        run = timeline.config
        if run.owner != owner.authority.fingerprint:
            theirs = f"is owned by {run.owner[:16]}" if run.owner else "is open: nobody may amend it"
            raise ValueError(f"the key is of owner {owner.authority.fingerprint[:16]}, and the run {theirs}")
        point = base64.b64encode(certificates.point_of(owner.key.public_key())).decode()
        number, previous = len(timeline.amendments) + 1, timeline.last
        signed = "\n".join([_FORM, run.run_id, str(number), str(round_number), previous, point, *settings])
        text = f"{signed}\n{base64.b64encode(owner.sign(signed.encode())).decode()}"
        amendment = cls.read(text, run)
        timeline.require_next(amendment)
        return amendment

    @classmethod
    def read(cls, text: str, run: RunConfig) -> Self:
        """Read an amendment and check its signature. Raises IntegrityError unless it is one by the run's owner."""
        signed, _, signature = text.rpartition("\n")
        try:
            form, run_id, number, round_number, previous, point, *settings = signed.split("\n")
            key, numbers = certificates.key_at(base64.b64decode(point, validate=True)), (int(number), int(round_number))
            signature_bytes = base64.b64decode(signature, validate=True)
        except ValueError:
            raise IntegrityError("what was said to be an amendment is none") from None
        if not run.owner or certificates.fingerprint_of(key) != run.owner:
            raise IntegrityError("an amendment counts only if the run's owner has signed it")
        certificates.verify(key, signed.encode(), signature_bytes)
        if form != _FORM or run_id != run.run_id or not settings or not all(0 <= n <= LARGEST_COUNT for n in numbers):
            raise IntegrityError(f"an amendment in another form, or of another run: {run_id[:80]!r}")
        return cls(number=numbers[0], round=numbers[1], settings=tuple(settings), previous=previous, text=text)

    @property
    def digest(self) -> str:
        """Names the amendment, and all those before it."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:_DIGEST_DIGITS]

    def __str__(self) -> str:
        return f"amendment {self.number}: {', '.join(self.settings)} from round {self.round} on"


class Timeline:
    """A run's amendments as one block of a peer knows them, and the configuration of each round.

    Where the configuration of a round depends on amendments, it is named by a digest: that of the newest one that is in
    force, or an empty text. A group agrees on this digest in each round. So one that some of its members hear of late
    is in force from the first round on in which all have it.

    Attributes:
        config: the configuration with which the run began.
        amendments: in their order.
    """

    def __init__(self, config: RunConfig, texts: Iterable[str] = ()) -> None:
        self.config = config
        self.amendments: tuple[Amendment, ...] = ()
        self._configs = {"": config}
        self.add(texts)

    @property
    def last(self) -> str:
        """The digest of the newest amendment; empty if there is none."""
        return self.amendments[-1].digest if self.amendments else ""

    @property
    def revoked(self) -> tuple[str, ...]:
        """The tokens that are revoked. This counts at once, and not from the amendment's round on."""
        return self.under(self.last).revoked

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(each.text for each in self.amendments)

    def digest_at(self, round_number: int) -> str:
        """The digest of the newest amendment that is in force in a round; empty if there is none."""
        return next((each.digest for each in reversed(self.amendments) if each.round <= round_number), "")

    def at(self, round_number: int) -> RunConfig:
        return self.under(self.digest_at(round_number))

    def number_of(self, digest: str) -> int:
        """The place of an amendment in the chain; 0 for an empty digest. Raises IntegrityError if it is not known."""
        self.under(digest)
        return next((each.number for each in self.amendments if each.digest == digest), 0)

    def under(self, digest: str) -> RunConfig:
        """The configuration with the amendments up to this one. Raises IntegrityError if it is not known here."""
        try:
            return self._configs[digest]
        except KeyError:
            raise IntegrityError(f"amendment {digest[:16]} is not known here") from None

    def add(self, texts: Iterable[str]) -> None:
        """Take in another peer's amendments, from the first on, as far as they are new.

        Raises:
            IntegrityError: one of them is not signed by the owner, or the owner has signed two of one number. Those
                before it are taken in.
        """
        for known, text in enumerate(texts):
            if known < len(self.amendments):
                if text != self.amendments[known].text:
                    Amendment.read(text, self.config)
                    raise IntegrityError(f"the owner has signed two amendments {known + 1}: the first to come counts")
                continue
            amendment = Amendment.read(text, self.config)
            try:
                amended = self.require_next(amendment)
            except ValueError as error:
                raise IntegrityError(f"an amendment is refused: {error}") from None
            # A reader in another thread finds a digest's configuration once it finds the amendment.
            self._configs[amendment.digest] = amended
            self.amendments = (*self.amendments, amendment)
            logger.info("the run's owner has amended it: %s", amendment)

    def hear(self, texts: Iterable[str], peer: str) -> None:
        """As `add`, but an amendment that does not count is left out, with a line in the log that names the peer."""
        try:
            self.add(texts)
        except IntegrityError as error:
            logger.warning("what %s says of amendments does not count: %s", peer, error)

    def require_next(self, amendment: Amendment) -> RunConfig:
        """The configuration with one more amendment. Raises ValueError unless it follows those that are here, and
        changes what may be changed."""
        last = self.amendments[-1].round if self.amendments else 0
        if (amendment.number, amendment.previous) != (len(self.amendments) + 1, self.last):
            raise ValueError(f"amendment {amendment.number} does not follow the {len(self.amendments)} that are known")
        if amendment.round < last:
            raise ValueError(f"an amendment of round {last} comes before it: round {amendment.round} is too early")
        if len(amendment.text) + sum(map(len, self.texts)) > MOST_CHARACTERS:
            raise ValueError("the run has too many amendments for another one: begin it anew with --resume")
        return amended(self.under(self.last), amendment.settings)


def amended(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Change settings of a running run's configuration. Raises ValueError, as with_settings does, and for settings that
    cannot be amended."""
    # What was left out is filled in first: it follows from other fields, and is not to change with them.
    filled = dataclasses.replace(config, optimizer=config.gradient_step, outer=config.outer_step)
    changed = with_settings(filled, settings)
    for name in [setting.partition("=")[0].strip() for setting in settings] + [*differences(filled, changed)]:
        if name not in AMENDABLE:
            raise ValueError(
                f"{name} cannot be amended while the run goes on: stop all peers, and start them with --resume and "
                "another configuration, if it may change at all (docs/security.md has what can be amended)"
            )
    different = differences(filled, changed)
    if any(name in different for name in ("data.dataset", "data.paths", "data.dataset_digests")) and (
        "data.digest" not in different or not is_sha256(changed.data.digest)
    ):
        raise ValueError("an amendment that names another text names its data.digest as well")
    for name in different:
        if (name == "rounds.round_samples" or name.startswith("data.")) and config.data.part_rows:
            raise ValueError(
                f"{name} cannot be amended with data.part_rows, because it says which part each round reads: stop all "
                "peers, and start them with --resume and another configuration, if it may change at all"
            )
    if lost := sorted({*config.revoked} - {*changed.revoked}):
        raise ValueError(f"a token that is revoked stays so: `revoked` has to name {', '.join(lost)} as well")
    if changed.optimizer.learning_rate <= 0.0 or changed.optimizer.schedule == "auto":
        raise ValueError("an amendment names what it sets: optimizer.learning_rate above 0, and a schedule")
    if changed.wire.dtype == "auto":
        raise ValueError(f"an amendment names what it sets: wire.dtype = {' or '.join(map(repr, get_args(WireDtype)))}")
    return changed
