"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, overload

import grpc

from flechette.calls import OUTDATED, REFUSED, TRANSIENT, Connection, Deadline, Retries, closed, options
from flechette.client import IN_FLIGHT, learn_requests
from flechette.errors import FlechetteError, ServerError, in_request_at, of_call, server_error
from flechette.prediction import Ask, Prediction, prediction
from flechette.v1.ctr_pb2 import GetModelRequest, GetModelResponse, PredictRequest, PredictResponse
from flechette.v1.ctr_pb2_grpc import CtrStub

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from typing import TypeVar

    import pandas as pd
    from typing_extensions import Self

    from flechette.client import FloatArray, FloatSeries
    from flechette.prediction import PriorityName
    from flechette.samples import Columns

    Answer = TypeVar("Answer")


class AsyncClient:
    """`Client` for asyncio, without streams: concurrent calls share a connection."""

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
            self._channel = grpc.aio.insecure_channel(address, options=options())
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options())
        self._stub = CtrStub(self._channel)
        self._timeout = timeout
        self._retries = retries or Retries()
        self._models: dict[str, GetModelResponse] = {}

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def model(self, name: str, *, timeout: float | None = None) -> GetModelResponse:
        """Describe a model: its inputs, its limits, its loaded versions and their labels."""
        return await self._describe(name, self._deadline(timeout))

    @overload
    async def predict(
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
    async def predict(
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

    async def predict(
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
        """Score samples, as `Client.predict`."""
        deadline = self._deadline(timeout)
        ask = Ask(model, version, label, request_id, priority, logits)

        async def score(known: GetModelResponse) -> list[PredictResponse]:
            return await self._scores(ask.requests(columns, known), deadline)

        return prediction(await self._described(model, deadline, score), columns)

    async def learn(
        self,
        model: str,
        columns: Columns,
        labels: Any,
        *,
        timeout: float | None = None,
    ) -> int:
        """Store labelled samples, as `Client.learn`."""
        deadline, learned = self._deadline(timeout), 0

        async def learn(known: GetModelResponse) -> None:
            nonlocal learned
            for request in learn_requests(known, columns, labels, learned):
                with in_request_at(learned):
                    answer = await self._call(self._stub.Learn, request, deadline, REFUSED)
                learned += answer.samples

        try:
            await self._described(model, deadline, learn)
        except FlechetteError as error:
            error.learned = learned
            raise
        return learned

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._timeout if timeout is None else timeout)

    async def _described(
        self, model: str, deadline: Deadline, attempt: Callable[[GetModelResponse], Awaitable[Answer]]
    ) -> Answer:
        """Attempt something, as `Client._described`."""
        known = self._models.get(model)
        if known is None:
            return await attempt(await self._describe(model, deadline))
        try:
            return await attempt(known)
        except OUTDATED as outdated:
            self._models.pop(model, None)
            try:
                described = await self._describe(model, deadline)
            except FlechetteError:
                # The first error may be due to the old description, unless it is the server's.
                if isinstance(outdated, ServerError):
                    raise outdated from None
                raise
            if described == known:
                raise
        return await attempt(described)

    async def _describe(self, name: str, deadline: Deadline) -> GetModelResponse:
        model = await self._call(self._stub.GetModel, GetModelRequest(model=name), deadline)
        self._models[name] = model
        return model

    async def _scores(self, requests: Iterator[PredictRequest], deadline: Deadline) -> list[PredictResponse]:
        responses: list[PredictResponse] = []
        sent: deque[asyncio.Future[PredictResponse]] = deque()
        first = 0
        try:
            for request in requests:
                if len(sent) == IN_FLIGHT:
                    responses.append(await sent.popleft())
                sent.append(asyncio.ensure_future(self._score(first, request, deadline)))
                first += request.samples
                # Requests are sent while others are made.
                await asyncio.sleep(0)
            while sent:
                responses.append(await sent.popleft())
        finally:
            for unanswered in sent:
                unanswered.cancel()
        return responses

    async def _score(self, first: int, request: PredictRequest, deadline: Deadline) -> PredictResponse:
        with in_request_at(first):
            return await self._call(self._stub.Predict, request, deadline)

    async def _call(
        self,
        method: Callable[..., Awaitable[Answer]],
        request: object,
        deadline: Deadline,
        transient: tuple[type[ServerError], ...] = TRANSIENT,
    ) -> Answer:
        failed = 0
        while True:
            try:
                call = method(request, timeout=deadline.left(), metadata=self._metadata)
            except grpc.aio.UsageError as error:
                raise closed() from error
            answer = asyncio.ensure_future(call)
            try:
                # This raises CancelledError only if the task is cancelled, not if `close` cancels the call.
                await asyncio.wait([answer])
            finally:
                answer.cancel()
            if answer.cancelled():
                raise server_error(grpc.StatusCode.CANCELLED, "the client was closed during the call")
            try:
                return answer.result()
            except grpc.RpcError as error:
                status = of_call(error)
            failed += 1
            if not isinstance(status, transient):
                raise status
            await asyncio.sleep(self._retries.wait(failed, status, deadline))
