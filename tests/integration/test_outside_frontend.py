"""A frontend that only uses the wire injects media.

What it injects serves later chats if it is trusted, and is kept separate if it is not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sensorium import LLM
from tests.integration.generating import as_json, render
from tests.support.clients import ask, make_png, make_url_part
from tests.support.nursery import get_nursery
from tests.support.server import ROOT, ServerProcess

pytestmark = pytest.mark.xdist_group("server-trusting")
SCRIPT = ROOT / "scripts" / "outside_frontend.py"
SEED = 901


@pytest.fixture
def ask_outside(
    tiny_model: Callable[[str], str], omni_llm: LLM, tmp_path: Path
) -> Callable[[ServerProcess], Any]:
    """Run the script with the name that our own renderer gives the image."""
    picture = tmp_path / "picture.png"
    picture.write_bytes(make_png(SEED))
    url = f"data:image/png;base64,{as_json(make_png(SEED))}"
    body = render(omni_llm, ask(make_url_part("image", url), "What is this?"))
    (mm_hash,) = body["features"]["mm_hashes"]["image"]
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    flags = ["--model", tiny_model("qwen2_5_omni"), "--image", str(picture), "--hash", mm_hash]

    def run(server: ServerProcess) -> Any:
        words = [*flags, "--url", server.get_url()]
        found = get_nursery().run(code, words, env=os.environ, timeout=300)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return run


def test_items_of_a_trusted_frontend_are_not_processed_again_for_chats(
    trusting_server: ServerProcess, ask_outside: Callable[[ServerProcess], Any]
) -> None:
    answer = ask_outside(trusting_server)
    assert answer["generated"] == answer["chat"]
    assert (answer["chat_queries"], answer["chat_hits"]) == (1, 1)


def test_items_of_an_untrusted_frontend_are_kept_separate(
    omni_server: ServerProcess, ask_outside: Callable[[ServerProcess], Any]
) -> None:
    answer = ask_outside(omni_server)
    assert answer["generated"] == answer["chat"]
    assert (answer["chat_queries"], answer["chat_hits"]) == (1, 0)


def test_the_script_imports_nothing_of_sensorium() -> None:
    lines = SCRIPT.read_text().splitlines()
    imports = {line.split()[1].split(".")[0] for line in lines if _is_import(line)}
    assert imports <= {
        *sys.stdlib_module_names,
        *("httpx", "msgspec", "numpy", "PIL", "torch", "torchvision", "transformers"),
    }


def _is_import(line: str) -> bool:
    return line.strip().startswith(("import ", "from ")) and " import " in f" {line.strip()} "
