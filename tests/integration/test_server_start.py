"""How a server starts, and what it says when it can't."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.server import ServerProcess, get_descendants, is_alive
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-shared")
# Those of the wire's reference that have something to act on.
FLAGS = """
--model --served-model-name --host --port --api-key --dtype --device --max-model-len
--max-num-seqs --max-num-batched-tokens --kv-cache-memory-bytes --limit-mm-per-prompt
--mm-processor-kwargs --media-io-kwargs --mm-processor-cache-gb --mm-processor-cache-type
--mm-shm-cache-max-object-size-mb --mm-hasher-algorithm --encoder-cache-size
--max-num-encoder-embeds --disable-chunked-mm-input --enable-prefix-caching
--no-enable-prefix-caching --allowed-local-media-path --allowed-media-domains --api-server-count
--seed --chat-template --generation-config --trust-remote-code
"""


@pytest.fixture(params=["omni_server", "shared_server"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    found: ServerProcess = request.getfixturevalue(request.param)
    return found


def run_to_its_end(
    model: str, *flags: str, is_cold: bool = True, **environment: str
) -> tuple[int, str]:
    """A server that can't start: its status and what it said."""
    server = ServerProcess(model, *flags, is_cold=is_cold, **environment)
    seen: set[int] = set()
    try:
        while server.process.poll() is None:
            seen |= set(get_descendants(server.process.pid))
            with server._is_said:
                server._is_said.wait(0.05)
        status = server.stop()
    finally:
        if server.process.poll() is None:
            server.kill()
    wait_until(lambda: not any(map(is_alive, seen)), "its processes have ended")
    return status, server.output


def test_the_start_prints_the_resolved_settings(server: ServerProcess) -> None:
    is_shared = "shm" in server.flags
    for words in (
        r"model\s+\S*qwen2_5_omni",
        r"family\s+Qwen2\.5-Omni",
        r"device\s+cpu, float32",
        r"context\s+2048 tokens",
        r"KV cache\s+\d+ blocks of 16",
        r"prefix caching\s+on",
        r"a step\s+8 requests and 64 tokens",
        r"encoder cache\s+\d+ embeddings",
        r"processor cache\s+0\.25 GiB, " + ("in shared memory" if is_shared else "lru"),
        r"frontends\s+" + ("2" if is_shared else "1"),
    ):
        assert re.search(words, server.output), words
    (line,) = [line for line in server.lines if "Sensorium is ready" in line]
    assert f"http://127.0.0.1:{server.get_url().rpartition(':')[2]}" in line


def test_help_has_every_flag() -> None:
    status, said = run_to_its_end("any", "--help")
    assert status == 0
    flags = set(re.findall(r"--[a-z][a-z-]+", said))
    assert set(FLAGS.split()) - flags == set()


def test_a_port_in_use_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = run_to_its_end("nowhere/nothing", "--port", str(port), TMPDIR=str(tmp_path))
    assert status == 1
    assert str(port) in said
    assert "in use" in said
    assert "nowhere" not in said  # it did not come to that
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_model_that_can_not_be_loaded_ends_the_server(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    config = {"model_type": "no_such_model", "architectures": ["NoSuchModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    flags = ("--mm-processor-cache-type", "shm", "--mm-processor-cache-gb", "0.01")
    # It is not cold, because each of its processes would load all libraries before it ends.
    status, said = run_to_its_end(str(tmp_path), *flags, is_cold=False, TMPDIR=str(private))
    assert status == 1
    assert str(tmp_path) in said
    assert "no_such_model" in said
    assert "Traceback" not in said
    assert len(said.splitlines()) < 8
    assert list(private.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-server-count", "2", "--mm-processor-cache-type", "lru"), "shm"),
        (("--allowed-local-media-path", "/no/such/place"), "/no/such/place"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--chat-template", "/no/such/template"), "/no/such/template"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags_that_make_no_sense_are_named(flags: tuple[str, ...], words: str) -> None:
    status, said = run_to_its_end("nowhere/nothing", *flags)
    assert status == 2
    assert words in said
    assert "Traceback" not in said
