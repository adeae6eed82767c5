"""A modality that can't work is off from the start, with one line that has the reason."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sensorium import LLM, RequestError
from sensorium.engine.build.catalog import describe_model
from sensorium.engine.build.options import LoadingOptions
from tests.integration.odd_models import make_vipllava
from tests.support.media import make_pixels, write_image
from tests.support.server import ServerProcess, kill, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-switched-off")
_FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "1024")
_NOT_FINITE = "the image could not be encoded: some of its embeddings are not finite"


@pytest.fixture(scope="module")
def blind_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of an unlisted type whose vision tower gives no numbers."""
    directory = tmp_path_factory.mktemp("blind") / "model"
    make_vipllava(directory)
    weights = load_file(directory / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("patch_embedding.weight")]
    weights[name] = torch.full_like(weights[name], torch.nan)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


@pytest.fixture(scope="module")
def unpreparable_model(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A model of a listed family whose processor's settings fit no picture."""
    directory = tmp_path_factory.mktemp("unpreparable") / "model"
    shutil.copytree(tiny_model("llava"), directory)
    path = directory / "processor_config.json"
    values = json.loads(path.read_text())
    values["image_processor"]["image_mean"] = [0.5, 0.5]
    path.write_text(json.dumps(values))
    return str(directory)


def make_chat(*, has_image: bool) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is it"}]
    if has_image:
        data = base64.b64encode(write_image(make_pixels(40, 60), "PNG")).decode()
        url = {"url": f"data:image/png;base64,{data}"}
        content.append({"type": "image_url", "image_url": url})
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3}


def check_image_is_off(server: ServerProcess, path: str, reason: str) -> None:
    refused = server.post(path, make_chat(has_image=True))
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "image is switched off on this server: " in message
    assert reason in message
    assert server.post(path, make_chat(has_image=False)).status_code == 200
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
    (line,) = list_lines(blind_server)
    assert "image is switched off" in line
    assert _NOT_FINITE in line
    assert "WARNING" in line


def test_it_is_off_again_when_the_core_was_restarted(blind_server: ServerProcess) -> None:
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


def test_a_server_that_only_renders_has_it_off_too(unpreparable_model: str) -> None:
    with serve(unpreparable_model, "--max-model-len", "1024", command="render") as server:
        reason = "a small image could not be prepared at start"
        check_image_is_off(server, "/v1/chat/completions/render", reason)


def test_offline_it_is_an_error_with_the_reason(blind_model: str) -> None:
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
