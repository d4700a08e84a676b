"""Scores of a real server are those of the Rust client, to the bit, in any form of the data."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import MODEL, Case, Scripted, Server

from flechette import (
    AsyncClient,
    Bags,
    Client,
    DeadlineError,
    FlechetteError,
    InputError,
    InvalidRequestError,
    NotFoundError,
)
from flechette.client import IN_FLIGHT
from flechette.samples import Samples

NOON = pd.Series(pd.to_datetime(["2030-01-01 12:00"] * 50))


def bits(values: object) -> list[int]:
    array = np.asarray(values)
    assert array.dtype == np.float32
    return array.view(np.uint32).tolist()


def test_columns_of_arrays_and_lists_get_the_scores_of_the_rust_client(client: Client, case: Case) -> None:
    result = client.predict(MODEL, case.columns)
    assert isinstance(result.scores, np.ndarray)
    assert bits(result.scores) == bits(case.scores)
    assert (result.version, result.versions, result.absent) == (1, (1,), case.absent)
    assert result.logits is None

    def bags(lists: list[list[int]]) -> Bags:
        return Bags(np.array([one for values in lists for one in values]), np.array(list(map(len, lists))))

    columns = {
        **case.columns,
        "item": np.array(case.columns["item"], np.int32),
        "shop": np.array(case.columns["shop"], object),
        "price": np.array(case.columns["price"], np.float64),
        "seen": bags(case.columns["seen"]),
        "unused": None,
    }
    assert bits(client.predict(MODEL, columns).scores) == bits(case.scores)
    two = client.predict(MODEL, {**columns, "seen": np.tile(np.array([[4, 5]]), (len(case.scores), 1))})
    lists = {**columns, "seen": [[4, 5]] * len(case.scores)}
    assert bits(two.scores) == bits(client.predict(MODEL, lists).scores)


def test_a_frame_gets_a_series_with_its_index(client: Client, case: Case) -> None:
    frame = case.frame()
    scores = client.predict(MODEL, frame).scores
    assert isinstance(scores, pd.Series)
    assert scores.index.equals(frame.index)
    assert bits(scores) == bits(case.scores)
    frame["score"] = scores
    frame["shop"] = frame["shop"].astype("category")
    frame["item"] = frame["item"].astype("Int64")
    assert bits(client.predict(MODEL, frame).scores) == bits(case.scores)


def test_missing_values_of_a_frame_are_zero_the_empty_string_and_the_empty_list(
    client: Client, case: Case
) -> None:
    frame, zero = case.frame(), case.frame()
    for column, value in {"price": 0.0, "shop": ""}.items():
        zero.loc[["row 1", "row 3"], column] = value
    zero["query"] = [[] if i == 5 else words for i, words in enumerate(zero["query"])]
    frame.loc[["row 1", "row 3"], ["price", "shop"]] = None
    frame["query"] = [None if i == 5 else words for i, words in enumerate(frame["query"])]
    assert bits(client.predict(MODEL, frame).scores) == bits(client.predict(MODEL, zero).scores)


def test_logits_are_those_of_the_rust_client(client: Client, case: Case) -> None:
    result = client.predict(MODEL, case.columns, logits=True)
    assert bits(result.logits) == bits(case.logits)
    assert bits(result.scores) == bits(case.scores)


def test_a_label_names_the_version_that_scores(client: Client, case: Case) -> None:
    assert client.predict(MODEL, case.columns, label="stable", request_id="user 7").version == 1
    with pytest.raises(NotFoundError, match='has the labels stable, got "canary"'):
        client.predict(MODEL, case.columns, label="canary")
    with pytest.raises(InvalidRequestError, match="expected a version or a label, got both"):
        client.predict(MODEL, case.columns, version=1, label="stable")


def test_every_request_of_a_call_has_its_label_and_id(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    columns = {"item": [1, 2, 3, 4, 5]}
    with Client(address) as client:
        client.predict("m", columns, label="canary", request_id="user 7")
        list(client.predict_stream("m", [{"item": [1]}], label="canary", request_id="user 7"))

    async def score() -> None:
        async with AsyncClient(address) as client:
            await client.predict("m", columns, label="canary", request_id="user 7")

    asyncio.run(score())
    asked = [(request.label, request.request_id) for request in servicer.requests]
    assert asked == [("canary", "user 7")] * 5


def test_a_large_frame_is_split_by_samples_and_by_bytes(case: Case) -> None:
    times = 40
    with (
        Server(case.models, server_max_samples="512", server_max_bytes="4096") as server,
        Client(server.address) as client,
    ):
        assert client.model(MODEL).limits.max_samples == 512
        frame = case.frame(times)
        result = client.predict(MODEL, frame, logits=True)
        assert result.scores.index.equals(frame.index)
        assert bits(result.scores) == bits(np.tile(case.scores, times))
        assert bits(result.logits) == bits(np.tile(case.logits, times))
        assert result.absent == {name: times * count for name, count in case.absent.items()}
        with pytest.raises(InputError, match=r"batch: the server accepts at most 512 samples and 4096 b"):
            next(client.predict_stream(MODEL, [frame]))
        long = {**case.columns, "shop": ["x" * 5000] * len(case.scores)}
        with pytest.raises(InputError, match=r"sample 0: the server accepts at most 4096 bytes, got 5"):
            client.predict(MODEL, long)


def test_errors_of_the_server_have_their_classes(client: Client, case: Case) -> None:
    with pytest.raises(NotFoundError, match="serves version 1, got 9"):
        client.predict(MODEL, case.columns, version=9)
    with pytest.raises(NotFoundError, match='no model "nobody" is served here'):
        client.predict("nobody", case.columns)
    with pytest.raises(InvalidRequestError, match='feature "item"'):
        client.predict(MODEL, {**case.columns, "item": ["a"] * len(case.scores)})
    with pytest.raises(DeadlineError):
        client.predict(MODEL, case.columns, timeout=1e-9)
    with pytest.raises(FlechetteError, match="timeout: expected more than 0 seconds, got 0"):
        client.predict(MODEL, case.columns, timeout=0)
    assert client.predict(MODEL, case.columns, version=1, priority="high").version == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": ...}, "columns: 'item': missing"),
        ({"item": [1]}, "column 'item': expected 50 samples like 'price', got 1"),
        ({"item": np.array([1.5] * 50)}, "column 'item': expected integers or strings, got float64"),
        ({"item": [1.5] * 50}, "column 'item', value 0: expected integers only or strings only, got 1.5"),
        ({"item": [True, False] * 25}, "column 'item', value 0: expected integers only or .*, got True"),
        ({"item": [1, True] * 25}, "column 'item', value 1: expected an id of at least 0, got True"),
        ({"item": np.array([True] * 50)}, "column 'item': expected integers or strings, got bool"),
        ({"item": np.zeros(50, "M8[ns]")}, "column 'item': expected integers or strings, got datetime64"),
        ({"item": [-1] * 50}, "column 'item', value 0: expected an id of at least 0, got -1"),
        ({"item": [1, "a"] * 25}, "column 'item', value 1: expected an id of at least 0, got 'a'"),
        ({"item": np.array([1, "a"] * 25, object)}, "column 'item', value 1: expected an id of at least 0"),
        ({"item": [[1], [2]] * 25}, r"column 'item': expected one value for each sample, got shape \(50, 1"),
        ({"item": [[1], [2, 3]] * 25}, r"column 'item', value 0: expected integers only or .*, got \[1\]"),
        ({"shop": ["a", 1] * 25}, "column 'shop', value 1: expected integers only or strings only, got 1"),
        ({"shop": ["a", 1.5] * 25}, "column 'shop', value 1: expected integers only or .*, got 1.5"),
        ({"shop": ["\ud800"] * 50}, "column 'shop': expected integers or strings: .*surrogates"),
        ({"shop": np.array(["a", 1] * 25, object)}, "column 'shop', value 1: expected integers only or str"),
        ({"price": np.zeros(50, "M8[ns]")}, "column 'price': expected numbers, got datetime64"),
        ({"price": [np.timedelta64(1, "s")] * 50}, "column 'price': expected numbers, got timedelta64"),
        ({"price": [1j] * 50}, "column 'price': expected numbers, got complex128"),
        ({"price": NOON}, "column 'price': expected numbers, got datetime64"),
        ({"price": NOON.dt.tz_localize("UTC")}, "column 'price': expected numbers, got datetime64"),
        ({"price": NOON.astype("category")}, "column 'price': expected numbers, got datetime64"),
        ({"price": ["x"] * 50}, "column 'price': expected numbers: could not convert string to float: .*'x'"),
        (
            {"price": np.zeros((50, 2))},
            r"column 'price': expected one number for each sample, got shape \(50, 2",
        ),
        ({"seen": None}, "column 'seen': expected lists of integers or strings: 'NoneType' object"),
        ({"seen": [[True]] * 50}, "column 'seen', value 0: expected integers only or strings only, got True"),
        ({"seen": Bags([1, True], [1, 1])}, "column 'seen', value 1: expected an id of at least 0, got True"),
        ({"seen": Bags([1], [1.5])}, "column 'seen': expected integers as lengths, got float64"),
        ({"seen": [1] * 50}, "column 'seen', sample 0: expected a list of values, got 1"),
        ({"seen": Bags([1, 2], [1] * 50)}, "column 'seen': expected 50 values by lengths, got 2"),
        ({"seen": Bags([1], [2, -1])}, "column 'seen': expected lengths of at least 0, got -1"),
        (
            {"price": [float("nan")] * 50},
            'dense feature "price", sample 0: expected a finite number, got NaN',
        ),
        ({"seen": [[1] * 9] * 50}, 'feature "seen", sample 0: expected at most 4 ids, got 9'),
    ],
)
def test_a_wrong_column_is_named(client: Client, case: Case, change: dict[str, object], message: str) -> None:
    columns = {**case.columns, **change}
    columns = {name: column for name, column in columns.items() if column is not ...}
    with pytest.raises(InputError, match=message):
        client.predict(MODEL, columns)


def test_strings_are_sent_as_they_are(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    columns = [[b"ab\0\0", b"c"], ["ab\0\0", "c"], ("ab\0\0", b"c"), pd.Series(["ab\0\0", "c"])]
    with Client(address) as client:
        for column in columns:
            client.predict("m", {"item": column})
        client.predict("m", {"item": ["a", None, float("nan")]})
        client.predict("m", {"item": [2**64 - 1, 1]})
    *whole, missing, ids = (request.features[0] for request in servicer.requests)
    assert [list(feature.strings) for feature in whole] == [[b"ab\0\0", b"c"]] * 4
    assert list(missing.strings) == [b"a", b"", b""]
    assert list(ids.ids) == [2**64 - 1, 1]


def test_missing_strings_are_empty_in_a_column_without_any(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    types = ["object", "float64", "Int64", "string", "category", pd.CategoricalDtype([1, 2])]
    columns = [pd.Series([None, None], dtype=kind) for kind in types]
    with Client(address) as client:
        for column in columns:
            client.predict("m", {"item": column})
        client.predict("m", {"item": [None, None]})
    sent = [list(request.features[0].strings) for request in servicer.requests]
    assert sent == [[b"", b""]] * 7
    servicer.takes_strings = False
    with Client(address) as client:
        for column in columns:
            with pytest.raises(InputError, match="column 'item', value 0: expected an id of at least 0, got"):
                client.predict("m", {"item": column})


@pytest.mark.parametrize("kind", ["float64", "Int64", "category"])
def test_missing_integers_are_named_and_may_be_sent_as_text(
    scripted: tuple[Scripted, str], kind: str
) -> None:
    servicer, address = scripted
    column = pd.Series([1005, None], dtype=kind)
    with Client(address) as client:
        with pytest.raises(InputError, match=r"got float64 \(pandas has integers .* text with dtype=str\)"):
            client.predict("m", {"item": column})
        with pytest.raises(InputError, match="'item', value 0: expected an id of at least 0, got None"):
            client.predict("m", {"item": [None, 1005]})
        client.predict("m", {"item": column.astype("Int64").astype("string")})
    assert [list(request.features[0].strings) for request in servicer.requests] == [[b"1005", b""]]


def test_all_chunks_of_a_file_are_text_if_it_is_read_as_text(scripted: tuple[Scripted, str]) -> None:
    servicer, address = scripted
    servicer.dense = ["price"]
    file = io.StringIO("item,price\n1005,1\n,2\n,\n,3\nNA,4\n7,5\n")
    chunks = pd.read_csv(file, chunksize=2, dtype={"item": str}, keep_default_na=False, na_values=[""])
    with Client(address) as client:
        assert len(list(client.predict_stream("m", chunks))) == 3
    sent = [(list(request.features[0].strings), list(request.dense)) for request in servicer.requests]
    assert sent == [([b"1005", b""], [1, 2]), ([b"", b""], [0, 3]), ([b"NA", b"7"], [4, 5])]


def predict_hundred(address: str) -> None:
    with Client(address) as client:
        assert len(client.predict("m", {"item": np.arange(100)}).scores) == 100


def predict_hundred_async(address: str) -> None:
    async def score() -> None:
        async with AsyncClient(address) as client:
            assert len((await client.predict("m", {"item": np.arange(100)})).scores) == 100

    asyncio.run(score())


@pytest.mark.parametrize("score", [predict_hundred, predict_hundred_async])
def test_requests_are_made_when_others_have_been_answered(
    scripted: tuple[Scripted, str], score: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = scripted
    made, ahead, write = 0, [], Samples.write

    def counted(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        return write(*arguments)

    monkeypatch.setattr(Samples, "write", counted)
    servicer.script = [lambda _: ahead.append(made - servicer.calls)] * 25
    score(address)
    assert made == servicer.calls == 25
    assert max(ahead) <= IN_FLIGHT + 1


def test_the_async_client_gets_the_same_scores(server: Server, case: Case) -> None:
    async def score() -> None:
        async with AsyncClient(server.address) as client:
            assert (await client.model(MODEL)).version == 1
            results = await asyncio.gather(
                *(client.predict(MODEL, case.frame(), logits=True) for _ in range(20))
            )
            for result in results:
                assert bits(result.scores) == bits(case.scores)
                assert bits(result.logits) == bits(case.logits)
            large = await client.predict(MODEL, case.frame(200))
            assert bits(large.scores) == bits(np.tile(case.scores, 200))
            with pytest.raises(NotFoundError):
                await client.predict("nobody", case.columns)
            with pytest.raises(DeadlineError):
                await client.predict(MODEL, case.columns, timeout=1e-9)

    asyncio.run(score())


def test_learned_samples_are_durable_and_the_labels_may_be_a_column(case: Case) -> None:
    frame = case.frame(100)
    frame["click"] = [i % 2 for i in range(len(frame))]
    with Server(case.models, learn_enabled="on") as server, Client(server.address) as client:
        assert client.learn(MODEL, frame, "click") == 5000
        assert client.learn(MODEL, case.columns, np.zeros(50)) == 50
        with pytest.raises(InputError, match="labels: expected 50 numbers, one for each sample"):
            client.learn(MODEL, case.columns, [1])
        with pytest.raises(InvalidRequestError, match="labels: sample 0") as refused:
            client.learn(MODEL, case.columns, [2] * 50)
        assert refused.value.learned == 0

        async def learn() -> int:
            async with AsyncClient(server.address) as client:
                return await client.learn(MODEL, frame, "click")

        assert asyncio.run(learn()) == 5000
