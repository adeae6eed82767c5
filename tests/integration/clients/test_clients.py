"""The client libraries that people use get an answer, an object and a call from the default server.

What the small model says may be silly. That it ends, and is valid, may not depend on luck: the
schema has strings and a list without a limit of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.server import ROOT, ServerProcess

pytestmark = pytest.mark.xdist_group("mini")

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PROGRAM = Path(__file__).with_name("program.py")
CLIENTS = ("openai", "langchain", "instructor", "pydantic-ai")
CASES = ("text", "schema", "tool")
_TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> ServerProcess:
    if not PYTHON.exists():
        pytest.skip("the clients are not installed: `make test` does it (.venv-clients)")
    server: ServerProcess = request.getfixturevalue("mini_server")
    return server


@pytest.fixture(scope="module")
def ask_all(server: ServerProcess) -> Callable[[str], list[str]]:
    """Return a function that gives what a client prints for each case.

    One process asks for all cases, because most of its time goes into importing the library.
    """

    @cache
    def run(client: str) -> list[str]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        finished = subprocess.run(
            [str(PYTHON), str(PROGRAM), server.get_url("/v1"), client, *CASES],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]
        return finished.stdout.splitlines()[-len(CASES) :]

    return run


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "client",
    # Each takes seconds to import its library. The first one stands for the others in every run.
    [CLIENTS[0], *(pytest.param(client, marks=pytest.mark.slow) for client in CLIENTS[1:])],
)
def test_a_client_gets_a_valid_result(
    ask_all: Callable[[str], list[str]], client: str, case: str
) -> None:
    answer = json.loads(ask_all(client)[CASES.index(case)])
    assert "result" in answer, answer["fault"]
    result = answer["result"]
    if case == "text":
        assert result
    else:
        assert set(result) == {"text", "score", "tags"}
        assert all(len(text) <= 32 for text in (result["text"], *result["tags"]))
