"""The client libraries that people use get an answer, an object and a call from the default server.

What the small model says may be silly. That it ends, and is valid, may not depend on luck: the
schema has strings and a list without a limit of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_gets_a_valid_result(server: ServerProcess, client: str, case: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    finished = subprocess.run(
        [str(PYTHON), str(PROGRAM), server.get_url("/v1"), client, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = json.loads(finished.stdout.splitlines()[-1])
    if case == "text":
        assert result
    else:
        assert set(result) == {"text", "score", "tags"}
        assert all(len(text) <= 32 for text in (result["text"], *result["tags"]))
