"""Drives a server with tritonclient, the Python client of Triton. Reads the case from a JSON file: the address, the
model, the columns of its samples, and the bits of the native scores."""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

case = json.load(open(sys.argv[1]))
MODEL, SAMPLES = case["model"], case["samples"]
BITS = np.array(case["score_bits"], np.uint32).reshape(SAMPLES, 1)
TYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}


def tensor(name, datatype, shape, values, kind=triton):
    if datatype == "BYTES":
        array = np.array([value.encode() for value in values], np.object_)
    else:
        array = np.array(values, TYPES[datatype])
    input = kind.InferInput(name, shape, datatype)
    input.set_data_from_numpy(array.reshape(shape))
    return input


def inputs(kind=triton):
    tensors = [tensor("dense", "FP32", [SAMPLES, len(case["dense"]) // SAMPLES], case["dense"], kind)]
    for column in case["columns"]:
        datatype, values = ("BYTES", column["strings"]) if column["strings"] else ("INT64", column["ids"])
        if column["one_hot"]:
            tensors.append(tensor(column["name"], datatype, [SAMPLES, 1], values, kind))
        else:
            tensors.append(tensor(column["name"], datatype, [len(values)], values, kind))
            lengths = column["name"] + ":lengths"
            tensors.append(tensor(lengths, "INT32", [SAMPLES], column["lengths"], kind))
    return tensors


def check(result, id=None):
    scores = result.as_numpy("score")
    assert scores.dtype == np.float32 and scores.shape == (SAMPLES, 1), scores
    assert np.array_equal(scores.view(np.uint32), BITS), scores.ravel()
    if id is not None:
        assert result.get_response().id == id, result.get_response()


def refused(code, words, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except InferenceServerException as error:
        assert error.status() == f"StatusCode.{code}" and words in error.message(), error
    else:
        raise AssertionError(f"not refused: {words}")


def metadata(client):
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready(MODEL) and client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("nobody") and not client.is_model_ready(MODEL, "9")
    server = client.get_server_metadata()
    assert server.name == "flechette" and "model_repository" in server.extensions, server
    model = client.get_model_metadata(MODEL)
    assert model.name == MODEL and list(model.versions) == ["1"], model
    names = [input.name() for input in inputs()]
    assert [input.name for input in model.inputs] == names, model
    assert [list(input.shape)[1:] for input in model.inputs] == [i.shape()[1:] for i in inputs()], model
    outputs = [(output.name, output.datatype, list(output.shape)) for output in model.outputs]
    assert outputs == [("score", "FP32", [-1, 1]), ("logit", "FP32", [-1, 1])], outputs


def infer(client):
    check(client.infer(MODEL, inputs(), request_id="first"), "first")
    both = [triton.InferRequestedOutput(name) for name in ("score", "logit")]
    result = client.infer(MODEL, inputs(), outputs=both)
    check(result)
    logit = result.as_numpy("logit").astype(np.float64)
    assert np.allclose(1 / (1 + np.exp(-logit)), result.as_numpy("score"), atol=1e-6), logit
    score = [triton.InferRequestedOutput("score")]
    check(client.infer(MODEL, list(reversed(inputs())), "1", score, timeout=60_000_000, client_timeout=60.0))
    answers = queue.Queue()
    for _ in range(20):
        client.async_infer(MODEL, inputs(), lambda result, error: answers.put((result, error)))
    for _ in range(20):
        result, error = answers.get(timeout=60)
        assert error is None, error
        check(result)


def errors(client):
    refused("NOT_FOUND", 'no model "nobody" is served', client.infer, "nobody", inputs())
    refused("NOT_FOUND", "serves version 1, got 9", client.infer, MODEL, inputs(), "9")
    refused("INVALID_ARGUMENT", 'input "dense": missing', client.infer, MODEL, inputs()[1:])
    wrong = [tensor("dense", "INT64", [SAMPLES, 1], range(SAMPLES))] + inputs()[1:]
    refused("INVALID_ARGUMENT", 'input "dense": datatype: expected FP32', client.infer, MODEL, wrong)
    unknown = inputs() + [tensor("x", "INT64", [1], [1])]
    refused("INVALID_ARGUMENT", 'input "x": the model has no such input', client.infer, MODEL, unknown)
    other = [triton.InferRequestedOutput("loss")]
    refused("INVALID_ARGUMENT", 'output "loss"', client.infer, MODEL, inputs(), outputs=other)


def statistics(client):
    before = client.get_inference_statistics(MODEL).model_stats[0]
    client.infer(MODEL, inputs())
    (after,) = client.get_inference_statistics().model_stats
    assert (after.name, after.version) == (MODEL, "1"), after
    assert after.inference_count == before.inference_count + SAMPLES, (before, after)
    assert after.execution_count == before.execution_count + 1, (before, after)
    stats = after.inference_stats
    assert stats.success.count == before.inference_stats.success.count + 1, (before, after)
    assert stats.fail.count == 5, stats  # those of `errors` that name the model
    for total in (stats.queue, stats.compute_input, stats.compute_infer):
        assert 0 < total.ns < stats.success.ns, stats


def stream(client):
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(60):
        tensors = inputs()[1:] if number == 30 else inputs()
        client.async_stream_infer(MODEL, tensors, request_id=str(number))
    for number in range(60):
        result, error = answers.get(timeout=60)
        if number == 30:
            assert 'input "dense": missing' in error.message(), error
        else:
            assert error is None, error
            check(result, str(number))
    client.stop_stream()


def repository(client):
    def index():
        return {model.name: (model.version, model.state) for model in client.get_model_repository_index().models}

    assert index() == {MODEL: ("1", "READY")}, index()
    client.unload_model(MODEL)
    assert index() == {MODEL: ("", "UNAVAILABLE")}, index()
    # It was the only model.
    assert not client.is_server_ready() and not client.is_model_ready(MODEL)
    refused("NOT_FOUND", f'no model "{MODEL}" is served', client.infer, MODEL, inputs())
    refused("NOT_FOUND", f'no model "{MODEL}" is served', client.unload_model, MODEL)
    refused("NOT_FOUND", 'no model "nobody"', client.load_model, "nobody")
    refused("INVALID_ARGUMENT", '"config" is not supported', client.load_model, MODEL, config="{}")
    client.load_model(MODEL)
    assert index() == {MODEL: ("1", "READY")}, index()
    check(client.infer(MODEL, inputs()))
    (stats,) = client.get_inference_statistics(MODEL).model_stats
    assert stats.inference_count == SAMPLES, stats


async def asynchronous(address):
    async with triton_aio.InferenceServerClient(address) as client:
        assert await client.is_server_live() and await client.is_model_ready(MODEL)
        results = await asyncio.gather(*(client.infer(MODEL, inputs(triton_aio)) for _ in range(20)))
        for result in results:
            check(result)
        try:
            await client.infer(MODEL, [])
        except InferenceServerException as error:
            assert "missing" in error.message(), error
        else:
            raise AssertionError("not refused")

        async def requests():
            for number in range(40):
                tensors = [] if number == 10 else inputs(triton_aio)
                yield {"model_name": MODEL, "inputs": tensors, "request_id": str(number)}

        number = 0
        async for result, error in client.stream_infer(requests()):
            if number == 10:
                assert 'input "dense": missing' in error.message(), error
            else:
                assert error is None, error
                check(result, str(number))
            number += 1
        assert number == 40, number


async def secured(secure):
    """A server that wants certificates of its clients and tokens; the label `canary` names version 1."""
    keys = ("root_certificates", "private_key", "certificate_chain")
    tls = {"ssl": True} | {key: secure[key] for key in keys}
    predict, admin = ({"authorization": f"Bearer {secure[role]}"} for role in ("predict", "admin"))
    with triton.InferenceServerClient(secure["address"], **tls) as client:
        # Health needs no token.
        assert client.is_server_live() and client.is_model_ready(MODEL)
        check(client.infer(MODEL, inputs(), headers=predict))
        assert client.get_model_metadata(MODEL, headers=predict).name == MODEL
        refused("UNAUTHENTICATED", "authorization", client.infer, MODEL, inputs())
        refused("PERMISSION_DENIED", "a token of auth.admin", client.unload_model, MODEL, headers=predict)

        check(client.infer(MODEL, inputs(), headers=predict, parameters={"label": "canary"}))
        named = {"headers": predict, "parameters": {"label": "canary"}}
        refused("INVALID_ARGUMENT", "got both", client.infer, MODEL, inputs(), "1", **named)
        for label, code, words in [("blue", "NOT_FOUND", 'got "blue"'), (1, "INVALID_ARGUMENT", "a string")]:
            named["parameters"] = {"label": label}
            refused(code, words, client.infer, MODEL, inputs(), **named)

        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=predict)
        for label in ("canary", "blue"):
            client.async_stream_infer(MODEL, inputs(), parameters={"label": label})
        result, error = answers.get(timeout=60)
        assert error is None, error
        check(result)
        result, error = answers.get(timeout=60)
        assert 'got "blue"' in error.message(), error
        client.stop_stream()

        client.unload_model(MODEL, headers=admin)
        client.load_model(MODEL, headers=admin)
    async with triton_aio.InferenceServerClient(secure["address"], **tls) as client:
        check(await client.infer(MODEL, inputs(triton_aio), headers=predict, parameters={"label": "canary"}))
    for without in ("root_certificates", "private_key"):
        others = tls | {without: None} | ({"certificate_chain": None} if without == "private_key" else {})
        with triton.InferenceServerClient(secure["address"], **others) as client:
            refused("UNAVAILABLE", "", client.is_server_live)


with triton.InferenceServerClient(case["address"]) as client:
    for step in (metadata, infer, errors, statistics, stream, repository):
        step(client)
        print(step.__name__, "passes", flush=True)
asyncio.run(asynchronous(case["address"]))
print("asynchronous passes")
asyncio.run(secured(case["secure"]))
print("secured passes")
