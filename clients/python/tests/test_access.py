"""TLS and tokens of a real server."""

import asyncio
from pathlib import Path

import grpc
import pytest
import trustme
from conftest import MODEL, Case, Server

from flechette import AccessError, AsyncClient, Client

TOKEN = "predict-0123456789abcdef"
OF_METRICS = "metrics-0123456789abcdef"
REFUSED = {
    None: grpc.StatusCode.UNAUTHENTICATED,
    "unknown-0123456789abcdef": grpc.StatusCode.UNAUTHENTICATED,
    OF_METRICS: grpc.StatusCode.PERMISSION_DENIED,
}


def test_a_server_with_tls_scores_only_with_a_token_of_the_role(case: Case, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    files = {
        "tls_certificate": issued.cert_chain_pems[0].bytes(),
        "tls_key": issued.private_key_pem.bytes(),
        "auth_predict": TOKEN.encode(),
        "auth_metrics": OF_METRICS.encode(),
    }
    for name, contents in files.items():
        (tmp_path / name).write_bytes(contents)
    roots, scores = authority.cert_pem.bytes(), case.scores.tobytes()
    with Server(case.models, **{name: str(tmp_path / name) for name in files}) as server:
        address = server.address.replace("127.0.0.1", "localhost")
        with Client(address, root_certificates=roots, token=TOKEN) as client:
            assert client.predict(MODEL, case.columns).scores.tobytes() == scores
            results = client.predict_stream(MODEL, [case.columns] * 2)
            assert [result.scores.tobytes() for result in results] == [scores] * 2
        for token, code in REFUSED.items():
            with Client(address, root_certificates=roots, token=token) as client:
                with pytest.raises(AccessError, match=r"auth\.predict") as refused:
                    client.predict(MODEL, case.columns)
                assert refused.value.code is code
                with pytest.raises(AccessError):
                    next(client.predict_stream(MODEL, [case.columns]))

        async def score(token: str | None) -> bytes:
            async with AsyncClient(address, root_certificates=roots, token=token) as client:
                result = await client.predict(MODEL, case.columns)
                return result.scores.tobytes()

        assert asyncio.run(score(TOKEN)) == scores
        with pytest.raises(AccessError):
            asyncio.run(score(None))
