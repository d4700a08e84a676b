"""Client of Flechette, a server of click-through-rate models."""

from flechette.aio import AsyncClient
from flechette.calls import Retries
from flechette.client import Client
from flechette.errors import (
    AccessError,
    DeadlineError,
    FlechetteError,
    InputError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    OverloadedError,
    ServerError,
    UnavailableError,
)
from flechette.prediction import Prediction
from flechette.samples import Bags

__all__ = [
    "AccessError",
    "AsyncClient",
    "Bags",
    "Client",
    "DeadlineError",
    "FlechetteError",
    "InputError",
    "InvalidRequestError",
    "LimitError",
    "NotFoundError",
    "OverloadedError",
    "Prediction",
    "Retries",
    "ServerError",
    "UnavailableError",
]
