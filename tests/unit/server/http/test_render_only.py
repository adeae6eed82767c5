"""A server without an engine says so where one would be needed, and nowhere else."""

from __future__ import annotations

import pytest

from sensorium.server.http.routes import ROUTES
from tests.unit.server.standing_in import ScriptedEngine, serve

GENERATING_PATHS = [route.path for route in ROUTES if route.needs_engine and route.is_counted]
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("path", GENERATING_PATHS)
def test_a_route_that_generates_is_refused_with_the_reason(path: str) -> None:
    engine = ScriptedEngine()
    with serve(engine, is_render_only=True) as running, running.client() as client:
        response = client.post(path, content=b"not even JSON", headers=JSON)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "render_only")
        assert error["message"].startswith(f"{path}: this server only renders")
        assert running.metrics.refusals == {"not_found": 1}
    assert engine.calls == []


def test_other_routes_are_as_they_were() -> None:
    with serve(is_render_only=True) as running, running.client() as client:
        for path in ("/health", "/ping", "/version", "/load", "/metrics", "/v1/models"):
            assert client.get(path).status_code == 200, path
        assert client.post("/reset_mm_cache").status_code == 200
        for level in ("encoder", "prefix"):
            assert client.post(f"/reset_{level}_cache").status_code == 404
        assert running.engine.resets == ["mm"]
        assert not set(GENERATING_PATHS) & client.get("/openapi.json").json()["paths"].keys()


def test_a_server_with_an_engine_refuses_none_of_it() -> None:
    with serve() as running:
        assert running.chat().status_code == running.complete().status_code == 200
