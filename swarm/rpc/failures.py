"""Sends the exceptions of swarm.errors over gRPC, so that a caller raises the same error as the servicer."""

import re
from typing import Any, NoReturn

import grpc

from swarm import errors
from swarm.errors import SwarmError

_ERROR_KEY = "swarm-error"
_ARGUMENT_KEY = "swarm-error-argument"

_CODES: dict[type[SwarmError], grpc.StatusCode] = {
    errors.PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.WrongStage: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongRun: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IncompatibleVersion: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorpusMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RoundMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleMicrobatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PathStandsStill: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RoundGone: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IntegrityError: grpc.StatusCode.DATA_LOSS,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.RetriesExhausted: grpc.StatusCode.ABORTED,
    errors.UnknownCall: grpc.StatusCode.UNIMPLEMENTED,
}
_TIMED_OUT = re.compile("timed? ?-?out|deadline|endpoint closing|response code 504", re.IGNORECASE)
"""Matches gRPC's messages when connecting took too long. It says "endpoint closing" if a TLS handshake took too long,
and 504 is the answer of meeting/dialler if no way worked."""
_CLASSES = {error_class.__name__: error_class for error_class in _CODES}


def abort_code(error: SwarmError) -> grpc.StatusCode:
    return _CODES.get(type(error), grpc.StatusCode.UNKNOWN)


async def abort(context: Any, error: SwarmError) -> NoReturn:
    """End the call whose ServicerContext is `context`, so that the caller's `translate` gives the same error."""
    metadata = [(_ERROR_KEY, type(error).__name__)]
    if isinstance(error, errors.Overloaded):
        metadata.append((_ARGUMENT_KEY, repr(error.retry_after_seconds)))
    await context.abort(abort_code(error), str(error), tuple(metadata))
    raise AssertionError("abort does not return")


def translate(error: grpc.aio.AioRpcError) -> SwarmError:
    """The error for a failed call: the servicer's own, or one which says that the peer is out of reach or too slow."""
    metadata = {str(key): value for key, value in error.trailing_metadata() or ()}
    name, argument = metadata.get(_ERROR_KEY), metadata.get(_ARGUMENT_KEY, "0")
    details = error.details() or error.code().name
    error_class = _CLASSES.get(str(name))
    try:
        if error_class is errors.Overloaded:
            return errors.Overloaded(details, retry_after_seconds=float(argument))
    except ValueError:
        return errors.PeerUnavailable(f"a malformed error: {details}")
    if error_class is not None:
        return error_class(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(details)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.UnknownCall("the peer's release of swarm does not have this call")
    # If connecting fails at once, the peer's process is gone. A timeout does not show that, because the network may be
    # split.
    is_gone = "failed to connect" in details and not _TIMED_OUT.search(details)
    is_unreachable = error.code() is grpc.StatusCode.UNAVAILABLE
    return errors.PeerUnavailable(f"{error.code().name}: {details}", is_gone=is_gone, is_unreachable=is_unreachable)
