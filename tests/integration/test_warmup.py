"""Warm-up: the first requests find nothing undone, and nothing shows that there was one."""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.engine.inputs.warmup import warm_up
from sensorium.multimodal import placeholders
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.server.options import ServeOptions
from sensorium.server.processes.control import StartFrontend
from sensorium.server.processes.frontend_app import FrontendApp, build_frontend_app
from sensorium.types.errors import ModelError, RequestError
from tests.support.media import (
    make_clip,
    make_melody,
    make_pixels,
    write_audio,
    write_image,
    write_video,
)

ROOT = Path(__file__).parents[2]
_SCRIPT = "tests.integration.first_request"
_LINE = "Multi-modal warmup completed in "
_READONLY_LINE = "Readonly multi-modal warmup completed in "


def make_conversations() -> dict[str, list[dict[str, Any]]]:
    """Media of other formats, sizes and rates than the warm-up's."""
    files = {
        "image": write_image(make_pixels(60, 90), "JPEG"),
        "audio": write_audio(make_melody(8000, rate=44_100), "FLAC", "PCM_16", rate=44_100),
        "video": write_video(make_clip(8, 64, 96), "matroska", "libx264"),
    }
    conversations: dict[str, list[dict[str, Any]]] = {"text": [{"role": "user", "content": "Hi"}]}
    for modality, data in files.items():
        kind = f"{modality}_url"
        url = f"data:;base64,{base64.b64encode(data).decode()}"
        content = [{"type": kind, kind: {"url": url}}, {"type": "text", "text": "What is it?"}]
        conversations[modality] = [{"role": "user", "content": content}]
    return conversations


