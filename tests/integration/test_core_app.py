"""What the core's process builds from the parent's first message."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sensorium.engine.assembly import builder
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.engine.core_process import CoreInfo
from sensorium.server.options import ServeOptions
from sensorium.server.processes.control import StartCore
from sensorium.server.processes.core_app import build_core_app
from sensorium.types.errors import ModelError

Build = Callable[..., CoreInfo]


@pytest.fixture
def build(tiny_model: Callable[[str], str]) -> Iterator[Build]:
    """Builds, lets the loop begin and end once, and gives what was said of it."""
    folder = tempfile.mkdtemp(prefix="ch-")  # pytest's own are too long for sockets

    def make(family: str, *, engine: Mapping[str, Any] = {}, **more: Any) -> CoreInfo:
        options = ServeOptions(
            loading=LoadingOptions(model=tiny_model(family), device="cpu", dtype="float32"),
            engine=EngineOptions(max_model_len=512, max_num_seqs=4, **engine),
            **more,
        )
        loop, info, _ = build_core_app(StartCore(options=options, socket_dir=folder, life=3))
        assert Path(folder, "core-3.sock").exists()
        thread = threading.Thread(target=loop.run)
        thread.start()
        loop.stop()
        thread.join()
        return info

    yield make
    shutil.rmtree(folder)


def test_a_core_reports_the_resolved_settings(build: Build) -> None:
    info = build("qwen2_vl", served_model_name=("tiny",))
    rows = dict(info.description)
    assert rows["family"] == "Qwen2-VL"
    assert rows["model"].endswith("qwen2_vl as tiny")
    assert rows["device"] == "cpu, float32, attention by torch"
    assert rows["KV cache"].startswith("128 blocks of 16, 2048 tokens, ")
    assert rows["encoder cache"].startswith("16384 embeddings, ")
    assert info.max_model_len == 512
    assert info.endpoint.endswith("/core-3.sock")
    assert info.epoch is not None


def test_a_core_without_a_mirrored_cache_has_no_epoch(build: Build) -> None:
    assert build("llama", media=MediaOptions(mm_processor_cache_gb=0)).epoch is None


def test_the_models_own_defaults_may_be_ignored(build: Build) -> None:
    own, none = (
        build("llama").defaults,
        build("llama", engine={"generation_config": "none"}).defaults,
    )
    assert (own.temperature, none.temperature) == (0.0, 1.0)
    assert own.eos_token_ids == none.eos_token_ids != ()


def test_a_model_of_an_unknown_family_is_tried_first(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builder, "KNOWN_MODELS", {})
    caplog.set_level(logging.INFO, "sensorium.engine.assembly.trial")
    build("qwen2_vl", media=MediaOptions(mm_processor_pool_size=1))
    assert "trial of text with image" in caplog.text


def test_a_model_that_can_not_be_loaded_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    start = StartCore(
        options=ServeOptions(loading=LoadingOptions(model=str(tmp_path))), socket_dir="/", life=1
    )
    with pytest.raises(ModelError):
        build_core_app(start)
