"""The words of `sensorium serve` become options, or a usage error."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from sensorium import cli
from sensorium.cli import serve
from sensorium.engine.assembly.options import LoadingOptions
from sensorium.server.options import ServeOptions


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> ServeOptions:
    monkeypatch.setattr(sys, "argv", ["sensorium", "serve", *words])
    return serve.make_options(cli._parse_arguments())


def test_without_flags_the_server_is_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(monkeypatch, "m")
    assert (options.model, options.host, options.port) == ("m", "127.0.0.1", 8000)
    assert (options.api_key, options.shutdown_timeout) == ((), 30.0)
    assert options.media.mm_processor_cache_type == "lru"
    assert options.media.mm_processor_pool_size >= 1


@pytest.mark.parametrize("words", [[], ["sensorium-mini"], ["--model", "sensorium-mini"]])
def test_the_default_is_the_embedded_model_by_its_name(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    options = parse(monkeypatch, *words)
    assert (options.model, options.model_names) == ("sensorium-mini", ("sensorium-mini",))
    assert options.loading.model == "sensorium-mini"


def test_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(
        monkeypatch,
        *("--model", "m", "--max-model-len=99", "--max-num-seqs=3", "--max-num-batched-tokens=64"),
        *("--kv-cache-memory-bytes=2G", "--encoder-cache-size=7", "--max-num-encoder-embeds=5"),
        *("--disable-chunked-mm-input", "--no-enable-prefix-caching", "--block-size=32"),
        *("--scheduling-policy=priority", "--seed=-4", "--limit-mm-per-prompt", '{"image": 4}'),
        *("--dtype=float32", "--device=cpu", "--trust-remote-code", "--revision=main"),
    )
    engine = options.engine
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (99, 3, 64)
    assert engine.kv_cache_memory_bytes == 2 * 2**30
    assert (engine.encoder_cache_size, engine.max_num_encoder_embeds) == (7, 5)
    assert (engine.disable_chunked_mm_input, engine.enable_prefix_caching) == (True, False)
    assert (engine.block_size, engine.scheduling_policy, engine.seed) == (32, "priority", -4)
    assert engine.limit_mm_per_prompt == {"image": 4}
    assert options.loading == LoadingOptions(
        model="m", dtype="float32", device="cpu", trust_remote_code=True, revision="main"
    )


def test_media_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(
        monkeypatch,
        *("m", "--mm-processor-cache-gb=0.5", "--mm-processor-cache-type=shm"),
        *("--mm-shm-cache-max-object-size-mb=9", "--mm-processor-pool-size=0"),
        *("--mm-hasher-algorithm=sha512", "--mm-processor-kwargs", '{"a": 1}', "--max-media-mb=3"),
        *("--allowed-media-domains=x.org", "--allow-private-media-addresses", "--media-deadline=2"),
        *("--media-process-deadline=7", "--media-process-wait=8.5", "--max-decoded-megapixels=9"),
        "--media-request-deadline=3",
    )
    media = options.media
    assert (media.capacity_bytes, media.has_shared_memory) == (2**29, True)
    assert (media.max_object_bytes, media.mm_processor_pool_size) == (9 * 2**20, 0)
    limits = media.get_limits()
    assert (limits.max_bytes, limits.deadline_s) == (3 * 2**20, 2.0)
    assert (limits.process_deadline_s, limits.process_wait_s) == (7.0, 8.5)
    assert limits.max_decoded_pixels == 9_000_000
    assert limits.request_deadline_s == limits.get_request_deadline_s() == 3.0
    assert (limits.allow_private_addresses, limits.allowed_domains) == (True, {"x.org"})


def test_flags_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(
        monkeypatch,
        *("m", "--host=0.0.0.0", "--port=0", "--api-key=a", "--api-key=b", "--protect-metrics"),
        *("--served-model-name", "x", "y", "--shutdown-timeout=1.5", "--max-body-mb=1"),
        *("--max-concurrent-requests=2", "--allowed-origins=*", "--log-format=json"),
        *("--log-level=debug", "--no-access-log", "--generation-config=none"),
    )
    assert (options.host, options.port, options.api_key) == ("0.0.0.0", 0, ("a", "b"))
    assert (options.model_names, options.shutdown_timeout) == (("x", "y"), 1.5)
    assert (options.max_concurrent_requests, options.max_body_mb) == (2, 1)
    assert (options.allowed_origins, options.protect_metrics) == (("*",), True)
    assert (options.log_format, options.log_level, options.access_log) == ("json", "debug", False)
    assert options.engine.generation_config == "none"


def test_several_frontends_share_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parse(monkeypatch, "m", "--api-server-count=2")
    assert options.shm_capacity_bytes == 4 * 2**30
    options = parse(monkeypatch, "m", "--api-server-count=2", "--mm-processor-cache-gb=0")
    assert options.shm_capacity_bytes == 0


@pytest.mark.parametrize(
    ("num_cores", "changes", "expected"),
    [
        (16, {}, (4, "for 16 CPU cores")),
        (64, {}, (4, "for 64 CPU cores")),
        (8, {}, (2, "for 8 CPU cores")),
        (7, {}, (1, "there are 7 CPU cores")),
        (16, {"cache_bytes": 0, "free_bytes": 0}, (4, "for 16 CPU cores")),
        (16, {"has_lru": True}, (1, "a media cache of the kind lru can't be shared")),
        (
            16,
            {"free_bytes": 4 * 2**30},
            (1, "there is too little memory for a media cache that is shared"),
        ),
        (16, {"has_gpu": False}, (1, "the engine computes on the CPU")),
        (2, {"has_gpu": False}, (1, "")),
    ],
)
def test_frontends_are_chosen_by_the_machine_if_the_user_does_not(
    num_cores: int, changes: dict[str, Any], expected: tuple[int, str]
) -> None:
    machine = {"has_gpu": True, "has_lru": False, "cache_bytes": 4 * 2**30, "free_bytes": 2**36}
    assert serve.choose_frontends(num_cores, **machine | changes) == expected


def test_a_server_with_a_gpu_gives_free_cores_to_media(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_may_have_gpu", lambda _: True)
    monkeypatch.setattr(serve, "get_free_system_bytes", lambda: 2**36)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    options = parse(monkeypatch, "m")
    assert (options.api_server_count, options.frontends_reason) == (4, "for 16 CPU cores")
    assert options.shm_capacity_bytes == 4 * 2**30
    assert options.media.mm_processor_threads == 1  # 11 cores for 4 times 2 processes
    options = parse(monkeypatch, "m", "--mm-processor-cache-type=lru")
    assert (options.api_server_count, options.media.mm_processor_threads) == (1, 3)
    options = parse(monkeypatch, "m", "--api-server-count=2", "--mm-processor-threads=7")
    assert (options.api_server_count, options.frontends_reason) == (2, "")
    assert options.media.mm_processor_threads == 7


@pytest.mark.parametrize(
    ("num_frontends", "num_cores", "expected"),
    [(1, 1, 2), (1, 6, 3), (1, 64, 4), (2, 64, 2), (8, 64, 2)],
)
def test_the_pool_is_a_part_of_the_cores_divided_among_frontends_and_two_at_least(
    num_frontends: int, num_cores: int, expected: int
) -> None:
    assert serve.choose_pool_size(num_frontends, num_cores) == expected


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([""], "the name of the model is empty"),
        (["m", "--model", "n"], "two models are named: m and n"),
        (["m", "--port", "70000"], "from 0 to 65535, not 70000"),
        (["m", "--port", "x"], "'x' is not an integer"),
        (["m", "--api-server-count", "0"], "from 1 to 64, not 0"),
        (["m", "--shutdown-timeout", "-1"], "--shutdown-timeout: it must be a number from 0"),
        (["m", "--shutdown-timeout", "nan"], "--shutdown-timeout: it must be a number from 0"),
        (["m", "--max-num-seqs", "0"], "an integer >= 1, not 0"),
        (["m", "--max-num-seqs", "9" * 30], "an integer >= 1, not 999"),
        (["m", "--kv-cache-memory-bytes", "lots"], "'lots' is not a number of bytes"),
        (["m", "--limit-mm-per-prompt", "image"], "use JSON, or e.g. image=4,video=1"),
        (["m", "--limit-mm-per-prompt", "smell=1"], "modality 'smell': use image, video, audio"),
        (["m", "--limit-mm-per-prompt", '{"image": -1}'], "image must be an integer >= 0"),
        (["m", "--mm-processor-cache-gb", "-1"], "from 0 to"),
        (["m", "--mm-processor-kwargs", "[]"], "a JSON object is needed"),
        (["m", "--media-deadline", "0"], "deadline: it must be a number above 0"),
        (["m", "--media-process-wait", "-1"], "process-wait: it must be a number above 0"),
        (["m", "--max-decoded-megapixels", "0"], "an integer >= 1, not 0"),
        (["m", "--media-request-deadline", "0"], "deadline: it must be a number above 0"),
        (["m", "--allowed-local-media-path", "/nowhere"], "'/nowhere' is not a directory"),
        (["m", "--chat-template", "/nowhere"], "there is no file '/nowhere'"),
        (
            ["m", "--api-server-count=2", "--mm-processor-cache-type=lru"],
            "needs mm_processor_cache_type",
        ),
        (["m", "--api-server-count=64", "--mm-processor-pool-size=9"], "641 processes"),
        (["m", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["m", "--max-model", "7"], "unrecognized arguments: --max-model"),
        (["--prot", "9"], "unrecognized arguments: --prot (did you mean --port?)"),
        (["--prot", "9"], "usage: sensorium serve"),
        (["m", "--log-level", "loud"], "invalid choice: 'loud'"),
    ],
)
def test_senseless_flags_are_wrong_usage_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(monkeypatch, *words)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image=4,video=1", {"image": 4, "video": 1}),
        ('{"audio": 0}', {"audio": 0}),
        (" image=2 ", {"image": 2}),
    ],
)
def test_limits_of_media_are_json_or_short(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, Any]
) -> None:
    options = parse(monkeypatch, "m", "--limit-mm-per-prompt", text)
    assert options.engine.limit_mm_per_prompt == expected


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1", 1), ("4G", 2**32), ("1.5 GiB", 3 * 2**29), ("8kb", 8192)]
)
def test_bytes_may_have_a_unit(monkeypatch: pytest.MonkeyPatch, text: str, num_bytes: int) -> None:
    options = parse(monkeypatch, "m", "--kv-cache-memory-bytes", text)
    assert options.engine.kv_cache_memory_bytes == num_bytes


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_formats_of_answers_are_refused_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    options = parse(monkeypatch, "m", flag, "gemma4")
    assert "gemma4" in (options.tool_call_parser, options.reasoning_parser)
    with pytest.raises(SystemExit):
        parse(monkeypatch, "m", flag, "x")
    assert "'auto', 'none'," in capsys.readouterr().err
