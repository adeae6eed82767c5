"""Two servers answer as one does, although the one that renders has no weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.integration.disaggregating import (
    Route,
    chat,
    derender,
    generate,
    post_generate,
    render,
)
from tests.support.clients import (
    MODEL,
    ask,
    make_conversations,
    make_image_part,
    make_video_part,
)
from tests.support.server import ServerProcess, serve

pytestmark = pytest.mark.xdist_group("server-trusting")
TinyModel = Callable[[str], str]
ROUTES = [
    Route(is_msgpack=is_msgpack, is_streamed=is_streamed)
    for is_msgpack, is_streamed in product((False, True), repeat=2)
]
_FLAGS = ("--served-model-name", MODEL, "--max-model-len", "2048")
_SPARSE = {
    "qwen3_vl": ask(make_video_part(3), "What happens?", make_image_part(3)),
    "gemma3": ask(make_image_part(4), "What is this?"),
}


def make_body(messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}


def copy_without_weights(model: str, directory: Path) -> str:
    target = directory / Path(model).name
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin"))
    return str(target)


@pytest.fixture(scope="module")
def omni_renderer(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    model = copy_without_weights(tiny_model("qwen2_5_omni"), tmp_path_factory.mktemp("render"))
    with serve(model, *_FLAGS, command="render") as server:
        yield server


@pytest.fixture(scope="module", params=sorted(_SPARSE))
def sparse_pair(
    request: pytest.FixtureRequest, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ServerProcess, ServerProcess]]:
    """Models that have text among the embeddings of their items."""
    model = tiny_model(request.param)
    bare = copy_without_weights(model, tmp_path_factory.mktemp("render"))
    with (
        serve(bare, *_FLAGS, command="render") as renderer,
        serve(model, *_FLAGS, "--dtype", "float32", "--max-num-batched-tokens", "64") as server,
    ):
        yield request.param, renderer, server


def check_round(
    renderer: ServerProcess, server: ServerProcess, body: dict[str, Any], route: Route
) -> dict[str, Any]:
    """What the two answer is what the one answers; the request that travelled."""
    rendered = render(renderer, body, route)
    generated = generate(server, rendered, route)
    found = derender(renderer, generated, body, num_prompt_tokens=len(rendered["token_ids"]))
    assert found == chat(server, body)
    return rendered


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("name", sorted(make_conversations()))
def test_two_servers_answer_as_one(
    omni_renderer: ServerProcess, omni_server: ServerProcess, name: str, route: Route
) -> None:
    body = make_body(make_conversations(seed=7)[name])
    rendered = check_round(omni_renderer, omni_server, body, route)
    assert (rendered["features"] is None) == (name == "text")


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_sparse_placeholders_survive_the_transfer(
    sparse_pair: tuple[str, ServerProcess, ServerProcess], route: Route
) -> None:
    family, renderer, server = sparse_pair
    rendered = check_round(renderer, server, make_body(_SPARSE[family]), route)
    placeholders = [p for each in rendered["features"]["mm_placeholders"].values() for p in each]
    assert any(p["is_embed"] is not None for p in placeholders), "nothing sparse was tried"


@pytest.mark.parametrize("is_msgpack", [False, True])
def test_media_that_was_sent_once_needs_no_pixels_again(
    omni_renderer: ServerProcess, omni_server: ServerProcess, is_msgpack: bool
) -> None:
    body = make_body(make_conversations(seed=8 + is_msgpack)["mixed"])
    bare = Route(is_msgpack=is_msgpack, has_kwargs=False)
    first = render(omni_renderer, body, bare)
    assert first["features"]["kwargs_data"] is None
    refusal = post_generate(omni_server, first, bare)
    hashes = {name for each in first["features"]["mm_hashes"].values() for name in each}
    assert refusal.status_code == 409
    assert set(refusal.json()["error"]["missing"]) == hashes

    sent = check_round(omni_renderer, omni_server, body, Route(is_msgpack=is_msgpack))
    assert sent["features"]["mm_hashes"] == first["features"]["mm_hashes"]
    again = check_round(omni_renderer, omni_server, body, bare)
    assert again["features"]["kwargs_data"] is None


def test_a_stop_string_ends_the_text_where_it_does_for_one_server(
    omni_renderer: ServerProcess, omni_server: ServerProcess
) -> None:
    body = make_body(ask("Count to ten."), max_tokens=24)
    (text,) = chat(omni_server, body)["content"]
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    for route in ROUTES:
        check_round(omni_renderer, omni_server, {**body, "stop": [stop]}, route)


def test_several_answers_come_back_together(
    omni_renderer: ServerProcess, omni_server: ServerProcess
) -> None:
    body = make_body(ask("Say something."), n=3, temperature=1.0, seed=5)
    for route in ROUTES:
        check_round(omni_renderer, omni_server, body, route)
