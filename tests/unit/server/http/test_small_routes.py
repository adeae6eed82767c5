"""Models, health, administration and the document of it all."""

from __future__ import annotations

import re

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openai import OpenAI
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from sensorium.types.errors import CapacityError
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, serve


def test_models_are_listed_under_all_their_names(server: RunningServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        models = client.models.list().data
        assert [model.id for model in models] == ["tiny", "org/tiny"]
        assert client.models.retrieve("org/tiny").id == "org/tiny"
    card = server.get("/v1/models").json()["data"][0]
    assert card["max_model_len"] == 64
    assert (card["modalities"], card["switched_off"]) == (["text", "image"], {})
    assert card["only_one"] == {}
    assert card["capabilities"] == ["chat", "completions"]
    assert server.get("/v1/models/gpt").status_code == 404


def test_health_is_that_of_the_engine() -> None:
    engine = ScriptedEngine()
    with serve(engine) as running, running.client() as client:
        assert client.get("/health").status_code == 200
        engine.is_connected, engine.info = False, None
        response = client.get("/health")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert client.get("/ping").status_code == client.post("/ping").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_an_engine_that_makes_no_progress_is_not_healthy() -> None:
    engine = ScriptedEngine(is_stalled=True)
    with serve(engine) as running, running.client() as client:
        response = client.get("/health")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "engine_stalled"
        engine.is_stalled = False
        assert client.get("/health").status_code == 200


def test_the_version_is_that_of_the_package(server: RunningServer) -> None:
    from importlib.metadata import version

    answer = server.get("/version").json()
    assert answer == {"version": version("sensorium"), "kernels": {"fused": "nothing"}}


def test_every_cache_can_be_reset() -> None:
    engine = ScriptedEngine()
    with serve(engine) as running, running.client() as client:
        for level in ("mm", "encoder", "prefix"):
            response = client.post(f"/reset_{level}_cache")
            assert (response.status_code, response.json()) == (200, {})
        assert engine.resets == ["mm", "encoder", "prefix"]
        engine.reset_error = CapacityError("the engine is not there")
        assert client.post("/reset_mm_cache").status_code == 503


def test_responses_are_counted_by_their_route() -> None:
    with serve() as running, running.client() as client:
        client.get("/v1/models/org/tiny")
        client.get("/v1/models/other")
        client.get("/somewhere/else")
        client.request("MKCOL", "/ping")
        running.chat(stream=True)
        running.chat(n=0)
        assert running.metrics.responses == {
            ("/v1/models/{model:path}", "GET", 200): 1,
            ("/v1/models/{model:path}", "GET", 404): 1,
            ("none", "GET", 404): 1,
            ("/ping", "other", 405): 1,
            ("/v1/chat/completions", "POST", 200): 1,
            ("/v1/chat/completions", "POST", 400): 1,
        }


def test_the_lag_of_the_event_loop_is_measured() -> None:
    with serve() as running:
        wait_until(lambda: running.metrics.num_lags > 2, "nothing is measured")


def test_the_documentation_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    page = server.get("/docs")
    assert "openapi.json" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        assert "//" not in path
        assert server.get(f"/{path}").status_code == 200
    for path in ("/docs", "/docs/docs.js", "/docs/docs.css"):
        assert not re.search(r"https?://|@import", server.get(path).text)
    assert server.get("/redoc", follow_redirects=True).text == page.text


def test_every_schema_of_the_document_is_one(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/ChatCompletionRequest")
    messages = schemas["ChatCompletionRequest"]["properties"]["messages"]
    assert messages["items"] == {"$ref": "#/components/schemas/ChatMessage"}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(
    ("path", "method", "num_cases"),
    [
        ("/v1/chat/completions", "POST", 25),
        ("/v1/completions", "POST", 25),
    ],
)
def test_requests_made_from_the_document_get_documented_answers(
    server: RunningServer, path: str, method: str, num_cases: int, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=120)
    statuses: set[int] = set()

    operation = schema[path][method]
    strategy = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=min(num_cases, settings().max_examples),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        statuses.add(response.status_code)
        case.validate_response(
            response,
            checks=(
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ),
        )

    check()
    assert 200 in statuses or mode is GenerationMode.NEGATIVE
    assert 400 in statuses or mode is GenerationMode.POSITIVE
