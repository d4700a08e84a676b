"""Samples of a model, from the columns of a DataFrame or a dictionary to those of request messages."""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from flechette.errors import InputError
from flechette.v1.ctr_pb2 import (
    CategoricalInput,
    FeatureColumn,
    GetModelResponse,
    LearnRequest,
    PredictRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pandas as pd
    from numpy.typing import NDArray

    Columns: TypeAlias = Mapping[str, Any] | pd.DataFrame
    """Samples: for each input of the model a column of this name. Other columns are ignored."""

    Request = TypeVar("Request", PredictRequest, LearnRequest)

MAX_ID = 2**64 - 1

_INTEGERS = (int, np.integer)

_FLOATS = " (pandas has integers as floats if some are missing: read text with dtype=str)"


@dataclass(frozen=True)
class Bags:
    """A multi-hot column without Python lists: all values, and how many of them each sample has."""

    values: Any
    lengths: Any


@dataclass(frozen=True)
class Feature:
    """The values of a categorical feature for all samples."""

    name: str
    values: NDArray[np.uint64] | list[bytes]
    offsets: NDArray[np.int64] | None
    """Where the values of each sample begin and end; `None` if each has exactly one."""

    def message(self, begin: int, end: int) -> FeatureColumn:
        """Make the column of some samples."""
        column = FeatureColumn(name=self.name)
        if self.offsets is not None:
            column.lengths.extend(np.diff(self.offsets[begin : end + 1]).tolist())
            begin, end = int(self.offsets[begin]), int(self.offsets[end])
        if isinstance(self.values, list):
            column.strings.extend(self.values[begin:end])
        else:
            column.ids.extend(self.values[begin:end].tolist())
        return column


@dataclass(frozen=True)
class Samples:
    """Samples in the form of request messages."""

    count: int
    dense: NDArray[np.float32]
    dense_order: int
    features: list[Feature]

    def write(self, begin: int, end: int, request: Request) -> Request:
        """Write some samples to a request."""
        request.samples, request.dense_order = end - begin, self.dense_order
        request.dense.extend(self.dense[begin:end].ravel().tolist())
        request.features.extend(feature.message(begin, end) for feature in self.features)
        return request


def requests(
    model: GetModelResponse, count: int, make: Callable[[int, int], Request], begin: int = 0
) -> Iterator[Request]:
    """Yield the requests for the samples from `begin` on, within the limits of the server."""
    most = max(model.limits.max_samples, 1)
    while begin < count:
        end = min(begin + most, count)
        request = make(begin, end)
        if request.ByteSize() > model.limits.max_bytes:
            if end - begin == 1:
                limit, got = model.limits.max_bytes, request.ByteSize()
                raise InputError(f"sample {begin}: the server accepts at most {limit} bytes, got {got}")
            most = (end - begin) // 2
            continue
        yield request
        begin = end


def encode(model: GetModelResponse, columns: Columns) -> Samples:
    """Take the inputs of a model from columns.

    A missing number of a DataFrame is 0, and a missing string is the empty string, as in training data. A
    missing id is an error.
    """
    names = [*(dense.name for dense in model.dense), *(feature.name for feature in model.features)]
    missing = [name for name in names if name not in columns]
    if missing:
        raise InputError(f"columns: {', '.join(map(repr, missing))}: missing")
    dense = [_dense(name.name, columns[name.name]) for name in model.dense]
    features = [_feature(feature, columns[feature.name]) for feature in model.features]
    sizes = {name.name: len(values) for name, values in zip(model.dense, dense, strict=True)}
    for encoded in features:
        sizes[encoded.name] = len(encoded.values if encoded.offsets is None else encoded.offsets[1:])
    count = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != count:
            raise InputError(
                f"column {name!r}: expected {count} samples like {next(iter(sizes))!r}, got {size}"
            )
    if count == 0:
        raise InputError("columns: expected at least 1 sample, got 0")
    matrix = np.stack(dense, axis=1) if dense else np.empty((count, 0), np.float32)
    return Samples(count, matrix, model.dense_order, features)


@contextmanager
def expecting(name: str, kind: str) -> Iterator[None]:
    """Name a column or an argument, and what it must be, if Python or numpy cannot convert it."""
    try:
        yield
    except InputError:
        raise
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{name}: expected {kind}: {error}") from error


def is_frame(columns: object) -> bool:
    """Whether this is a DataFrame. Does not import pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(columns, pandas.DataFrame)


def _is_series(column: object) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(column, pandas.Series)


def numbers(name: str, column: Any) -> NDArray[np.float32]:
    """Take numbers. A missing number of a Series is NaN."""
    with expecting(name, "numbers"):
        _unmasked(name, column)
        given = column if _is_series(column) else np.asarray(column)
        dtype = getattr(given.dtype, "categories", given).dtype
        # The numbers of dates and durations depend on their unit, and complex numbers lose a part.
        if dtype.kind in "Mmc":
            raise InputError(f"{name}: expected numbers, got {dtype}")
        if _is_series(column):
            return column.to_numpy(np.float32, na_value=np.nan)  # type: ignore[no-any-return]
        return given.astype(np.float32, copy=False)


def _dense(name: str, column: Any) -> NDArray[np.float32]:
    values = numbers(f"column {name!r}", column)
    if values.ndim != 1:
        raise InputError(f"column {name!r}: expected one number for each sample, got shape {values.shape}")
    return np.where(np.isnan(values), np.float32(0), values) if _is_series(column) else values


def _feature(feature: CategoricalInput, column: Any) -> Feature:
    name = feature.name
    if not feature.one_hot:
        with expecting(f"column {name!r}", "lists of integers or strings"):
            return _multi_hot(feature, column)
    if isinstance(column, Bags):
        raise InputError(f"column {name!r}: expected one value for each sample, got Bags")
    with expecting(f"column {name!r}", "integers or strings"):
        _unmasked(f"column {name!r}", column)
        return Feature(name, _values(feature, _array(column)), None)


def _multi_hot(feature: CategoricalInput, column: Any) -> Feature:
    name = feature.name
    _unmasked(f"column {name!r}", column.values if isinstance(column, Bags) else column)
    if isinstance(column, Bags):
        given, values = np.asarray(column.lengths), _array(column.values)
        lengths = given.astype(np.int64)
        if not np.array_equal(lengths, given):
            raise InputError(f"column {name!r}: expected integers as lengths, got {given.dtype}")
        if lengths.size and lengths.min() < 0:
            raise InputError(f"column {name!r}: expected lengths of at least 0, got {lengths.min()}")
        if lengths.sum() != len(values):
            raise InputError(
                f"column {name!r}: expected {lengths.sum()} values by lengths, got {len(values)}"
            )
    elif isinstance(column, np.ndarray) and column.ndim == 2:
        lengths, values = np.full(len(column), column.shape[1], np.int64), column.reshape(-1)
    else:
        lists = [_list(name, sample, values) for sample, values in enumerate(column)]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        values = np.fromiter(chain.from_iterable(lists), object, int(lengths.sum()))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return Feature(name, _values(feature, values), offsets)


def _list(name: str, sample: int, values: Any) -> Sequence[Any]:
    if isinstance(values, np.ndarray):
        return values.tolist()  # type: ignore[no-any-return]
    if isinstance(values, list | tuple):
        return values
    if _is_missing(values):
        return ()
    raise InputError(f"column {name!r}, sample {sample}: expected a list of values, got {values!r}")


def _is_missing(value: object) -> bool:
    pandas = sys.modules.get("pandas")
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or (pandas is not None and value is pandas.NA)


def _array(column: Any) -> NDArray[Any]:
    """Make an array of a column whose items are as they were.

    By itself numpy makes strings of a list with both strings and numbers, and cuts NULs off their ends.
    """
    return np.asarray(column, None if hasattr(column, "dtype") else object)


def _unmasked(name: str, column: Any) -> None:
    if isinstance(column, np.ma.MaskedArray):
        raise InputError(f"{name}: expected an array without a mask, such as its filled()")


def _values(feature: CategoricalInput, values: NDArray[Any]) -> NDArray[np.uint64] | list[bytes]:
    """Take integers as ids, and anything else as strings."""
    name, kind = feature.name, values.dtype.kind
    if values.ndim != 1:
        raise InputError(f"column {name!r}: expected one value for each sample, got shape {values.shape}")
    if kind == "u" or values.size == 0:
        return values.astype(np.uint64)
    if kind == "i":
        return _ids(name, values)
    # pandas has a column without any value as floats.
    empty = kind == "f" and np.isnan(values).all()
    if kind not in "OSTU" and not empty:  # objects, and the kinds of strings
        hint = _FLOATS if kind == "f" else ""
        raise InputError(f"column {name!r}: expected integers or strings, got {values.dtype}{hint}")
    items = values.tolist()
    first = next((item for item in items if not _is_missing(item)), None)
    if _is_integer(first) or (first is None and not feature.takes_strings):
        return _ids(name, values.astype(object))
    return [_string(name, sample, item) for sample, item in enumerate(items)]


def _is_integer(item: object) -> bool:
    return isinstance(item, _INTEGERS) and not isinstance(item, bool)


def _ids(name: str, values: NDArray[Any]) -> NDArray[np.uint64]:
    if values.dtype.kind == "O":
        for at, item in enumerate(values.tolist()):
            if not _is_integer(item) or not 0 <= item <= MAX_ID:
                raise InputError(f"column {name!r}, value {at}: expected an id of at least 0, got {item!r}")
    elif values.min() < 0:
        at = int(values.argmin())
        raise InputError(f"column {name!r}, value {at}: expected an id of at least 0, got {values[at]}")
    return values.astype(np.uint64)


def _string(name: str, at: int, item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, bytes):
        return item
    if _is_missing(item):
        return b""
    raise InputError(f"column {name!r}, value {at}: expected integers only or strings only, got {item!r}")
