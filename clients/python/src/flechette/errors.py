"""What calls raise. Every exception is a `FlechetteError`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flechette.v1.ctr_pb2 import PredictError


class FlechetteError(Exception):
    """Base of all exceptions of this package."""

    learned: int | None = None
    """Of `learn`: how many samples are durable."""


class InputError(FlechetteError, ValueError):
    """The samples do not fit the model, or an argument is wrong. The message names the column or argument."""


class ServerError(FlechetteError):
    """The server refused or failed a request, or cannot be reached."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after = retry_after
        """If the server refused the request because of overload: seconds until it may be sent again."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions of worker processes are pickled. By default, they are made again from their text alone.
        return type(self), (self.code, self.message, self.retry_after), self.__dict__


class InvalidRequestError(ServerError, InputError):
    """The server found that the samples do not fit the model."""


class NotFoundError(ServerError):
    """The model is not served, the version is not loaded, or the model has no such label."""


class LimitError(ServerError):
    """The request is beyond a limit of the server. It is not sent again as it is."""


class OverloadedError(ServerError):
    """The server has too much work, and says when the request may be sent again."""


class UnavailableError(ServerError):
    """The server cannot be reached, shuts down, or does not serve the model yet."""


class DeadlineError(ServerError, TimeoutError):
    """The time of the call is over."""


class AccessError(ServerError):
    """The token is missing or not accepted."""


_CLASSES: dict[grpc.StatusCode, type[ServerError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS = "grpc-status-details-bin"


def server_error(code: grpc.StatusCode, message: str, retry_after: float | None = None) -> ServerError:
    """Make the exception of a status code."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after is None:
        return LimitError(code, message)
    return _CLASSES.get(code, ServerError)(code, message, retry_after)


@contextmanager
def in_request_at(begin: int) -> Iterator[None]:
    """Say at which sample of a call a request begins, because the server counts its samples from 0."""
    try:
        yield
    except InvalidRequestError as error:
        if begin == 0:
            raise
        message = f"{error.message} (in the request that begins at sample {begin})"
        raise InvalidRequestError(error.code, message, error.retry_after) from None


def of_stream(error: PredictError) -> ServerError:
    """Make the exception of an error in a stream."""
    code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
    return server_error(code, error.message, error.retry_ms / 1000 if error.retry_ms else None)


def of_call(error: grpc.RpcError) -> ServerError:
    """Make the exception of a failed call."""
    # The errors that calls raise are calls too, which the types do not say.
    code, message, trailers = error.code(), error.details(), error.trailing_metadata()
    return server_error(code, message or "no message", _retry_after(trailers or ()))


def _retry_after(trailers: Iterable[Any]) -> float | None:
    """Read the RetryInfo in the details of a status."""
    for key, value in trailers:
        if key == _DETAILS and isinstance(value, bytes):
            info = error_details_pb2.RetryInfo()
            try:
                if any(detail.Unpack(info) for detail in status_pb2.Status.FromString(value).details):
                    return float(info.retry_delay.ToNanoseconds()) / 1e9
            except DecodeError:
                return None
    return None
