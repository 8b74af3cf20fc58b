"""Every exception the library raises on purpose.

    SwarmError
    |-- Retryable                    the same request may succeed elsewhere, or later
    |   |-- PeerUnavailable          unreachable, died, frozen, or hung up in mid-call
    |   |-- Overloaded               answered Busy; `retry_after_seconds` says when to ask again
    |   |-- DeadlineExceeded         slow, not dead: never a reason for a ban
    |   |-- RoundMismatch            the peer is at another round; `peer_round` says which
    |   `-- NotReady                 the peer is joining, leaving or behind
    `-- Fatal                        repeating the request changes nothing
        |-- MalformedMessage         wrong shape, dtype, size, NaN, or a field that makes no sense
        |-- WrongStage               the peer serves another stage
        |-- WrongRun                 the peer belongs to another run
        |-- IncompatibleVersion      the peer speaks another protocol version
        |-- ConfigMismatch           two configurations of one run differ; the message names the field
        |-- CorpusMismatch           two machines hold different text under one dataset name
        |-- StaleMicrobatch          its round has committed: the microbatch is not wanted any more
        |-- IntegrityError           bytes do not match their digest or their signature
        |-- NotAllowed               a locked run, and no token, or one that does not give the right
        `-- RetriesExhausted         every allowed attempt failed; the message names the last cause

Faults in what a user typed are ValueErrors raised by the config dataclasses, or Fatal errors; the programs
print either as one line. Internal invariants are asserts.
"""


class SwarmError(Exception):
    """Root of the tree. The message is one line that says what is wrong and, where known, what to do."""


class Retryable(SwarmError):
    """The same request may succeed at another peer, or at this one later."""


class PeerUnavailable(Retryable):
    """The peer is unreachable, frozen, or ended the call before its answer was complete.

    Attributes:
        is_gone: nobody listens at its address: it has died, and does not come back with what it had.
        is_unreachable: no answer came, whatever the reason: the peer itself has not said or done anything wrong.
    """

    def __init__(self, message: str, *, is_gone: bool = False, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone
        self.is_unreachable = is_unreachable or is_gone


class Overloaded(Retryable):
    """The peer has no room now. Not a failure: it bans nobody."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(Retryable):
    """The peer took longer than its deadline, while its connection stayed alive."""


class RoundMismatch(Retryable):
    """The peer is at another round than the request."""

    def __init__(self, message: str, *, peer_round: int) -> None:
        super().__init__(message)
        self.peer_round = peer_round


class NotReady(Retryable):
    """The peer is joining, leaving or behind, or has not the weights that are asked for."""


class Fatal(SwarmError):
    """Repeating the request would fail in the same way."""


class MalformedMessage(Fatal):
    """A message breaks the protocol: shape, dtype, size, non-finite numbers, or impossible fields."""


class WrongStage(Fatal):
    """The peer serves another stage."""


class WrongRun(Fatal):
    """The peer belongs to another run."""


class IncompatibleVersion(Fatal):
    """The peer speaks another version of the protocol."""


class ConfigMismatch(Fatal):
    """Two configurations of one run differ."""


class CorpusMismatch(Fatal):
    """Two machines hold different text under one dataset name, or different tokenizers."""


class StaleMicrobatch(Fatal):
    """The round the microbatch belongs to has already committed."""


class IntegrityError(Fatal):
    """Bytes do not match the digest or the signature that came with them."""


class NotAllowed(Fatal):
    """The run is locked, and the caller or signer has no certificate that gives it the right."""


class RetriesExhausted(Fatal):
    """Every allowed attempt failed."""
