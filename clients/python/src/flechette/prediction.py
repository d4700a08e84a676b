"""What a request for scores asks for, and what its answers become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from flechette.errors import FlechetteError, InputError
from flechette.samples import encode, expecting, is_frame, requests
from flechette.v1.ctr_pb2 import (
    PRIORITY_HIGH,
    PRIORITY_LOW,
    PRIORITY_NORMAL,
    GetModelResponse,
    PredictRequest,
    PredictResponse,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flechette.samples import Columns

Values = TypeVar("Values")

PriorityName = Literal["high", "normal", "low"]
"""What the server computes first, and refuses last."""

PRIORITIES = {"high": PRIORITY_HIGH, "normal": PRIORITY_NORMAL, "low": PRIORITY_LOW}


@dataclass(frozen=True)
class Prediction(Generic[Values]):
    """Scores of samples: float32, as an array or as a Series with the index of the DataFrame."""

    scores: Values
    logits: Values | None
    """If they were asked for: the logit of each sample. Its score is the sigmoid of its logit."""
    versions: tuple[int, ...]
    """The versions that computed the scores. There are several if the samples took several requests, and the
    server took over a new version meanwhile or shared the requests out among its versions."""
    absent: dict[str, int]
    """For each feature: how many ids were beyond the rows of its table, so that its default was used."""

    @property
    def version(self) -> int:
        """The version that computed all scores."""
        if len(self.versions) != 1:
            raise FlechetteError(f"version: the scores are of versions {self.versions}")
        return self.versions[0]


@dataclass(frozen=True)
class Ask:
    """What is asked for, besides the samples."""

    model: str
    version: int
    label: str
    request_id: str
    priority: PriorityName
    logits: bool

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise InputError(f"priority: expected {', '.join(PRIORITIES)}, got {self.priority!r}")
        if not 0 <= self.version < 2**64:
            raise InputError(f"version: expected 0 to 2^64 - 1, got {self.version}")
        for name in ("model", "label", "request_id"):
            with expecting(name, "text"):
                getattr(self, name).encode()

    def requests(
        self, columns: Columns, model: GetModelResponse, *, timeout_ms: int = 0
    ) -> Iterator[PredictRequest]:
        """Make the requests for all samples."""
        samples = encode(model, columns)

        def make(begin: int, end: int) -> PredictRequest:
            request = PredictRequest(model=self.model, version=self.version, logits=self.logits)
            request.label, request.request_id = self.label, self.request_id
            request.priority, request.timeout_ms = PRIORITIES[self.priority], timeout_ms
            return samples.write(begin, end, request)

        return requests(model, samples.count, make)

    def request(self, columns: Columns, model: GetModelResponse, *, timeout_ms: int) -> PredictRequest:
        """Make the only request for all samples."""
        request, *others = self.requests(columns, model, timeout_ms=timeout_ms)
        if others:
            limits, count = model.limits, request.samples + sum(other.samples for other in others)
            raise InputError(
                f"batch: the server accepts at most {limits.max_samples} samples and {limits.max_bytes} "
                f"bytes, got {count} samples"
            )
        return request


def prediction(responses: Sequence[PredictResponse], columns: Columns) -> Prediction[Any]:
    """Join the responses for samples."""
    absent: dict[str, int] = {}
    for response in responses:
        for ids in response.absent:
            absent[ids.feature] = absent.get(ids.feature, 0) + ids.count

    def joined(parts: list[Sequence[float]]) -> Any:
        values = np.concatenate([np.asarray(part, np.float32) for part in parts])
        if not is_frame(columns):
            return values
        import pandas as pd

        return pd.Series(values, index=columns.index)  # type: ignore[union-attr]

    logits = any(response.logits for response in responses)
    return Prediction(
        scores=joined([response.scores for response in responses]),
        logits=joined([response.logits for response in responses]) if logits else None,
        versions=tuple(dict.fromkeys(response.version for response in responses)),
        absent=absent,
    )
