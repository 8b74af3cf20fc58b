"""Every exception that the library raises on purpose, grouped by what the caller does about it.

One peer that calls a request malformed may itself be at fault: the hop asks a second one before it gives up. For a
user's mistakes in options or configuration, ValueError or a SwarmError is raised. The programs print either as one
line. Internal invariants are asserts.
"""


class SwarmError(Exception):
    """Root of the tree. The message is one line that says what is wrong and, where known, what to do."""


class TryAnotherPeer(SwarmError):
    """This peer does not serve the request. Another peer of its stage may do so, or this one much later."""


class PeerUnavailable(TryAnotherPeer):
    """The peer is unreachable, frozen, or ended the call before its answer was complete.

    Attributes:
        is_gone: whether no process listens at the peer's address. Then the peer has died, and its state is lost.
        is_unreachable: whether no answer came, for any reason. The peer itself may have done nothing wrong.
    """

    def __init__(self, message: str, *, is_gone: bool = False, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.is_gone = is_gone
        self.is_unreachable = is_unreachable or is_gone


class DeadlineExceeded(TryAnotherPeer):
    """The peer took longer than its deadline, while its connection stayed alive."""


class RoundMismatch(TryAnotherPeer):
    """The peer is at another round than the request."""


class NotReady(TryAnotherPeer):
    """The peer is joining, leaving or behind, or lacks the weights that are asked for."""


class NotServed(TryAnotherPeer):
    """The peer does not serve this caller, or does not have the wanted stage or run. It may have moved since its
    announcement."""


class WrongStage(NotServed):
    """The peer serves another stage."""


class WrongRun(NotServed):
    """The peer belongs to another run."""


class IncompatibleVersion(NotServed):
    """The peer speaks no protocol that this release speaks."""


class UnknownCall(NotServed):
    """The peer's release does not have the call yet. Nothing is wrong with the peer."""


class NotAllowed(NotServed):
    """The run is locked, and the caller or signer has no certificate that gives the right."""


class TryLater(SwarmError):
    """The same request may succeed in a moment. Not a failure: it is no reason for a ban."""


LONGEST_BUSY_SECONDS = 300.0
"""A peer that says that it is busy is asked again after this time, however long it claims to be."""


class Overloaded(TryLater):
    """The peer has no room now."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        # In this order of the arguments NaN becomes the longest time.
        self.retry_after_seconds = max(0.0, min(LONGEST_BUSY_SECONDS, retry_after_seconds))


class Fatal(SwarmError):
    """Repeating the request would fail in the same way."""


class MalformedMessage(Fatal):
    """A message breaks the protocol: shape, dtype, size, non-finite numbers, or impossible fields."""


class ConfigMismatch(Fatal):
    """Two configurations of one run differ."""


class CorpusMismatch(Fatal):
    """Two machines hold different text under one dataset name, or different tokenizers."""


class StaleMicrobatch(Fatal):
    """The round that the microbatch belongs to has already been committed."""


class PathStandsStill(Fatal):
    """A block on the microbatch's path has no peers. The microbatch is given back: its path may go on later."""


class RoundGone(Fatal):
    """No peer of a stage holds the weights of a round any more, though a text or an evaluation needs them."""


class IntegrityError(Fatal):
    """Bytes do not match the digest or the signature that came with them."""


class RetriesExhausted(Fatal):
    """Every allowed attempt failed."""


def in_one_line(error: BaseException) -> str:
    """The message of a library's error without line breaks; its class's name, if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
