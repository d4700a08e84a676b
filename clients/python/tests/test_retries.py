"""When failed requests are sent again, and how connections are secured, by a scripted server."""

import asyncio
import pickle
import time
from collections.abc import Callable

import grpc
import pytest
import trustme
from conftest import MODEL, Scripted, failing

from flechette import (
    AsyncClient,
    Client,
    DeadlineError,
    FlechetteError,
    InvalidRequestError,
    LimitError,
    OverloadedError,
    Retries,
    UnavailableError,
)
from flechette.calls import Deadline
from flechette.errors import server_error

SAMPLES = {"item": [1, 3]}
SCORES = [0.5, 0.25]

BUSY, GONE = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
FINAL = {grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError, BUSY: LimitError}
FAST = Retries(first_wait=0.001, longest_wait=0.002)


def test_an_error_can_be_sent_to_another_process() -> None:
    for code, retry_after in [(BUSY, 2.0), (BUSY, None), (GONE, None), (grpc.StatusCode.INTERNAL, None)]:
        error = server_error(code, "refused", retry_after)
        error.learned = 3
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)


def predict(address: str, retries: Retries, timeout: float) -> list[float]:
    with Client(address, retries=retries, timeout=timeout) as client:
        return client.predict(MODEL, SAMPLES).scores.tolist()


def predict_async(address: str, retries: Retries, timeout: float) -> list[float]:
    async def score() -> list[float]:
        async with AsyncClient(address, retries=retries, timeout=timeout) as client:
            return (await client.predict(MODEL, SAMPLES)).scores.tolist()

    return asyncio.run(score())


def stream(address: str, retries: Retries, timeout: float) -> list[float]:
    with Client(address, retries=retries, timeout=timeout) as client:
        (result,) = client.predict_stream(MODEL, [SAMPLES])
        return result.scores.tolist()


EVERY = pytest.mark.parametrize("score", [predict, predict_async, stream])
Score = Callable[[str, Retries, float], list[float]]


@EVERY
def test_transient_errors_are_retried(scripted: tuple[Scripted, str], score: Score) -> None:
    servicer, address = scripted
    servicer.script = [failing(BUSY, 0), failing(GONE), failing(BUSY, 1)]
    assert score(address, FAST, 30) == SCORES
    assert servicer.calls == 4


@EVERY
def test_the_server_says_when_to_come_back(scripted: tuple[Scripted, str], score: Score) -> None:
    servicer, address = scripted
    servicer.script = [failing(BUSY, 400)]
    begun = time.monotonic()
    assert score(address, FAST, 30) == SCORES
    assert time.monotonic() - begun >= 0.4


@EVERY
def test_no_try_begins_after_the_deadline(scripted: tuple[Scripted, str], score: Score) -> None:
    servicer, address = scripted
    servicer.script = [failing(BUSY, 600_000)]
    begun = time.monotonic()
    with pytest.raises(OverloadedError) as refused:
        score(address, FAST, 60)
    assert refused.value.retry_after == 600
    assert time.monotonic() - begun < 60
    assert servicer.calls == 1
    servicer.script = [lambda _: time.sleep(0.4), failing(GONE)]
    with pytest.raises(DeadlineError):
        score(address, FAST, 0.2)


@EVERY
def test_the_tries_are_limited_and_other_errors_are_final(
    scripted: tuple[Scripted, str], score: Score
) -> None:
    servicer, address = scripted
    servicer.script = [failing(GONE)] * 9
    with pytest.raises(UnavailableError):
        score(address, Retries(tries=3, first_wait=0.001), 30)
    assert servicer.calls == 3
    for code, error in FINAL.items():
        servicer.calls, servicer.script = 0, [failing(code)]
        with pytest.raises(error):
            score(address, FAST, 30)
        assert servicer.calls == 1


def test_the_priority_is_sent(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted

    async def asynchronous() -> None:
        async with AsyncClient(address) as client:
            await client.predict(MODEL, SAMPLES, priority="low")

    with Client(address) as client:
        client.predict(MODEL, SAMPLES)
        client.predict(MODEL, SAMPLES, priority="high")
        list(client.predict_stream(MODEL, [SAMPLES], priority="low"))
        asyncio.run(asynchronous())
    assert [request.priority for request in servicer.requests] == [0, 1, 2, 2]


def test_waits_are_random_and_grow() -> None:
    retries, error = Retries(), UnavailableError(GONE, "gone")
    waits = [[retries.wait(n, error, Deadline.after(100)) for _ in range(200)] for n in range(1, 10)]
    for n, some in enumerate(waits):
        longest = min(0.05 * 2**n, 2.0)
        assert 0 <= min(some) < longest / 4 < longest / 2 < max(some) <= longest


def test_samples_that_may_be_stored_are_not_sent_again(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    many = {"item": list(range(10))}  # three requests
    with Client(address, retries=FAST) as client:
        servicer.script = [failing(BUSY, 1)]
        assert client.learn(MODEL, many, [1] * 10) == 10
        servicer.script = [lambda _: None, failing(GONE)]
        with pytest.raises(UnavailableError) as refused:
            client.learn(MODEL, many, [1] * 10)
    assert refused.value.learned == 4


def test_tls_with_certificates_and_a_token(scripted: tuple[Scripted, str]) -> None:
    authority = trustme.CA()
    issued, own = authority.issue_cert("localhost"), authority.issue_cert("client")
    roots = authority.cert_pem.bytes()
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=True)
    servicer = Scripted()
    server, address = servicer.serve(credentials)
    identity = {"certificate": own.cert_chain_pems[0].bytes(), "private_key": own.private_key_pem.bytes()}
    with Client(address, root_certificates=roots, token="secret", **identity) as client:
        assert client.predict(MODEL, SAMPLES).scores.tolist() == SCORES
        assert servicer.metadata["authorization"] == "Bearer secret"
        assert [result.scores.tolist() for result in client.predict_stream(MODEL, [SAMPLES])] == [SCORES]

    async def asynchronous() -> None:
        async with AsyncClient(address, root_certificates=roots, token="other", **identity) as client:
            assert (await client.predict(MODEL, SAMPLES)).scores.tolist() == SCORES

    asyncio.run(asynchronous())
    assert servicer.metadata["authorization"] == "Bearer other"
    for wrong in ({"root_certificates": roots}, {"tls": True}):
        with Client(address, retries=Retries(tries=2), **wrong) as client, pytest.raises(UnavailableError):
            client.model(MODEL)
    server.stop(None).wait()
    with pytest.raises(FlechetteError, match="certificate, private_key: expected both or none"):
        Client(address, certificate=b"x")
    with Client(scripted[1], token="plain") as client:
        client.model(MODEL)
    assert scripted[0].metadata["authorization"] == "Bearer plain"
