"""A new sampling parameter, option, format or route is one declaration.

Each test adds one to a copy of the package, in one place, and asks everything that must follow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
Ask = Callable[[str], Any]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package's code, with what was compiled of it, which saves seconds.

    The weights of the embedded model stay behind.
    """
    copied = tmp_path / "sensorium"
    ignored = shutil.ignore_patterns("*.safetensors*", "media")
    shutil.copytree(ROOT / "src" / "sensorium", copied, ignore=ignored)
    return copied


@pytest.fixture
def ask(package: Path) -> Ask:
    """Return a function that runs a script with the copy, and returns the JSON that it prints."""

    def run(script: str) -> Any:
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        result = subprocess.run(
            [sys.executable, "-B", "-c", script],
            capture_output=True,
            text=True,
            env=environment,
            cwd=package.parent,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    return run


def put_before(path: Path, mark: str, lines: str) -> None:
    """Put lines before the only place in a file that has `mark`."""
    text = path.read_text()
    assert text.count(mark) == 1
    path.write_text(text.replace(mark, lines + mark))


def test_a_sampling_parameter_is_one_declaration(package: Path, ask: Ask) -> None:
    put_before(
        package / "types" / "sampling.py",
        "    temperature: float | None = parameter(",
        '    zest: float = parameter(1.0, "How much zest.", least=0, most=3)\n',
    )
    found = ask("""
import json
from sensorium.cli import _make_parser as make_parser
from sensorium.server.http.openapi import make_document
from sensorium.server.http.routes import ROUTES
from sensorium.types.errors import RequestError
from sensorium.types.sampling import SamplingParams
schemas = make_document(ROUTES, needs_key=False, model_names=())["components"]["schemas"]
names = ("ChatCompletionRequest", "CompletionRequest", "SamplingParams")
fields = {name: schemas[name]["properties"].get("zest") for name in names if name in schemas}
try:
    SamplingParams(zest=4)
except RequestError as error:
    refused = str(error)
given = vars(make_parser().parse_args(["chat", "--zest", "2.5"])).get("zest")
print(json.dumps({"fields": fields, "refused": refused, "given": given}))
""")
    assert found["given"] == 2.5
    assert found["refused"].startswith("zest: must be")
    assert len(found["fields"]) >= 2
    for schema in found["fields"].values():
        assert '"maximum": 3' in json.dumps(schema)


def test_an_option_is_one_declaration(package: Path, ask: Ask) -> None:
    put_before(
        package / "engine" / "build" / "options.py",
        "    max_model_len: int | None = common_option(",
        "    zest: int = option(\n"
        '        7, section="engine", least=1, commands=ENGINES, metavar="N", help="Its zest."\n'
        "    )\n",
    )
    shutil.copytree(ROOT / "scripts", package.parent / "scripts")
    found = ask("""
import inspect, json, sys
sys.path.insert(0, "scripts")
import make_options_doc
from sensorium import LLM
from sensorium.cli import _make_parser as make_parser
from sensorium.engine.build.options import EngineOptions
from sensorium.types.errors import ModelError
try:
    EngineOptions(zest=0)
except ModelError as error:
    refused = str(error)
print(json.dumps({
    "default": inspect.signature(LLM).parameters["zest"].default,
    "refused": refused,
    "given": make_parser().parse_args(["chat", "--zest", "9"]).zest,
    "page": make_options_doc.make_page(),
}))
""")
    assert found["default"] == 7
    assert "zest must be" in found["refused"]
    assert found["given"] == 9
    assert "`--zest" in found["page"]


def test_a_format_of_tool_calls_is_one_file(package: Path, ask: Ask) -> None:
    formats = package / "render" / "answers" / "formats"
    text = (formats / "hermes.py").read_text()
    text = text.replace('tag="hermes"', 'tag="zesty"').replace('name="hermes"', 'name="zesty"')
    (formats / "zesty.py").write_text(text.replace("tool_call>", "zest>"))
    found = ask("""
import json
from sensorium.cli import _make_parser as make_parser
from sensorium.render.answers.formats import CALL_FORMATS, TOOL_CALL_PARSERS
given = make_parser().parse_args(["serve", "--tool-call-parser", "zesty"]).tool_call_parser
(tags,) = (entry.tags for entry in CALL_FORMATS if entry.name == "zesty")
print(json.dumps({"given": given, "names": TOOL_CALL_PARSERS, "tags": tags}))
""")
    assert found == {"given": "zesty", "names": found["names"], "tags": ["<zest>"]}
    assert "zesty" in found["names"]


def test_a_route_is_one_line_and_its_handler(package: Path, ask: Ask) -> None:
    (package / "server" / "http" / "zest.py").write_text("""
from starlette.responses import JSONResponse

async def get_zest(request, context):
    return JSONResponse({"zest": 1})
""")
    routes = package / "server" / "http" / "routes.py"
    put_before(
        routes,
        "    Route(METRICS_PATH, get_metrics),",
        '    Route("/zest", get_zest, "health", "Tell the zest."),\n',
    )
    put_before(
        routes,
        "from sensorium.server.http.welcome import",
        "from sensorium.server.http.zest import get_zest\n",
    )
    found = ask("""
import asyncio, json
from types import SimpleNamespace
from sensorium.server.http.openapi import make_document
from sensorium.server.http.routes import ROUTES, make_routes
document = make_document(ROUTES, needs_key=False, model_names=())
options = SimpleNamespace(is_render_only=False)
(route,) = (r for r in make_routes(SimpleNamespace(options=options)) if r.path == "/zest")
answer = asyncio.run(route.endpoint(None))
print(json.dumps({"summary": document["paths"]["/zest"]["get"]["summary"],
                  "answer": json.loads(answer.body)}))
""")
    assert found == {"summary": "Tell the zest.", "answer": {"zest": 1}}
