"""Sends the exceptions of swarm.errors over gRPC, so that a caller raises the same error as the servicer."""

import functools
import inspect
import logging
import re
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import grpc

from swarm import errors
from swarm.errors import SwarmError
from swarm.machine.out_of_memory import is_out_of_memory, what_was_asked

logger = logging.getLogger(__name__)

_Servicer = TypeVar("_Servicer", bound=type)
Behaviour = Callable[..., Any]
"""Answers a call: a coroutine or an asynchronous generator, whose last argument is the call's ServicerContext."""

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
LONGEST_DETAILS = 1000
"""Of what another peer says of its error. A peer that passes it on puts more in front, and gRPC takes some KiB."""
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


def refusing(behaviour: Behaviour) -> Behaviour:
    """Let a behaviour's call end with the error that it raises. Any error but a SwarmError or lack of memory is a bug
    of this peer."""

    @functools.wraps(behaviour)
    async def coroutine(*arguments: Any) -> Any:
        try:
            return await behaviour(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this call and nothing else
            await _refuse(arguments[-1], error)

    @functools.wraps(behaviour)
    async def generator(*arguments: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(*arguments)) as replies:
                async for reply in replies:
                    yield reply
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this call and nothing else
            await _refuse(arguments[-1], error)

    return generator if inspect.isasyncgenfunction(behaviour) else coroutine


def answers_errors(servicer: _Servicer) -> _Servicer:
    """Let all calls of a servicer's class end as `refusing` says; gRPC's names of calls begin with a capital letter."""
    for name, behaviour in list(vars(servicer).items()):
        if name[0].isupper():
            setattr(servicer, name, refusing(behaviour))
    return servicer


async def _refuse(context: Any, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.BaseError):
        _forget_frames(error)
        raise error  # The call has ended already.
    if is_out_of_memory(error):
        logger.warning("a call failed for want of memory: no room for %s", what_was_asked(error))
        error = errors.PeerUnavailable("this peer is out of memory")
    if not isinstance(error, SwarmError):
        logger.exception("a call failed", exc_info=error)
        error = errors.PeerUnavailable(f"internal error: {type(error).__name__}")
    _forget_frames(error)
    await abort(context, error)


def _forget_frames(error: Exception) -> None:
    """gRPC keeps what a call has raised after its end. The memory of a block that is given up is to be free, so the
    error must not lead to what the servicer had at hand."""
    traceback.clear_frames(error.__traceback__)
    error.__cause__ = error.__context__ = None


def translate(error: grpc.aio.AioRpcError) -> SwarmError:
    """The error for a failed call: the servicer's own, or one which says that the peer is out of reach or too slow."""
    metadata = {str(key): value for key, value in error.trailing_metadata() or ()}
    name, argument = metadata.get(_ERROR_KEY), metadata.get(_ARGUMENT_KEY, "0")
    details = (error.details() or error.code().name)[:LONGEST_DETAILS]
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
