"""Wrong arguments, and calls of a closed client, raise a `FlechetteError`, with and without asyncio."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from conftest import MODEL, Scripted

from flechette import AsyncClient, Client, FlechetteError, InputError, ServerError

SAMPLES = {"item": [1, 3]}
SCORES = [0.5, 0.25]


def asynchronous(address: str, use: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(address, **options) as client:
            return await use(client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": "urgent"}, "priority: expected high, normal, low, got 'urgent'"),
        ({"version": -1}, r"version: expected 0 to 2\^64 - 1, got -1"),
        ({"version": 2**64}, r"version: expected 0 to 2\^64 - 1, got 18446744073709551616"),
        ({"label": "\ud800"}, "label: expected text: .*surrogates"),
        ({"request_id": "\ud800"}, "request_id: expected text: .*surrogates"),
        ({"timeout": 0}, "timeout: expected more than 0 seconds, got 0"),
        ({"timeout": math.nan}, "timeout: expected more than 0 seconds, got nan"),
    ],
)
def test_a_wrong_argument_is_named(
    scripted: tuple[Scripted, str], arguments: dict[str, Any], message: str
) -> None:
    servicer, address = scripted
    with Client(address) as client:
        with pytest.raises(InputError, match=message):
            client.predict(MODEL, SAMPLES, **arguments)
        with pytest.raises(InputError, match=message):
            next(client.predict_stream(MODEL, [SAMPLES], **arguments))
    with pytest.raises(InputError, match=message):
        asynchronous(address, lambda client: client.predict(MODEL, SAMPLES, **arguments))
    assert servicer.calls == 0


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("clickd", "labels: expected numbers or the name of a column, got 'clickd'"),
        (["a", "b"], "labels: expected numbers: could not convert string to float: .*'a'"),
        ([{}, 1], "labels: expected numbers: float"),
        ([1], "labels: expected 2 numbers, one for each sample"),
    ],
)
def test_wrong_labels_are_named(scripted: tuple[Scripted, str], labels: Any, message: str) -> None:
    servicer, address = scripted
    with Client(address) as client, pytest.raises(InputError, match=message) as refused:
        client.learn(MODEL, SAMPLES, labels)
    assert refused.value.learned == 0
    with pytest.raises(InputError, match=message):
        asynchronous(address, lambda client: client.learn(MODEL, SAMPLES, labels))
    assert servicer.calls == 0


def test_a_masked_array_is_refused(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    masked = np.ma.array([1, 3], mask=[False, True])
    with Client(address) as client:
        with pytest.raises(InputError, match="column 'item': expected an array without a mask"):
            client.predict(MODEL, {"item": masked})
        with pytest.raises(InputError, match="labels: expected an array without a mask"):
            client.learn(MODEL, SAMPLES, masked)
    assert servicer.calls == 0


def test_a_token_that_no_header_can_have_is_refused() -> None:
    with pytest.raises(InputError, match="token: expected printable ASCII"):
        Client("localhost:1", token="sec\nret")
    with pytest.raises(InputError, match="token: expected printable ASCII"):
        asynchronous("localhost:1", lambda client: client.model(MODEL), token="sec\nret")


def test_a_time_without_end_is_long(scripted: tuple[Scripted, str]) -> None:
    _, address = scripted
    with Client(address, timeout=math.inf) as client:
        assert client.predict(MODEL, SAMPLES).scores.tolist() == SCORES
        assert next(client.predict_stream(MODEL, [SAMPLES])).scores.tolist() == SCORES
    predict = asynchronous(address, lambda client: client.predict(MODEL, SAMPLES), timeout=math.inf)
    assert predict.scores.tolist() == SCORES


def test_a_closed_client_says_so(scripted: tuple[Scripted, str]) -> None:
    _, address = scripted
    client = Client(address)
    results = client.predict_stream(MODEL, [SAMPLES] * 99)
    next(results)
    client.close()
    with pytest.raises(FlechetteError):  # grpc ends the stream
        list(results)
    calls: list[Callable[[], object]] = [
        lambda: client.model(MODEL),
        lambda: client.predict(MODEL, SAMPLES),
        lambda: list(client.predict_stream(MODEL, [SAMPLES])),
        lambda: client.learn(MODEL, SAMPLES, [0, 1]),
    ]
    for call in calls:
        with pytest.raises(FlechetteError, match="client: it is closed"):
            call()

    async def closed(client: AsyncClient) -> None:
        await client.predict(MODEL, SAMPLES)
        await client.close()
        calls = [client.model(MODEL), client.predict(MODEL, SAMPLES), client.learn(MODEL, SAMPLES, [0, 1])]
        for call in calls:
            with pytest.raises(FlechetteError, match="client: it is closed"):
                await call

    asynchronous(address, closed)


def test_close_during_a_call_ends_it_with_an_error(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    release = threading.Event()

    def hold(_: object) -> None:
        release.wait(20)

    async def interrupt(use: Callable[[AsyncClient], Awaitable[Any]], *, cancel: bool = False) -> Any:
        servicer.calls, servicer.script = 0, [lambda _: None, hold]
        async with AsyncClient(address) as client:
            call = asyncio.ensure_future(use(client))
            while servicer.calls < 2:
                await asyncio.sleep(0.01)
            if cancel:
                call.cancel()
        return await call

    # Two requests: one that comes after the client was closed would run a step of the next script.
    many = {"item": list(range(8))}
    with pytest.raises(ServerError, match="CANCELLED: the client was closed during the call"):
        asyncio.run(interrupt(lambda client: client.predict(MODEL, many)))
    with pytest.raises(ServerError, match="CANCELLED: the client was closed during the call") as closed:
        asyncio.run(interrupt(lambda client: client.learn(MODEL, many, [1] * 8)))
    assert closed.value.learned == 4
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupt(lambda client: client.learn(MODEL, many, [1] * 8), cancel=True))
    release.set()
