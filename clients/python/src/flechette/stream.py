"""A PredictStream call that begins again when it breaks off."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import grpc

from flechette.calls import TRANSIENT
from flechette.errors import ServerError, of_call, of_stream, server_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from flechette.calls import Deadline, Retries
    from flechette.samples import Columns
    from flechette.v1.ctr_pb2 import PredictRequest, PredictResponse, PredictStreamResponse

    Outbox = queue.SimpleQueue[PredictRequest | None]
    Inbox = queue.SimpleQueue[PredictStreamResponse | ServerError]

    class Call(Protocol):
        """A call in the form of its answers."""

        def __iter__(self) -> Iterator[PredictStreamResponse]: ...
        def cancel(self) -> object: ...  # noqa: D102


WINDOW = 16
"""Most batches of a stream without an answer. The server reads no more of them."""

ENDED = server_error(grpc.StatusCode.UNAVAILABLE, "the server has ended the stream")


@dataclass(frozen=True)
class Batch:
    """A request of a stream."""

    request: PredictRequest
    columns: Columns


def result(answer: PredictStreamResponse) -> PredictResponse | ServerError:
    """Take the response or the error out of an answer."""
    return of_stream(answer.error) if answer.WhichOneof("result") == "error" else answer.response


class Stream:
    """A stream whose batches without an answer are sent again when it breaks off."""

    def __init__(self, start: Callable[[Iterator[PredictRequest]], Call], retries: Retries) -> None:
        self.pending: deque[Batch] = deque()
        self._start = start
        self._retries = retries
        self._failed = 0
        self._was_answered = False
        self._call: Call | None = None
        self._outbox: Outbox = queue.SimpleQueue()
        self._inbox: Inbox = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def send(self, batch: Batch) -> None:
        """Send a batch."""
        self.pending.append(batch)
        if self._call is None:
            self._open()
        else:
            self._outbox.put(batch.request)

    def has_answer(self) -> bool:
        """Tell whether `receive` need not wait."""
        return not self._inbox.empty()

    def receive(self, deadline: Deadline) -> tuple[Batch, PredictResponse | ServerError]:
        """Wait for the answer to the first batch without one."""
        while True:
            if self._call is None:
                self._open()
            try:
                answer = self._inbox.get(timeout=max(deadline.rest(), 0.0))
            except queue.Empty:
                raise deadline.error() from None
            if not isinstance(answer, ServerError):
                self._failed, self._was_answered = 0, True
                return self.pending.popleft(), result(answer)
            self._close()
            if not isinstance(answer, TRANSIENT):
                raise answer
            self._failed += 1
            wait = self._retries.wait(self._failed, answer, deadline, was_answered=self._was_answered)
            time.sleep(wait)

    def _open(self) -> None:
        self._outbox, self._inbox = queue.SimpleQueue(), queue.SimpleQueue()
        for batch in self.pending:
            self._outbox.put(batch.request)
        self._call = self._start(iter(self._outbox.get, None))
        # Only a queue can be waited on for a limited time.
        threading.Thread(target=_read, args=(self._call, self._inbox), daemon=True).start()

    def _close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._outbox.put(None)
            self._call = None


def _read(call: Call, inbox: Inbox) -> None:
    try:
        for answer in call:
            inbox.put(answer)
        inbox.put(ENDED)
    except grpc.RpcError as error:
        inbox.put(of_call(error))
