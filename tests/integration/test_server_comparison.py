"""The benchmark of two servers (`cuda_server.py --beside`) compares them if their work is the same.

One server has the tiny model, and the other a copy of it with another limit on pixels, as happened
when figures were compared that should not have been.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.server import serve

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "cuda_server.py"
FLAGS = ("--served-model-name", "m", "--limit-mm-per-prompt", '{"video": 0}')


@pytest.fixture(scope="module")
def servers(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Run two servers of equal work, and one that resizes pictures differently."""
    whole = tiny_model("qwen2_5_vl")
    shrinking = shutil.copytree(whole, tmp_path_factory.mktemp("models") / "shrinking")
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = shrinking / name
        if path.exists():
            text = path.read_text()
            path.write_text(re.sub(r'("longest_edge": )\d+', rf"\g<1>{28 * 28 * 4}", text))
    models = {"whole": whole, "same": whole, "shrinking": str(shrinking)}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(serve(model, *FLAGS)) for name, model in models.items()
        }
        yield {name: server.get_url() for name, server in running.items()}


def compare(servers: dict[str, str], peer: str, record: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--url", servers["whole"], "--beside", servers[peer]]
    options = ["--loads", "probe", "fresh", "chat", "--quick", "--rounds", "2", "--clients", "2"]
    return subprocess.run(
        [*command, *options, "--seed", "1", "--record-to", str(record)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_servers_that_count_other_prompt_tokens_are_not_compared(
    servers: dict[str, str], tmp_path: Path
) -> None:
    done = compare(servers, "shrinking", tmp_path / "record.json")
    assert done.returncode != 0
    assert re.search(
        r"nothing is recorded: probe_new: our server counts (\d+) prompt tokens and the peer "
        r"(?!\1 )\d+ for the same request",
        done.stderr,
    ), done.stderr
    assert not (tmp_path / "record.json").exists()


def test_a_record_has_all_rounds_of_both_servers_with_tokens_versions_and_ratios(
    servers: dict[str, str], tmp_path: Path
) -> None:
    done = compare(servers, "same", tmp_path / "record.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["commit"]
    assert record["command"].startswith("python benchmarks/cuda_server.py")
    figures = record["figures"]
    assert all(figures["servers"][side]["version"] for side in ("ours", "peer"))
    assert figures["num_prompt_tokens"]["fresh"] > figures["num_prompt_tokens"]["chat"]
    for name in ("probe_new", "fresh", "chat"):
        load = figures["loads"][name]
        assert len(load["ours"]) == len(load["peer"]) == 2
        assert load["num_prompt_tokens"]
        assert load["ratio"][load["headline"]] > 0
    assert figures["loads"]["fresh"]["num_prompt_tokens"][0] in range(40, 100)
