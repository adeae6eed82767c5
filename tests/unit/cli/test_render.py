"""The words of `sensorium render` become options, or a usage error."""

from __future__ import annotations

import sys

import pytest

from sensorium import cli
from sensorium.cli import serve
from sensorium.server.options import ServeOptions


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServeOptions:
    monkeypatch.setattr(sys, "argv", ["sensorium", "render", *words])
    return serve.make_options(cli._parse_arguments())


def test_without_flags_it_renders_for_this_machine_and_has_no_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = parse(monkeypatch, "m")
    assert (options.model, options.host, options.port) == ("m", "127.0.0.1", 8000)
    assert (options.is_render_only, options.warmup) == (True, True)
    assert options.media.mm_processor_pool_size >= 1
    assert options.loading.model == "m"


def test_flags_reach_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(
        monkeypatch,
        *("--model", "m", "--max-model-len=99", "--limit-mm-per-prompt=image=2", "--seed=3"),
        *("--no-warmup", "--generation-config=none", "--served-model-name", "x", "--api-key=k"),
        *("--mm-processor-cache-gb=1", "--mm-processor-pool-size=0", "--max-media-mb=3"),
        *("--revision=v1", "--trust-remote-code", "--tool-call-parser=hermes", "--port=0"),
    )
    engine, media = options.engine, options.media
    assert (engine.max_model_len, engine.seed, engine.limit_mm_per_prompt) == (99, 3, {"image": 2})
    assert (media.capacity_bytes, media.mm_processor_pool_size) == (2**30, 0)
    assert media.get_limits().max_bytes == 3 * 2**20
    assert (options.warmup, engine.generation_config) == (False, "none")
    assert (options.model_names, options.api_key, options.port) == (("x",), ("k",), 0)
    assert options.tool_call_parser == "hermes"
    assert (options.loading.revision, options.loading.trust_remote_code) == ("v1", True)


def test_several_frontends_need_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(monkeypatch, "m", "--api-server-count=3")
    assert (options.api_server_count, options.shm_capacity_bytes) == (3, 0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([""], "the name of the model is empty"),
        (["m", "--model", "n"], "two models are named: m and n"),
        (["m", "--dtype", "float32"], "unrecognized arguments: --dtype"),
        (["m", "--kv-cache-memory-bytes", "1G"], "unrecognized arguments: --kv-cache"),
        (["m", "--mm-processor-cache-type", "shm"], "unrecognized arguments: --mm-processor-c"),
        (["m", "--trust-injected"], "unrecognized arguments: --trust-injected"),
        (["m", "--allowed-local-media-path", "/nowhere"], "'/nowhere' is not a directory"),
    ],
)
def test_senseless_flags_are_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(monkeypatch, *words)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
