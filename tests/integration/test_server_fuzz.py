"""Requests made from the server's own OpenAPI document are answered as the document says.

They leave nothing behind, whatever they are. Seeds are fixed. The share of requests that are served
shows that the document describes what is taken, and not only what is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.server import POOL, ServerProcess, serve
from tests.support.waiting import wait_until

# In short: tests/unit/server/http/test_small_routes.py.
pytestmark = [pytest.mark.xdist_group("server-fuzz"), pytest.mark.slow]
_FLAGS = ("--max-model-len", "48", "--served-model-name", "tiny", "--no-access-log")
_CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
_QUIET_PATHS = (
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/tokenize",
    "/detokenize",
    "/inference/v1/generate",
)
# Of what the document allows, and of what it forbids. Routes without parameters have one case.
_NUM_CASES = {
    ("/v1/chat/completions", GenerationMode.POSITIVE): 150,
    ("/v1/chat/completions", GenerationMode.NEGATIVE): 100,
    ("/v1/completions", GenerationMode.POSITIVE): 250,
    ("/v1/completions", GenerationMode.NEGATIVE): 500,
    ("/v1/models/{model}", GenerationMode.POSITIVE): 20,
    **{
        (path, mode): 10
        for path in _QUIET_PATHS
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    },
}
_MIN_CASES = 1_000
_MIN_SERVED_SHARE = 0.05
_NUM_CLIENTS = 4
_REQUEST_S = 60.0  # against hangs
Statuses = Counter[tuple[str, GenerationMode, int]]


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], str]) -> Iterator[ServerProcess]:
    with serve(tiny_model("qwen2_5_vl"), *_FLAGS, *POOL) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.get_url(), timeout=_REQUEST_S) as client:
        yield client


def test_requests_made_from_the_document_are_answered_as_it_says(
    server: ServerProcess, client: httpx.Client
) -> None:
    schema = schemathesis.openapi.from_url(server.get_url("/openapi.json"), timeout=_REQUEST_S)
    statuses: Statuses = Counter()
    with ThreadPoolExecutor(_NUM_CLIENTS) as threads:
        for result in schema.get_all_operations():
            operation = result.ok()
            _fuzz(operation, GenerationMode.POSITIVE, threads, statuses)
            if operation.body:
                _fuzz(operation, GenerationMode.NEGATIVE, threads, statuses)
    assert statuses.total() >= _MIN_CASES
    for path in ("/v1/chat/completions", "/v1/completions"):
        cases = {
            key[2]: count
            for key, count in statuses.items()
            if key[:2] == (path, GenerationMode.POSITIVE)
        }
        assert cases[200] >= _MIN_SERVED_SHARE * sum(cases.values()), f"{path}: {cases}"
    assert client.get("/health").status_code == 200
    gauges = (
        "sensorium:http_requests_in_flight",
        "sensorium:num_requests_preparing",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    )
    wait_until(
        lambda: not any(map(server.get_metrics().__getitem__, gauges)), "nothing is left of them"
    )
    assert "Traceback" not in server.output


def _fuzz(
    operation: APIOperation,
    mode: GenerationMode,
    threads: ThreadPoolExecutor,
    statuses: Statuses,
) -> None:
    """Cases are made here and tried by several clients at once."""
    answers: list[Future[int]] = []

    @seed(5)
    @settings(
        max_examples=_NUM_CASES.get((operation.path, mode), 1),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_case(case: Case) -> None:
        answers.append(threads.submit(_try_case, case))

    try_case()
    for answer in answers:
        statuses[operation.path, mode, answer.result()] += 1


def _try_case(case: Case) -> int:
    response = case.call(timeout=_REQUEST_S)
    case.validate_response(response, checks=_CHECKS)
    return response.status_code
