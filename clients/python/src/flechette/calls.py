"""How calls are made: the connection's options, and when a failed request is sent again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc

from flechette.errors import (
    DeadlineError,
    FlechetteError,
    InputError,
    LimitError,
    NotFoundError,
    OverloadedError,
    ServerError,
    UnavailableError,
    of_call,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Answer = TypeVar("Answer")

TRANSIENT: tuple[type[ServerError], ...] = (OverloadedError, UnavailableError)
"""Errors after which a request that changes nothing may be sent again."""

REFUSED: tuple[type[ServerError], ...] = (OverloadedError,)
"""Errors after which the server has certainly not stored anything."""

OUTDATED: tuple[type[FlechetteError], ...] = (InputError, LimitError, NotFoundError)
"""Errors that a description of the model may have caused that is out of date."""


@dataclass(frozen=True)
class Retries:
    """When failed requests are sent again.

    The wait before a try is random, at most `first_wait` seconds, which doubles with each try up to
    `longest_wait`. If the server says when to come back, that time is waited besides. No try begins after
    the deadline of the call. For a stream that has had an answer only the deadline counts, except under
    overload: the server may be restarting, and load models for long.
    """

    tries: int = 10
    first_wait: float = 0.05
    longest_wait: float = 2.0

    def wait(
        self, failed: int, error: ServerError, deadline: Deadline, *, was_answered: bool = False
    ) -> float:
        """Compute the wait in seconds after so many failed tries, or raise the error after the last one."""
        longest = min(self.first_wait * 2.0 ** min(failed - 1, 60), self.longest_wait)
        wait = (error.retry_after or 0.0) + random.uniform(0.0, longest)
        counts = not (was_answered and isinstance(error, UnavailableError))
        if (counts and failed >= self.tries) or wait >= deadline.rest():
            raise error
        return wait


@dataclass(frozen=True)
class Deadline:
    """The end of a call."""

    timeout: float
    at: float

    @classmethod
    def after(cls, timeout: float) -> Deadline:
        """Begin a call."""
        if not timeout > 0:
            raise InputError(f"timeout: expected more than 0 seconds, got {timeout}")
        # Neither grpc nor the locks of all systems take every number of seconds.
        return cls(timeout, time.monotonic() + min(timeout, 1e6))

    def rest(self) -> float:
        """Compute the seconds that are left."""
        return self.at - time.monotonic()

    def milliseconds(self) -> int:
        """Compute the time that is left for a request, at least 1 ms, because 0 is no limit."""
        return max(int(self.rest() * 1000), 1)

    def left(self) -> float:
        """Compute the seconds that are left, or raise the error if there are none."""
        rest = self.rest()
        if rest <= 0:
            raise self.error()
        return rest

    def error(self) -> DeadlineError:
        """Make the exception for its end."""
        return DeadlineError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer after {self.timeout} s")


@dataclass(frozen=True)
class Connection:
    """TLS and credentials."""

    tls: bool
    root_certificates: bytes | None
    certificate: bytes | None
    private_key: bytes | None
    token: str | None

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Make the credentials of a channel; `None` for plain text."""
        if (self.certificate is None) != (self.private_key is None):
            raise InputError("certificate, private_key: expected both or none")
        if not self.tls and self.root_certificates is None and self.certificate is None:
            return None
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Make the metadata of every call."""
        if self.token is None:
            return ()
        # A file of one token ends with a line end.
        token = self.token.strip()
        if not (token.isascii() and token.isprintable()):
            raise InputError("token: expected printable ASCII")
        return (("authorization", f"Bearer {token}"),)


def options() -> list[tuple[str, int]]:
    """Make the options of a channel."""
    return [
        # The server limits messages.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # Without this a client that has lost its server waits a second before it connects again.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5000),
        # Otherwise every call on a connection whose peer has vanished fails until TCP gives up, for many
        # minutes. The last one is the limit of grpc's own ping, which may be the one that gets no answer.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", 10_000),
    ]


def begin(method: Callable[..., Answer], *arguments: object, **options: object) -> Answer:
    """Begin a call. The only `ValueError` of grpc is for a closed channel."""
    try:
        return method(*arguments, **options)
    except ValueError as error:
        raise closed() from error


def closed() -> FlechetteError:
    """Make the exception for a call of a client that is closed."""
    return FlechetteError("client: it is closed")


def retried(
    send: Callable[[float], Answer],
    deadline: Deadline,
    retries: Retries,
    transient: tuple[type[ServerError], ...] = TRANSIENT,
    failed: ServerError | None = None,
    was_answered: bool = False,
) -> Answer:
    """Send a request until it succeeds. `send` gets its timeout; `failed` is the error of the first try."""
    tries = 0
    while True:
        if failed is None:
            try:
                return send(deadline.left())
            except grpc.RpcError as error:
                failed = of_call(error)
        tries += 1
        if not isinstance(failed, transient):
            raise failed
        time.sleep(retries.wait(tries, failed, deadline, was_answered=was_answered))
        failed = None
