"""The client."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import grpc

from flechette.calls import (
    OUTDATED,
    REFUSED,
    TRANSIENT,
    Connection,
    Deadline,
    Retries,
    begin,
    options,
    retried,
)
from flechette.errors import FlechetteError, InputError, ServerError, in_request_at, of_call
from flechette.prediction import Ask, Prediction, prediction
from flechette.samples import encode, numbers, requests
from flechette.stream import WINDOW, Batch, Stream
from flechette.v1.ctr_pb2 import (
    GetModelRequest,
    GetModelResponse,
    LearnRequest,
    PredictRequest,
    PredictResponse,
)
from flechette.v1.ctr_pb2_grpc import CtrStub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import TypeVar

    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray
    from typing_extensions import Self

    from flechette.prediction import PriorityName
    from flechette.samples import Columns

    Answer = TypeVar("Answer")
    FloatArray = NDArray[np.float32]
    FloatSeries = pd.Series[float]

IN_FLIGHT = 8
"""Most requests of a call without an answer."""


class Client:
    """A connection to a server. Several threads may use it.

    `timeout` limits a call in seconds, with all of its requests and tries, unless the call has its own.
    `root_certificates` (PEM), or `tls` with the roots of the system, encrypt the connection. `certificate`
    and `private_key` (PEM) identify the client. `token` is sent as `authorization: Bearer`.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float = 60.0,
        retries: Retries | None = None,
        tls: bool = False,
        root_certificates: bytes | None = None,
        certificate: bytes | None = None,
        private_key: bytes | None = None,
        token: str | None = None,
    ) -> None:
        connection = Connection(tls, root_certificates, certificate, private_key, token)
        credentials, self._metadata = connection.credentials(), connection.metadata()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options())
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options())
        self._stub = CtrStub(self._channel)
        self._timeout = timeout
        self._retries = retries or Retries()
        self._models: dict[str, GetModelResponse] = {}

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def model(self, name: str, *, timeout: float | None = None) -> GetModelResponse:
        """Describe a model: its inputs, its limits, its loaded versions and their labels."""
        return self._describe(name, self._deadline(timeout))

    @overload
    def predict(
        self,
        model: str,
        columns: pd.DataFrame,
        *,
        version: int = ...,
        label: str = ...,
        request_id: str = ...,
        priority: PriorityName = ...,
        logits: bool = ...,
        timeout: float | None = ...,
    ) -> Prediction[FloatSeries]: ...

    @overload
    def predict(
        self,
        model: str,
        columns: Mapping[str, Any],
        *,
        version: int = ...,
        label: str = ...,
        request_id: str = ...,
        priority: PriorityName = ...,
        logits: bool = ...,
        timeout: float | None = ...,
    ) -> Prediction[FloatArray]: ...

    def predict(
        self,
        model: str,
        columns: Columns,
        *,
        version: int = 0,
        label: str = "",
        request_id: str = "",
        priority: PriorityName = "normal",
        logits: bool = False,
        timeout: float | None = None,
    ) -> Prediction[Any]:
        """Score samples: a column for each input of the model, in a DataFrame or a dictionary of arrays.

        Integers of a feature are ids, which are not hashed. If training data had numbers as text, the column
        must have strings: read it with `dtype=str`.

        More samples than the server accepts at once are sent in several requests. `version` demands a
        version, and `label` the version that a label names, such as `stable`. Calls with the same
        `request_id` stay at the same side of a canary.
        """
        deadline = self._deadline(timeout)
        ask = Ask(model, version, label, request_id, priority, logits)

        def score(known: GetModelResponse) -> list[PredictResponse]:
            return self._scores(ask.requests(columns, known), deadline)

        return prediction(self._described(model, deadline, score), columns)

    @overload
    def predict_stream(
        self,
        model: str,
        batches: Iterable[pd.DataFrame],
        *,
        version: int = ...,
        label: str = ...,
        request_id: str = ...,
        priority: PriorityName = ...,
        logits: bool = ...,
        timeout: float | None = ...,
        window: int = ...,
    ) -> Iterator[Prediction[FloatSeries]]: ...

    @overload
    def predict_stream(
        self,
        model: str,
        batches: Iterable[Mapping[str, Any]],
        *,
        version: int = ...,
        label: str = ...,
        request_id: str = ...,
        priority: PriorityName = ...,
        logits: bool = ...,
        timeout: float | None = ...,
        window: int = ...,
    ) -> Iterator[Prediction[FloatArray]]: ...

    @overload
    def predict_stream(
        self,
        model: str,
        batches: Iterable[Columns],
        *,
        version: int = ...,
        label: str = ...,
        request_id: str = ...,
        priority: PriorityName = ...,
        logits: bool = ...,
        timeout: float | None = ...,
        window: int = ...,
    ) -> Iterator[Prediction[Any]]: ...

    def predict_stream(
        self,
        model: str,
        batches: Iterable[Columns],
        *,
        version: int = 0,
        label: str = "",
        request_id: str = "",
        priority: PriorityName = "normal",
        logits: bool = False,
        timeout: float | None = None,
        window: int = WINDOW,
    ) -> Iterator[Prediction[Any]]:
        """Score batches as they come, and yield their scores in the same order.

        At most `window` batches are without an answer: further ones are taken when scores have been. While
        the next batch is waited for, no scores are yielded, so those of the last batch may come only after
        the next one. With `window=1` a batch is taken when the scores of the one before it have been, which
        suits a source that is live.

        `timeout` limits the wait for the scores of one batch. The time that the caller and the source take
        does not count. Each batch must be within the limits of one request. If the stream breaks off, for
        example because the server restarts, the batches without an answer are sent again.
        """
        if not 1 <= window <= WINDOW:
            raise InputError(f"window: expected 1 to {WINDOW}, got {window}")
        ask, source = Ask(model, version, label, request_id, priority, logits), iter(batches)
        start = partial(begin, self._stub.PredictStream, metadata=self._metadata)
        failed: Exception | None = None
        with Stream(start, self._retries) as stream:
            while True:
                while failed is None and len(stream.pending) < window:
                    try:
                        if (columns := next(source, None)) is None:
                            break
                        limit = self._deadline(timeout)
                        encode = partial(ask.request, columns, timeout_ms=limit.milliseconds())
                        request = self._described(model, limit, encode)
                    except Exception as error:
                        # Those before it are yielded first, so that their number says which batch it was.
                        failed = error
                        break
                    stream.send(Batch(request, columns))
                    # The next batch may come late.
                    if stream.has_answer():
                        break
                if not stream.pending:
                    if failed is not None:
                        raise failed
                    return
                try:
                    # It begins here, so that the time that the caller and the source took does not count.
                    deadline = self._deadline(timeout)
                    batch, answer = stream.receive(deadline)
                    if isinstance(answer, ServerError):
                        answer = self._again(batch.request, deadline, answer, was_answered=True)
                except OUTDATED:
                    # The batch is not encoded again: its arrays may have other contents by now.
                    self._models.pop(model, None)
                    raise
                yield prediction([answer], batch.columns)

    def learn(
        self,
        model: str,
        columns: Columns,
        labels: Any,
        *,
        timeout: float | None = None,
    ) -> int:
        """Store labelled samples, on which the model is trained later. Returns their number.

        They are durable then. `labels` are numbers from 0 to 1, or the name of a column with them. If a call
        of several requests fails, `learned` of the exception is the number of samples that are durable. A
        request that ended without an answer, for example by its deadline, may be stored nevertheless.
        """
        deadline, learned = self._deadline(timeout), 0

        def learn(known: GetModelResponse) -> None:
            nonlocal learned
            for request in learn_requests(known, columns, labels, learned):
                with in_request_at(learned):
                    learned += self._call(self._stub.Learn, request, deadline, REFUSED).samples

        try:
            self._described(model, deadline, learn)
        except FlechetteError as error:
            error.learned = learned
            raise
        return learned

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._timeout if timeout is None else timeout)

    def _describe(self, name: str, deadline: Deadline) -> GetModelResponse:
        self._models[name] = model = self._call(self._stub.GetModel, GetModelRequest(model=name), deadline)
        return model

    def _described(
        self, model: str, deadline: Deadline, attempt: Callable[[GetModelResponse], Answer]
    ) -> Answer:
        """Attempt something by the description of the model that is kept, or else by a new one."""
        known = self._models.get(model)
        if known is None:
            return attempt(self._describe(model, deadline))
        try:
            return attempt(known)
        except OUTDATED as outdated:
            self._models.pop(model, None)
            try:
                described = self._describe(model, deadline)
            except FlechetteError:
                # The first error may be due to the old description, unless it is the server's.
                if isinstance(outdated, ServerError):
                    raise outdated from None
                raise
            if described == known:
                raise
        return attempt(described)

    def _scores(self, requests: Iterator[PredictRequest], deadline: Deadline) -> list[PredictResponse]:
        responses: list[PredictResponse] = []
        sent: deque[tuple[int, PredictRequest, grpc.Future[PredictResponse]]] = deque()
        first = 0
        try:
            for request in requests:
                if len(sent) == IN_FLIGHT:
                    responses.append(self._finish(*sent.popleft(), deadline))
                start = self._stub.Predict.future
                call = begin(start, request, timeout=deadline.left(), metadata=self._metadata)
                sent.append((first, request, call))
                first += request.samples
            while sent:
                responses.append(self._finish(*sent.popleft(), deadline))
        finally:
            for _, _, unanswered in sent:
                unanswered.cancel()
        return responses

    def _finish(
        self, first: int, request: PredictRequest, call: grpc.Future[PredictResponse], deadline: Deadline
    ) -> PredictResponse:
        try:
            return call.result()
        except grpc.RpcError as error:
            with in_request_at(first):
                return self._again(request, deadline, of_call(error))

    def _again(
        self, request: PredictRequest, deadline: Deadline, failed: ServerError, *, was_answered: bool = False
    ) -> PredictResponse:
        return self._call(self._stub.Predict, request, deadline, failed=failed, was_answered=was_answered)

    def _call(
        self,
        method: Callable[..., Answer],
        request: object,
        deadline: Deadline,
        transient: tuple[type[ServerError], ...] = TRANSIENT,
        failed: ServerError | None = None,
        was_answered: bool = False,
    ) -> Answer:
        def send(rest: float) -> Answer:
            return begin(method, request, timeout=rest, metadata=self._metadata)

        return retried(send, deadline, self._retries, transient, failed, was_answered)


def labels_of(columns: Columns, labels: Any, count: int) -> NDArray[np.float32]:
    """Take the labels of samples."""
    if isinstance(labels, str):
        if labels not in columns:
            raise InputError(f"labels: expected numbers or the name of a column, got {labels!r}")
        labels = columns[labels]
    values = numbers("labels", labels)
    if values.shape != (count,):
        raise InputError(f"labels: expected {count} numbers, one for each sample, got shape {values.shape}")
    return values


def learn_requests(
    model: GetModelResponse, columns: Columns, labels: Any, begin: int
) -> Iterator[LearnRequest]:
    """Make the requests that store the samples from `begin` on."""
    samples = encode(model, columns)
    targets = labels_of(columns, labels, samples.count)

    def make(begin: int, end: int) -> LearnRequest:
        return samples.write(begin, end, LearnRequest(model=model.model, labels=targets[begin:end].tolist()))

    return requests(model, samples.count, make, begin)
