"""A new sampling parameter, option, format or route is one declaration.

A copy of the package gets one of each, in one place, and is asked for everything that must follow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("one-place")
ROOT = Path(__file__).parent.parent.parent


# One process asks for everything, because most of its time goes into loading libraries.
QUESTIONS = """
import asyncio, inspect, json, sys
from types import SimpleNamespace
sys.path.insert(0, "scripts")
import make_options_doc
from sensorium import LLM
from sensorium.cli import _make_parser as make_parser
from sensorium.engine.assembly.options import EngineOptions
from sensorium.render.answers.formats import CALL_FORMATS, TOOL_CALL_PARSERS
from sensorium.server.http.openapi import make_document
from sensorium.server.http.routes import ROUTES, make_routes
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.sampling import SamplingParams

def get_refusal(make, **values):
    try:
        make(**values)
    except (ModelError, RequestError) as error:
        return str(error)

document = make_document(ROUTES, needs_key=False, model_names=())
schemas = document["components"]["schemas"]
names = ("ChatCompletionRequest", "CompletionRequest", "SamplingParams")
given = make_parser().parse_args(["chat", "--zest", "2.5", "--flavour", "9"])
served = make_parser().parse_args(["serve", "--tool-call-parser", "zesty"])
(tags,) = (entry.tags for entry in CALL_FORMATS if entry.name == "zesty")
context = SimpleNamespace(options=SimpleNamespace(is_render_only=False))
(route,) = (route for route in make_routes(context) if route.path == "/zest")
print(json.dumps({
    "parameter": {
        "fields": [schemas[name]["properties"].get("zest") for name in names if name in schemas],
        "refused": get_refusal(SamplingParams, zest=4),
        "given": given.zest,
    },
    "option": {
        "default": inspect.signature(LLM).parameters["flavour"].default,
        "refused": get_refusal(EngineOptions, flavour=0),
        "given": given.flavour,
        "page": make_options_doc.make_page(),
    },
    "format": {"given": served.tool_call_parser, "names": TOOL_CALL_PARSERS, "tags": tags},
    "route": {
        "summary": document["paths"]["/zest"]["get"]["summary"],
        "answer": json.loads(asyncio.run(route.endpoint(None)).body),
    },
}))
"""


def put_before(path: Path, mark: str, lines: str) -> None:
    """Put lines before the only place in a file that has `mark`."""
    text = path.read_text()
    assert text.count(mark) == 1
    path.write_text(text.replace(mark, lines + mark))


def add_parameter(package: Path) -> None:
    put_before(
        package / "types" / "sampling.py",
        "    temperature: float | None = parameter(",
        '    zest: float = parameter(1.0, "How much zest.", least=0, most=3)\n',
    )


def add_option(package: Path) -> None:
    put_before(
        package / "engine" / "assembly" / "options.py",
        "    max_model_len: int | None = common_option(",
        "    flavour: int = option(\n"
        '        7, section="engine", least=1, commands=ENGINES, metavar="N", help="Its flavour."\n'
        "    )\n",
    )


def add_format(package: Path) -> None:
    formats = package / "render" / "answers" / "formats"
    text = (formats / "hermes.py").read_text()
    text = text.replace('tag="hermes"', 'tag="zesty"').replace('name="hermes"', 'name="zesty"')
    (formats / "zesty.py").write_text(text.replace("tool_call>", "zest>"))


def add_route(package: Path) -> None:
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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a copy of the package says of its additions.

    The weights of the embedded model stay behind.
    """
    folder = tmp_path_factory.mktemp("one-place")
    package = folder / "sensorium"
    ignored = shutil.ignore_patterns("*.safetensors*", "media")
    shutil.copytree(ROOT / "src" / "sensorium", package, ignore=ignored)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for add in (add_parameter, add_option, add_format, add_route):
        add(package)
    result = subprocess.run(
        [sys.executable, "-B", "-c", QUESTIONS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_sampling_parameter_is_one_declaration(found: Any) -> None:
    parameter = found["parameter"]
    assert parameter["given"] == 2.5
    assert parameter["refused"].startswith("zest: must be")
    assert len(parameter["fields"]) >= 2
    for schema in parameter["fields"]:
        assert '"maximum": 3' in json.dumps(schema)


def test_an_option_is_one_declaration(found: Any) -> None:
    option = found["option"]
    assert option["default"] == 7
    assert "flavour must be" in option["refused"]
    assert option["given"] == 9
    assert "`--flavour" in option["page"]


def test_a_format_of_tool_calls_is_one_file(found: Any) -> None:
    assert found["format"]["given"] == "zesty"
    assert found["format"]["tags"] == ["<zest>"]
    assert "zesty" in found["format"]["names"]


def test_a_route_is_one_line_and_its_handler(found: Any) -> None:
    assert found["route"] == {"summary": "Tell the zest.", "answer": {"zest": 1}}
