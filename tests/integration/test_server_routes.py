"""The routes that don't generate: models, health, load, metrics, and what all answers have."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.support.clients import MODEL, ask, make_wav
from tests.support.server import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-shared")


def test_models_are_those_that_are_served(omni_server: ServerProcess) -> None:
    with omni_server.make_client() as client:
        (model,) = client.models.list().data
        assert model.id == MODEL
        assert model.object == "model"
        assert client.models.retrieve(MODEL).id == MODEL
        capabilities = ["chat", "completions", "transcription", "translation", "realtime"]
        assert model.to_dict()["capabilities"] == capabilities
    missing = omni_server.get("/v1/models/another")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    body = {"model": "another", "messages": ask("Hello")}
    refused = omni_server.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


def test_a_model_that_chats_about_audio_transcribes(omni_server: ServerProcess) -> None:
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        response = omni_server.post(path, files={"file": ("sound.wav", make_wav())})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["input_token_details"]["audio_tokens"] > 0


def test_health_version_load_and_metrics_are_served(omni_server: ServerProcess) -> None:
    assert omni_server.get("/health").status_code == 200
    assert omni_server.get("/ping").status_code == omni_server.post("/ping").status_code == 200
    assert omni_server.get("/version").json() == {
        "version": version("sensorium"),
        "kernels": {
            "attention": "torch",
            "cuda_graphs": "none: it needs a CUDA device, not cpu",
            "fused": "nothing: the kernels need a CUDA device, not cpu",
        },
    }
    # Those whom others left behind may still be leaving.
    wait_until(lambda: omni_server.get("/load").json() == {"server_load": 0}, "no request is left")
    metrics = omni_server.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "vllm:num_requests_running" in metrics.text
    paths = omni_server.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= paths.keys()


def test_answers_bear_the_id_of_their_request(omni_server: ServerProcess) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        given = omni_server.get(path, headers={"X-Request-Id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        made = {omni_server.get(path).headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
    body = {"messages": ask("Hello"), "max_tokens": 1, "stream": True}
    streamed = omni_server.post("/v1/chat/completions", body, headers={"X-Request-Id": "mine-2"})
    assert streamed.headers["x-request-id"] == "mine-2"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_unknown_routes_and_methods_are_refused(omni_server: ServerProcess) -> None:
    assert omni_server.get("/nowhere").json()["error"]["code"] == "route_not_found"
    wrong = omni_server.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("level", ["mm", "encoder", "prefix"])
def test_caches_are_reset_on_all_servers(
    omni_server: ServerProcess, shared_server: ServerProcess, level: str
) -> None:
    for server in (omni_server, shared_server):
        assert server.post(f"/reset_{level}_cache").status_code == 200
        assert server.get(f"/reset_{level}_cache").status_code == 405
