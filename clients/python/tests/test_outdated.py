"""A client that knows a model asks again when the model has other inputs, or the server lower limits."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import grpc
import pytest
from conftest import MODEL, Case, Scripted, Server, dense_order, failing

from flechette import AsyncClient, Client, InputError, InvalidRequestError, LimitError, NotFoundError

TEN = {"item": list(range(10))}
BOTH = {"item": [1, 3], "thing": [1, 3]}
SCORES = [0.5, 0.25]

Columns = dict[str, list[int]]
DENSE = {"item": [1, 3], "price": [10, 20], "hour": [7, 8]}
Change = Callable[[], object]


def predict(address: str, before: Columns, change: Change, after: Columns) -> list[float]:
    with Client(address) as client:
        client.predict(MODEL, before)
        change()
        return client.predict(MODEL, after).scores.tolist()


def predict_async(address: str, before: Columns, change: Change, after: Columns) -> list[float]:
    async def score() -> list[float]:
        async with AsyncClient(address) as client:
            await client.predict(MODEL, before)
            change()
            return (await client.predict(MODEL, after)).scores.tolist()

    return asyncio.run(score())


def learn(address: str, before: Columns, change: Change, after: Columns) -> int:
    with Client(address) as client:
        client.predict(MODEL, before)
        change()
        return client.learn(MODEL, after, [0, 1])


def learn_async(address: str, before: Columns, change: Change, after: Columns) -> int:
    async def store() -> int:
        async with AsyncClient(address) as client:
            await client.predict(MODEL, before)
            change()
            return await client.learn(MODEL, after, [0, 1])

    return asyncio.run(store())


EVERY = pytest.mark.parametrize("score", [predict, predict_async])
Score = Callable[[str, Columns, Change, Columns], list[float]]


def stream(address: str, before: Columns, change: Change, after: Columns) -> list[float]:
    with Client(address) as client:
        next(client.predict_stream(MODEL, [before]))
        change()
        with pytest.raises(LimitError, match="limit"):
            next(client.predict_stream(MODEL, [after]))
        with pytest.raises(InputError, match="batch: the server accepts at most"):
            next(client.predict_stream(MODEL, [after]))
        return client.predict(MODEL, after).scores.tolist()


@pytest.mark.parametrize("limit", [{"server_max_samples": "20"}, {"server_max_bytes": "1024"}])
@pytest.mark.parametrize("score", [predict, predict_async, stream])
def test_samples_are_split_by_the_limits_of_a_server_that_was_restarted(
    case: Case, score: Score, limit: dict[str, str]
) -> None:
    with ExitStack() as servers:
        first = servers.enter_context(Server(case.models))

        def restart() -> None:
            first.stop()
            servers.enter_context(Server(case.models, grpc_address=first.address, **limit))

        assert score(first.address, case.columns, restart, case.columns) == case.scores.tolist()


@EVERY
def test_samples_are_encoded_for_other_inputs(scripted: tuple[Scripted, str], score: Score) -> None:
    servicer, address = scripted
    for feature, after in [("thing", BOTH), ("item", {"item": [1, 3]})]:
        before = {servicer.feature: [1]}
        assert score(address, before, lambda to=feature: setattr(servicer, "feature", to), after) == SCORES
    assert servicer.described == 4


@pytest.mark.parametrize("send", [predict, predict_async, learn, learn_async])
def test_dense_values_are_sent_in_the_new_order_of_the_model(
    scripted: tuple[Scripted, str], send: Callable[[str, Columns, Change, Columns], object]
) -> None:
    servicer, address = scripted
    servicer.dense = ["price", "hour"]
    send(address, DENSE, servicer.dense.reverse, DENSE)
    before = (dense_order(["price", "hour"]), [10, 7, 20, 8])
    assert servicer.dense_values == [before, before, (dense_order(["hour", "price"]), [7, 10, 8, 20])]
    assert servicer.described == 2


@EVERY
def test_nothing_is_sent_again_if_the_model_is_the_same(scripted: tuple[Scripted, str], score: Score) -> None:
    servicer, address = scripted
    with pytest.raises(InputError, match="columns: 'item': missing"):
        score(address, TEN, lambda: None, {"thing": [1]})
    assert servicer.described == 2
    assert servicer.calls == 3  # ten samples, at most four a request


def test_the_rest_of_the_learned_samples_is_split_anew(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted

    def lower(_: object) -> None:
        servicer.max_samples = 3

    async def learn() -> int:
        async with AsyncClient(address) as client:
            await client.model(MODEL)
            return await client.learn(MODEL, TEN, [1] * 10)

    servicer.script = [lambda _: None, lower]
    assert asyncio.run(learn()) == 10
    assert servicer.learned == TEN["item"]
    servicer.max_samples, servicer.learned, servicer.script = 4, [], [lambda _: None, lower]
    with Client(address) as client:
        client.model(MODEL)
        assert client.learn(MODEL, TEN, [1] * 10) == 10
    assert servicer.learned == TEN["item"]


def test_a_refusal_says_from_which_sample_the_server_counts(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    refuse = failing(grpc.StatusCode.INVALID_ARGUMENT)

    async def learn() -> int:
        async with AsyncClient(address) as client:
            return await client.learn(MODEL, TEN, [1] * 10)

    servicer.script = [lambda _: None, refuse]
    with pytest.raises(InvalidRequestError, match=r"refused \(in the request that begins at sample 4\)"):
        asyncio.run(learn())
    servicer.script = [lambda _: None, lambda _: None, refuse]
    with Client(address) as client, pytest.raises(InvalidRequestError) as refused:
        client.learn(MODEL, TEN, [1] * 10)
    assert (refused.value.message, refused.value.learned) == (
        "refused (in the request that begins at sample 8)",
        8,
    )


@pytest.mark.parametrize("score", [predict, predict_async])
def test_an_error_of_the_server_is_not_hidden_by_that_of_a_new_description(
    scripted: tuple[Scripted, str], score: Score
) -> None:
    servicer, address = scripted

    def unload() -> None:
        servicer.before_description = failing(grpc.StatusCode.NOT_FOUND)
        servicer.script = [failing(grpc.StatusCode.INVALID_ARGUMENT)]

    with pytest.raises(InvalidRequestError):
        score(address, TEN, unload, {"item": [1]})
    servicer.before_description, described = None, servicer.described
    with pytest.raises(NotFoundError):
        score(address, TEN, unload, {"thing": [1]})
    assert servicer.described == described + 2


def test_a_stream_raises_the_refusal_and_the_next_one_knows_better(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    with Client(address) as client:

        def scores(columns: Columns) -> list[float]:
            (result,) = client.predict_stream(MODEL, [columns])
            return result.scores.tolist()

        assert scores(BOTH) == SCORES
        servicer.feature = "thing"
        with pytest.raises(InvalidRequestError, match="item is unknown"):
            scores(BOTH)
        assert scores(BOTH) == SCORES
        servicer.feature = "item"  # the column is not there, so nothing is sent before the client asks
        assert scores({"item": [1, 3]}) == SCORES
