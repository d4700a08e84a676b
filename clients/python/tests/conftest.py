"""A real server, and a scripted one for failures. `cargo test --test it python_client` runs these tests.

`CLIENT_TEST_PROGRAM` is the program, and `CLIENT_TEST_CASE` a JSON file: the directory of a model `ads`, its
samples, and the bits of the scores and logits that a Rust client gets for them.
"""

import json
import os
import queue
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pandas as pd
import pytest
from google.rpc import error_details_pb2, status_pb2

from flechette import Client
from flechette.v1 import ctr_pb2, ctr_pb2_grpc

MODEL = "ads"
SECONDS = 60.0


class Case:
    """Samples of the model and what they must get."""

    def __init__(self, path: str) -> None:
        case = json.loads(Path(path).read_text())
        self.models: str = case["models"]
        self.columns: dict[str, Any] = case["columns"]
        self.scores = np.array(case["score_bits"], np.uint32).view(np.float32)
        self.logits = np.array(case["logit_bits"], np.uint32).view(np.float32)
        self.absent: dict[str, int] = case["absent"]

    def frame(self, times: int = 1) -> pd.DataFrame:
        """Repeat the samples, with an index that is not 0, 1, 2, ..."""
        frame = pd.concat([pd.DataFrame(self.columns)] * times, ignore_index=True)
        return frame.set_index(pd.Index([f"row {i}" for i in range(len(frame))]))


class Server:
    """`flechette serve` until it is stopped."""

    def __init__(self, models: str, grpc_address: str = "127.0.0.1:0", **settings: str) -> None:
        ports = ["--grpc", grpc_address, "--http", "127.0.0.1:0"]
        command = [os.environ["CLIENT_TEST_PROGRAM"], "serve", "--models", models, *ports]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLECHETTE_")}
        environment |= {f"FLECHETTE_{name.upper()}": value for name, value in settings.items()}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        log: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(log,), daemon=True).start()
        lines = [""]
        while "grpc=" not in lines[-1]:
            line = log.get(timeout=SECONDS)
            assert line is not None, lines
            lines.append(line)
        self.address = lines[-1].split("grpc=")[1].split(" ")[0]

    def _read(self, log: "queue.SimpleQueue[str | None]") -> None:
        for line in self.process.stderr or ():
            log.put(line)
        log.put(None)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(SECONDS)


@pytest.fixture(scope="session")
def case() -> Case:
    return Case(os.environ["CLIENT_TEST_CASE"])


@pytest.fixture(scope="session")
def server(case: Case) -> Iterator[Server]:
    with Server(case.models, cache_mode="on", cache_fraction="0.5") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


Step = Callable[[grpc.ServicerContext], ctr_pb2.PredictError | None]


def failing(code: grpc.StatusCode, retry_ms: int | None = None) -> Step:
    def step(context: grpc.ServicerContext) -> None:
        if retry_ms is not None:
            info = error_details_pb2.RetryInfo()
            info.retry_delay.FromMilliseconds(retry_ms)
            status = status_pb2.Status(code=code.value[0], message="refused")
            status.details.add().Pack(info)
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(code, "refused")

    return step


def dense_order(dense: list[str]) -> int:
    return zlib.crc32(" ".join(dense).encode()) + 1


class Scripted(ctr_pb2_grpc.CtrServicer):
    """A server whose model has one feature. Each call first runs the next step of the script.

    An error that a step returns is the answer in a stream, which goes on.
    """

    def __init__(self) -> None:
        self.feature = "item"
        self.takes_strings = True
        self.dense: list[str] = []
        self.max_samples = 4
        self.described = 0
        self.before_description: Step | None = None
        self.script: list[Step] = []
        self.calls = 0
        self.metadata: dict[str, str | bytes] = {}
        self.requests: list[ctr_pb2.PredictRequest] = []
        self.dense_values: list[tuple[int, list[float]]] = []
        self.learned: list[int] = []

    def _step(self, context: grpc.ServicerContext) -> ctr_pb2.PredictError | None:
        self.calls += 1
        self.metadata = dict(context.invocation_metadata())
        return self.script.pop(0)(context) if self.script else None

    def _refusal(self, request: Any) -> tuple[grpc.StatusCode, str] | None:
        self.dense_values.append((request.dense_order, list(request.dense)))
        if request.samples > self.max_samples:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, f"samples: limit {self.max_samples}"
        if request.features[0].name != self.feature:
            return grpc.StatusCode.INVALID_ARGUMENT, f"features: {request.features[0].name} is unknown"
        if request.dense_order not in (0, dense_order(self.dense)):
            return grpc.StatusCode.INVALID_ARGUMENT, "dense_order: another order"
        return None

    def _unary(self, request: Any, context: Any) -> None:
        self._step(context)
        if refusal := self._refusal(request):
            context.abort(*refusal)

    def GetModel(self, request: Any, context: Any) -> ctr_pb2.GetModelResponse:
        self.described += 1
        self.metadata = dict(context.invocation_metadata())
        if self.before_description is not None:
            self.before_description(context)
        model = ctr_pb2.GetModelResponse(model=request.model, dense_order=dense_order(self.dense))
        model.features.add(name=self.feature, one_hot=True, max_ids=1, takes_strings=self.takes_strings)
        model.dense.extend(ctr_pb2.DenseInput(name=name) for name in self.dense)
        model.limits.max_samples, model.limits.max_bytes = self.max_samples, 1000
        return model

    def Predict(self, request: Any, context: Any) -> ctr_pb2.PredictResponse:
        self._unary(request, context)
        return self.score(request)

    def PredictStream(self, request_iterator: Any, context: Any) -> Iterator[ctr_pb2.PredictStreamResponse]:
        for request in request_iterator:
            error = self._step(context)
            if refusal := self._refusal(request):
                error = ctr_pb2.PredictError(code=refusal[0].value[0], message=refusal[1])
            if error is not None:
                yield ctr_pb2.PredictStreamResponse(error=error)
            else:
                yield ctr_pb2.PredictStreamResponse(response=self.score(request))

    def Learn(self, request: Any, context: Any) -> ctr_pb2.LearnResponse:
        self._unary(request, context)
        self.learned += request.features[0].ids
        return ctr_pb2.LearnResponse(samples=request.samples)

    def score(self, request: ctr_pb2.PredictRequest) -> ctr_pb2.PredictResponse:
        self.requests.append(request)
        scores = [1 / (1 + id) for id in request.features[0].ids] or [0.5] * request.samples
        return ctr_pb2.PredictResponse(scores=scores, version=1)

    def serve(self, credentials: grpc.ServerCredentials | None = None) -> tuple[grpc.Server, str]:
        server = grpc.server(ThreadPoolExecutor(8))
        ctr_pb2_grpc.add_CtrServicer_to_server(self, server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        return server, f"localhost:{port}"


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    servicer = Scripted()
    server, address = servicer.serve()
    yield servicer, address
    server.stop(None).wait()
