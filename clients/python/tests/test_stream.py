"""Streams of batches: order, a bounded window, errors, and a server that restarts."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import MODEL, Case, Scripted, Server, Step, failing

from flechette import (
    Client,
    DeadlineError,
    FlechetteError,
    InputError,
    InvalidRequestError,
    Retries,
    UnavailableError,
)
from flechette.stream import Stream
from flechette.v1.ctr_pb2 import PredictError

GONE = failing(grpc.StatusCode.UNAVAILABLE)


def busy(_: object) -> PredictError:
    return PredictError(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], retry_ms=1)


def test_batches_are_scored_in_order_and_few_are_taken_ahead(client: Client, case: Case) -> None:
    taken = 0

    def batches() -> Iterator[Any]:
        nonlocal taken
        frame = case.frame()
        for number in range(100):
            taken += 1
            yield frame.iloc[number % 50 :]

    for number, result in enumerate(client.predict_stream(MODEL, batches(), logits=True, window=4)):
        assert taken <= number + 5
        expected = case.scores[number % 50 :]
        assert np.asarray(result.scores).tobytes() == expected.tobytes()
        assert np.asarray(result.logits).tobytes() == case.logits[number % 50 :].tobytes()
        assert result.scores.index[0] == f"row {number % 50}"
    assert taken == 100


def test_the_scores_before_a_batch_that_does_not_fit_are_yielded_first(client: Client, case: Case) -> None:
    results = client.predict_stream(MODEL, [*[case.columns] * 3, {}], window=16)
    for _ in range(3):
        assert np.asarray(next(results).scores).tobytes() == case.scores.tobytes()
    with pytest.raises(InputError, match="missing"):
        next(results)


def test_batches_that_come_slowly_are_scored_when_they_come(
    client: Client, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = 0
    streams: list[Stream] = []

    def start(*options: Any) -> Stream:
        streams.append(Stream(*options))
        return streams[-1]

    def batches() -> Iterator[Any]:
        for number in range(6):
            # The result of the batch before the last one has been yielded.
            assert scored >= number - 1
            yield case.columns
            # The next one comes when there is an answer that is not yielded, or all are.
            begun = time.monotonic()
            while streams[0].pending and not streams[0].has_answer():
                assert time.monotonic() - begun < 60
                time.sleep(0.01)

    monkeypatch.setattr("flechette.client.Stream", start)
    for result in client.predict_stream(MODEL, batches()):
        scored += 1
        assert np.asarray(result.scores).tobytes() == case.scores.tobytes()
    assert scored == 6


def test_with_a_window_of_one_a_batch_is_taken_after_the_scores_of_the_one_before(
    scripted: tuple[Scripted, str],
) -> None:
    scored = 0

    def batches() -> Iterator[Any]:
        for number in range(6):
            assert scored == number
            yield {"item": [number]}

    with Client(scripted[1]) as client:
        for _ in client.predict_stream(MODEL, batches(), window=1):
            scored += 1
    assert scored == 6


def test_a_refused_batch_raises_its_error(client: Client, case: Case) -> None:
    wrong = {**case.columns, "seen": [[1] * 9] * 50}
    results = client.predict_stream(MODEL, [case.columns, wrong, case.columns])
    assert next(results).version == 1
    with pytest.raises(InvalidRequestError, match='feature "seen", sample 0: expected at most 4 ids, got 9'):
        next(results)
    with pytest.raises(FlechetteError, match="window: expected 1 to 16, got 17"):
        next(client.predict_stream(MODEL, [], window=17))
    assert list(client.predict_stream(MODEL, [])) == []


def lasting_address() -> str:
    """Find an address that stays free: Linux gives ports from 32768 on to those who name none."""
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return f"127.0.0.1:{port}"
    raise AssertionError("no port is free")


def test_a_stream_outlives_a_restart_of_the_server(case: Case) -> None:
    # Tries are not counted after the first answer, because a server may load its models for long.
    retries = Retries(tries=1)
    with (
        Server(case.models, grpc_address=lasting_address()) as first,
        Client(first.address, retries=retries) as client,
    ):
        servers = [first]

        def batches() -> Iterator[Any]:
            for number in range(60):
                if number == 20:  # drains, which ends the stream
                    first.stop()
                    servers.append(Server(case.models, grpc_address=first.address))
                if number == 40:  # breaks off
                    servers[1].process.kill()
                    servers[1].process.wait()
                    servers.append(Server(case.models, grpc_address=first.address))
                yield case.columns

        results = list(client.predict_stream(MODEL, batches()))
        assert len(results) == 60
        assert all(result.scores.tobytes() == case.scores.tobytes() for result in results)
        for server in servers:
            with server:
                pass


def test_a_batch_that_meets_overload_is_sent_again_in_its_place(case: Case) -> None:
    queue = {"batcher_queue_samples": "50", "batcher_workers": "1"}
    # The queue holds one batch, so most of a window is refused at first.
    retries = Retries(tries=1000, first_wait=0.001, longest_wait=0.01)
    with (
        Server(case.models, server_max_samples="50", batcher_max_samples="50", **queue) as server,
        Client(server.address, retries=retries) as client,
    ):
        results = list(client.predict_stream(MODEL, [case.columns] * 50))
        assert [result.scores.tobytes() for result in results] == [case.scores.tobytes()] * 50


@pytest.mark.parametrize("failure", [GONE, busy])
def test_the_time_that_the_caller_takes_does_not_count(scripted: tuple[Scripted, str], failure: Step) -> None:
    servicer, address = scripted
    servicer.script = [lambda _: None, failure]
    with Client(address, timeout=5) as client:
        results = client.predict_stream(MODEL, [{"item": [1]}, {"item": [3]}, {"item": [4]}])
        scores = next(results).scores.tolist()
        time.sleep(5.1)
        assert [*scores, *(result.scores.item() for result in results)] == pytest.approx([0.5, 0.25, 0.2])


def test_the_time_that_the_source_takes_does_not_count(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    servicer.script = [GONE]

    def batches() -> Iterator[Any]:
        yield {"item": [1]}
        time.sleep(5.1)
        yield {"item": [3]}

    with Client(address, timeout=5) as client:
        results = client.predict_stream(MODEL, batches())
        assert [result.scores.item() for result in results] == [0.5, 0.25]


def test_a_server_that_does_not_answer_is_not_waited_for(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    release = threading.Event()

    def hold(_: object) -> None:
        release.wait(120)

    servicer.script = [lambda _: None, hold]
    with Client(address, timeout=5) as client:
        results = client.predict_stream(MODEL, [{"item": [1]}] * 3)
        assert next(results).scores.tolist() == [0.5]
        begun = time.monotonic()
        try:
            with pytest.raises(DeadlineError, match=r"no answer after 5 s"):
                next(results)
            assert time.monotonic() - begun < 60
        finally:
            release.set()


def test_a_stream_that_cannot_begin_ends_with_the_last_error() -> None:
    retries = Retries(tries=3, first_wait=0.01)
    with Client("127.0.0.1:1", retries=retries) as client, pytest.raises(UnavailableError):
        next(client.predict_stream(MODEL, [{"item": [1]}]))
