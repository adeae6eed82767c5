"""Hub ids are resolved through the hub's own cache, without a network.

The processes are fresh ones, because the hub's variables are read at import.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from select import select

import pytest

TinyModel = Callable[[str], str]
MODEL = "owner/name"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
CONTEXTS = {"main": 8192, "v1": 4096}
_NOWHERE = "http://127.0.0.1:9"  # the port of `discard`: refused
_SCRIPT = """
import json, sys, time
pauses, sleep = [], time.sleep
time.sleep = lambda seconds: (pauses.append(seconds), sleep(seconds))
from sensorium import LLM, ModelError, SamplingParams
results = []
for options in json.loads(sys.argv[1]):
    try:
        llm = LLM(**options)
        output = llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)[0]
        results.append([llm.config.limits.max_model_len, len(output.outputs[0].token_ids)])
    except ModelError as error:
        results.append(str(error))
print(json.dumps({"results": results, "pauses": pauses}))
"""


@pytest.fixture(scope="module")
def home(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two revisions that differ in their config, made by hand."""
    home = tmp_path_factory.mktemp("hub")
    repository = home / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in COMMITS.items():
        snapshot = shutil.copytree(tiny_model("llama"), repository / "snapshots" / commit)
        config = json.loads((snapshot / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXTS[revision]
        (snapshot / "config.json").write_text(json.dumps(config))
        (repository / "refs" / revision).write_text(commit)
    weightless = shutil.copytree(
        repository / "snapshots" / COMMITS["main"], repository / "snapshots" / ("c" * 40)
    )
    (weightless / "model.safetensors").unlink()
    mute = shutil.copytree(weightless, repository / "snapshots" / ("d" * 40))
    (mute / "tokenizer.json").unlink()
    return home


def run(
    home: Path, calls: list[dict[str, object]], **variables: str
) -> tuple[list[object], list[float]]:
    options = [{"model": MODEL, "max_num_seqs": 1, **call} for call in calls]
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(options)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(home), **variables},
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "it/s" not in result.stderr  # no bar without a terminal
    answer = json.loads(result.stdout)
    return answer["results"], answer["pauses"]


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"HF_HUB_OFFLINE": "1"}, id="offline", marks=pytest.mark.slow),
        pytest.param({"HF_ENDPOINT": _NOWHERE}, id="unreachable"),
    ],
)
def test_a_cached_model_needs_no_network_and_a_missing_one_is_a_one_line_error(
    home: Path, variables: dict[str, str]
) -> None:
    calls: list[dict[str, object]] = [
        {},
        {"revision": "v1"},
        {"revision": COMMITS["v1"]},
        {"revision": "v2"},
        {"model": "owner/absent"},
        {"revision": "c" * 40},
        {"revision": "d" * 40},
        {"model": "mini"},
    ]
    results, pauses = run(home, calls, **variables)
    assert results[:3] == [[8192, 2], [4096, 2], [4096, 2]]
    why = "offline mode" if "HF_HUB_OFFLINE" in variables else "the hub can't be reached"
    for result, what in zip(results[3:5], ("at revision 'v2'", "'owner/absent'"), strict=True):
        assert isinstance(result, str)
        assert what in result
        assert why in result
        assert "\n" not in result
    assert "weights" in str(results[5])
    assert "has no tokenizer" in str(results[6])
    hint = "a hub id is like owner/name; commands take sensorium-mini"
    assert [hint in str(result) for result in results] == [False] * 7 + [True]
    assert sum(pauses) < 1, pauses  # no retries: the hub's library sleeps a second before its first


@pytest.mark.slow
def test_a_long_load_shows_a_progress_bar_on_a_terminal_unless_disabled(
    tiny_model: TinyModel,
) -> None:
    script = (
        "import sys\n"
        "from sensorium.models import loading\n"
        "loading.BAR_DELAY_S = 0\n"
        "from sensorium import LLM\n"
        "LLM(sys.argv[1], max_model_len=64, use_tqdm_on_load=sys.argv[2] == 'yes')\n"
    )

    def get_stderr(use_tqdm: str) -> str:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        command = [sys.executable, "-c", script, tiny_model("llama"), use_tqdm]
        process = subprocess.run(command, stderr=theirs, timeout=120, check=False)
        os.set_blocking(ours, False)
        text = os.read(ours, 100_000).decode() if select([ours], [], [], 0)[0] else ""
        for descriptor in (ours, theirs):
            os.close(descriptor)
        assert process.returncode == 0, text
        return text

    assert "Loading weights" in get_stderr("yes")
    assert get_stderr("no") == ""
