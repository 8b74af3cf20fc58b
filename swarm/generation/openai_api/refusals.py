"""Errors that clients get instead of answers, in OpenAI's form."""

from typing import Any

from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request is refused. The message is for the client."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_seconds: int = 0
    ) -> None:
        """
        Args:
            code: OpenAI's name for the fault, if there is one.
            param: the field of the request that is at fault.
            retry_seconds: after how long the client may try again; 0 if that does not help.
        """
        super().__init__(message)
        self.status = status
        self._code = code
        self._param = param
        self._retry_seconds = retry_seconds

    @property
    def body(self) -> dict[str, Any]:
        """The error, as the body of an answer or as an event of a stream."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self._param, "code": self._code}}

    def response(self) -> JSONResponse:
        """The error as an answer."""
        headers = {"Retry-After": str(self._retry_seconds)} if self._retry_seconds else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)
