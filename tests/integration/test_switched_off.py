"""A modality that can't work is off from the start, with one line that has the reason."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sensorium import LLM, RequestError
from sensorium.engine.assembly.catalog import describe_model
from sensorium.engine.assembly.options import LoadingOptions
from tests.integration.odd_models import make_phi4_multimodal, make_vipllava
from tests.support.media import make_pixels, write_image
from tests.support.server import ROOT, ServerProcess, kill, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-switched-off")
_FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "1024")
_NOT_FINITE = "the image could not be encoded: some of its embeddings are not finite"


@pytest.fixture(scope="module")
def blind_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of an unlisted type with a vision tower that overflows floats."""
    directory = tmp_path_factory.mktemp("blind") / "model"
    make_vipllava(directory)
    weights = load_file(directory / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("patch_embedding.weight")]
    weights[name] = torch.full_like(weights[name], 3e38)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


@pytest.fixture(scope="module")
def unpreparable_model(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A model of a listed family with processor settings that fit no picture."""
    directory = tmp_path_factory.mktemp("unpreparable") / "model"
    shutil.copytree(tiny_model("llava"), directory)
    path = directory / "processor_config.json"
    values = json.loads(path.read_text())
    values["image_processor"]["image_mean"] = [0.5, 0.5]
    path.write_text(json.dumps(values))
    return str(directory)


def make_chat(*, num_images: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is it"}]
    for _ in range(num_images):
        data = base64.b64encode(write_image(make_pixels(40, 60), "PNG")).decode()
        url = {"url": f"data:image/png;base64,{data}"}
        content.append({"type": "image_url", "image_url": url})
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3}


def check_image_is_off(server: ServerProcess, path: str, reason: str) -> None:
    refused = server.post(path, make_chat(num_images=1))
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "image is switched off on this server: " in message
    assert reason in message
    assert server.post(path, make_chat(num_images=0)).status_code == 200
    (card,) = server.get("/v1/models").json()["data"]
    assert card["modalities"] == ["text"]
    assert reason in card["switched_off"]["image"]


def list_lines(server: ServerProcess) -> list[str]:
    return [line for line in server.lines if "requests with it are refused" in line]


@pytest.fixture(scope="module")
def blind_server(blind_model: str) -> Iterator[ServerProcess]:
    with serve(blind_model, *_FLAGS) as server:
        yield server


def test_a_modality_whose_trial_fails_is_off(blind_server: ServerProcess) -> None:
    check_image_is_off(blind_server, "/v1/chat/completions", _NOT_FINITE)
    lines = list_lines(blind_server)
    # One for each core; another test may have killed one.
    assert len(lines) == 1 + blind_server.output.count("the core is ready again")
    for line in lines:
        assert "image is switched off" in line
        assert _NOT_FINITE in line
        assert "WARNING" in line


def test_the_modality_is_off_again_when_the_core_was_restarted(blind_server: ServerProcess) -> None:
    (core,) = blind_server.find_children("core_main")
    kill(core)
    blind_server.wait_for_output("the core is ready again", 240)
    wait_until(lambda: blind_server.get("/health").status_code == 200, "it is healthy", 240)
    check_image_is_off(blind_server, "/v1/chat/completions", _NOT_FINITE)


def test_a_modality_whose_warm_up_fails_is_off(unpreparable_model: str) -> None:
    with serve(unpreparable_model, *_FLAGS) as server:
        reason = "a small image could not be prepared at start"
        check_image_is_off(server, "/v1/chat/completions", reason)
        assert len(list_lines(server)) == 1


def test_a_server_that_only_renders_also_has_the_modality_off(unpreparable_model: str) -> None:
    with serve(unpreparable_model, "--max-model-len", "1024", command="render") as server:
        reason = "a small image could not be prepared at start"
        check_image_is_off(server, "/v1/chat/completions/render", reason)


def test_offline_the_modality_is_an_error_with_the_reason(blind_model: str) -> None:
    llm = LLM(blind_model, device="cpu", dtype="float32", max_model_len=1024)
    prompt: Any = {
        "prompt": "<image>what is it",
        "multi_modal_data": {"image": make_pixels(40, 60)},
    }
    with pytest.raises(
        RequestError, match=f"image is switched off on this server: .*{_NOT_FINITE}"
    ):
        llm.generate(prompt, use_tqdm=False)
    assert llm.generate("what is it", use_tqdm=False)[0].outputs[0].token_ids


def test_the_description_of_a_model_has_what_is_off(
    blind_model: str, unpreparable_model: str
) -> None:
    text = describe_model(LoadingOptions(model=unpreparable_model))
    assert "besides text: -\n" in text
    assert "switched off: image: a small image could not be prepared at start" in text
    text = describe_model(LoadingOptions(model=blind_model))
    assert "not known: a trial at start decides (see --try)" in text
    assert "besides text: image\nswitched off: -\n" in text
    text = describe_model(LoadingOptions(model=blind_model, device="cpu"), is_tried=True)
    assert "besides text: -\n" in text
    assert _NOT_FINITE in text


def test_a_modality_that_fails_with_two_items_is_limited_to_one(tmp_path: Path) -> None:
    """The context has room for one small picture and a few words."""
    directory = make_vipllava(tmp_path / "model")
    reason = "a prompt with 2 small items leaves no room for words in a context of 48 tokens"
    with serve(directory, *_FLAGS[:-1], "48") as server:
        (card,) = server.get("/v1/models").json()["data"]
        assert card["modalities"] == ["text", "image"]
        assert card["switched_off"] == {}
        assert reason in card["only_one"]["image"]
        assert server.post("/v1/chat/completions", make_chat(num_images=1)).status_code == 200
        refused = server.post("/v1/chat/completions", make_chat(num_images=2))
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert "there are 2 image items, but on this server a prompt may have only one" in message
        assert reason in message
        (line,) = [line for line in server.lines if "image is limited to one item" in line]
        assert reason in line
        assert "WARNING" in line


def test_a_model_that_pads_audio_without_a_mask_takes_one_item_per_prompt(tmp_path: Path) -> None:
    """Granite Speech: one recording per prompt is right, whatever else is in the batch."""
    command = [sys.executable, "-m", "tests.integration.granite_speech", str(tmp_path / "model")]
    paths = [ROOT / "scripts"]
    if find_spec("torchaudio") is None:
        paths.append(ROOT / "tests" / "support" / "stand_ins")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["switched_off"] == {}
    reason = found["only_one"]["audio"]
    assert "in a trial of text with audio the engine's log-probabilities are not" in reason
    assert found["ours"] == found["theirs"]
    assert found["most_in_a_batch"] > 1
    assert f"a prompt may have only one: {reason}" in found["refusal"]
    assert "besides text: audio\nswitched off: -\n" in found["description"]
    assert f"one a prompt: audio: {reason}\n" in found["description"]


def test_modalities_that_only_the_engine_lacks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_phi4_multimodal(tmp_path / "model")
    reason = "Phi4MultimodalForCausalLM takes it, but the checkpoint names no placeholder token"
    text = describe_model(LoadingOptions(model=directory))
    assert "besides text: -\n" in text
    assert f"switched off: image: {reason}" in text
    assert f"; audio: {reason}" in text
    llm = LLM(directory, device="cpu", dtype="float32", max_model_len=512)
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.split(" is switched off", 1)[0] for line in lines if reason in line] == [
        "image",
        "audio",
    ]
    prompt: Any = {"prompt": "what is it", "multi_modal_data": {"image": make_pixels(40, 60)}}
    with pytest.raises(RequestError, match=f"image is switched off on this server: {reason}"):
        llm.generate(prompt, use_tqdm=False)