def count_first_requests(model: str, tmp_path: Path, how: str) -> dict[str, Any]:
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps(make_conversations()))
    ended = subprocess.run(
        [sys.executable, "-m", _SCRIPT, model, how, str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    counts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return counts


def test_after_a_warm_up_the_first_requests_initialise_nothing(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    model = tiny_model("qwen2_5_omni")
    warm = count_first_requests(model, tmp_path, "warm")
    assert warm.pop("lengths").keys() == {"text", "image", "audio", "video"}
    assert warm == {"processors": 0, "compilations": 0, "questions": 0, "modules": []}


@pytest.mark.slow  # this one proves that the counts of the test above count
def test_without_a_warm_up_the_first_requests_initialise_modules(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    cold = count_first_requests(tiny_model("qwen2_5_omni"), tmp_path, "cold")
    # The template is compiled already: whether the model transcribes is tried when it is loaded.
    assert cold["questions"] > 0
    assert {"av", "PIL.WebPImagePlugin"} <= set(cold["modules"])


@contextmanager
def build(model: str, **options: Any) -> Iterator[FrontendApp]:
    """A frontend as its process builds it, without its process."""
    given = ServeOptions(loading=LoadingOptions(model=model), is_render_only=True, **options)
    start = StartFrontend(
        options=given, index=0, identity="f0-1", listen_fd=-1, counts_fd=-1, socket_dir="/nowhere"
    )
    half = build_frontend_app(start.options, identity=start.identity, shm_fd=start.shm_fd)
    try:
        yield half
    finally:
        half.media_parts.close()


def get_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("sensorium.engine")]


def assert_no_trace(half: FrontendApp) -> None:
    media_parts = half.media_parts
    for cache in (media_parts.caches.sender, media_parts.caches.readonly):
        statistics = cache.statistics()
        assert (statistics.num_queries, statistics.num_items, statistics.num_bytes) == (0, 0, 0)
    assert media_parts.loader.statistics().loaded_bytes == {}
    assert media_parts.loader.statistics().num_fetches == 0
    for pipeline in (media_parts.pipeline, media_parts.readonly):
        assert pipeline.flights.num_flights == 0


def test_a_warm_up_logs_how_long_it_took_and_leaves_no_trace(
    tiny_model: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with build(tiny_model("qwen2_5_omni")) as half:
        lines = get_lines(caplog)
        assert [line.rpartition(" ")[0] + " " for line in lines] == [_LINE, _READONLY_LINE]
        assert all(float(line.rpartition(" ")[2].removesuffix("s")) > 0 for line in lines)
        assert_no_trace(half)
        assert half.engine.renderer.inputs.draw_seed() == random.Random(0).getrandbits(63)


def test_without_a_warm_up_nothing_is_logged(
    tiny_model: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with build(tiny_model("qwen2_5_omni"), warmup=False):
        assert get_lines(caplog) == []


def test_a_model_of_text_alone_has_no_media_to_warm(
    tiny_model: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with build(tiny_model("llama")) as half:
        assert get_lines(caplog) == []
        template = half.engine.renderer.chat_renderer._get_template.cache_info()
        assert template.currsize == 1


def test_a_modality_that_no_prompt_may_have_is_not_warmed(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processed = watch_items(monkeypatch)
    limits = EngineOptions(limit_mm_per_prompt={"video": 0, "audio": 0})
    with build(tiny_model("qwen2_5_omni"), engine=limits):
        assert processed == ["image", "image"]  # for either kind of requests


def watch_items(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    processed: list[str] = []
    original = MultiModalProcessor.process_item

    def process(self: Any, modality: str, *arguments: Any, **options: Any) -> Any:
        processed.append(modality)
        return original(self, modality, *arguments, **options)

    monkeypatch.setattr(MultiModalProcessor, "process_item", process)
    return processed


def test_a_modality_that_fails_is_switched_off_and_the_rest_is_warmed(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    original = MultiModalProcessor.process_item
    processed: list[str] = []

    def process(self: Any, modality: str, *arguments: Any, **options: Any) -> Any:
        if modality == "video":
            raise RequestError("no videos today")
        processed.append(modality)
        return original(self, modality, *arguments, **options)

    monkeypatch.setattr(MultiModalProcessor, "process_item", process)
    with build(tiny_model("qwen2_5_omni")) as half:
        line, completed = get_lines(caplog)
        assert line.startswith("video is switched off, and requests with it are refused: ")
        assert line.endswith("no videos today")
        assert completed.startswith(_READONLY_LINE)
        assert [r.exc_info for r in caplog.records if r.levelname == "WARNING"] == [None]
        # Audio is tried several times, to find the longest that the model takes.
        assert [modality for modality, _ in groupby(processed)] == ["image", "audio"] * 2
        assert half.engine.modalities == ("image", "audio")
        assert half.engine.switched_off["video"].endswith("no videos today")
        assert_no_trace(half)


def test_a_dummy_that_is_over_the_limits_switches_nothing_off(
    tiny_model: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with build(
        tiny_model("llava"), media=MediaOptions(media_limits=MediaLimits(max_pixels=1000))
    ) as half:
        lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert lines == [
            f"{name} warmup failed for image (still allowed): messages[0].content[0]: the image or "
            "frame has more than 1000 pixels, which is the limit (this one: 168 x 112)"
            for name in ("Multi-modal", "Readonly multi-modal")
        ]
        assert half.engine.modalities == ("image",)


def test_a_picture_without_a_place_in_the_template_is_warmed_by_other_prompts(
    tiny_model: Callable[[str], str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for path in Path(tiny_model("llava")).iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    with build(str(tmp_path)) as half:
        assert "Multi-modal warmup failed for image" in caplog.text
        assert half.engine.modalities == ("image",)


def test_a_model_whose_text_can_not_be_prepared_is_refused(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr(placeholders, "tokenize", fail)
    with (
        pytest.raises(ModelError, match="not even a prompt of text can be prepared: no words"),
        build(tiny_model("llava")),
    ):
        pass


def test_a_model_without_a_chat_template_is_warmed_by_prompts(
    tiny_model: Callable[[str], str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    for path in Path(tiny_model("llava")).iterdir():
        if "chat_template" not in path.name and path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with build(str(tmp_path)):
        first, *lines = get_lines(caplog)
        words = "Chat template warmup failed, so conversations may be refused: this model has no"
        assert first.startswith(words)
        assert [record for record in caplog.records if record.exc_info] == []
        assert [line.rpartition(" ")[0] + " " for line in lines] == [_LINE, _READONLY_LINE]


def test_a_warm_up_can_not_fail_its_caller(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with build(tiny_model("llava"), warmup=False) as half:

        def fail(*_: object) -> None:
            raise RuntimeError("nothing works")

        monkeypatch.setattr(type(half.engine.renderer.inputs), "for_warmup", fail)
        warm_up(half.engine.renderer)
    assert "nothing works" in caplog.text
