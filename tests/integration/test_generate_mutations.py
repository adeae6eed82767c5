"""More than a thousand malformed features over HTTP are refused with their fields.

The engine continues unaffected.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sensorium import LLM
from tests.integration.generating import (
    MSGPACK,
    PATH,
    Body,
    generate,
    get_token_ids,
    post,
    render,
    without_items,
)
from tests.integration.mutations import (
    Mutation,
    encode,
    flip_frame,
    is_same_item,
    mutate_base64,
    mutate_metadata,
    mutate_tensors,
    set_at,
    truncate,
)
from tests.support.clients import ask, make_audio_part, make_image_part, make_video_part
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")
SEED = 20261115
UNREADABLE = ("invalid_json", "invalid_msgpack")
SMALL = {"mm_processor_kwargs": {"size": {"shortest_edge": 784, "longest_edge": 6272}}}


def make_mutations(mixed: Body, single: dict[str, Body], divisor: int) -> Iterator[Mutation]:
    """Make all systematic mutations, and the random ones divided by `divisor`."""
    rng = random.Random(SEED)
    known = without_items(mixed)
    for number, (name, body) in enumerate(mutate_metadata(known)):
        yield _send(name, body, is_msgpack=bool(number % 2) or _has_bytes(body))
    for modality, body in single.items():
        path = ("features", "kwargs_data", modality, 0)
        (item,) = body["features"]["kwargs_data"][modality]
        is_small = len(item) < 2**18
        for name, changed in mutate_tensors(item):
            yield _send(f"{modality} {name}", set_at(body, path, changed), is_msgpack=True)
        for name, changed in truncate(item, rng, (60 if is_small else 5) // divisor):
            whole = set_at(body, path, changed)
            yield _send(f"{modality} {name}", whole, is_msgpack=rng.random() < 0.5)
        for name, changed in flip_frame(item, rng, (100 if is_small else 20) // divisor):
            whole = set_at(body, path, changed)
            yield _send(f"{modality} {name}", whole, is_msgpack=True, item=changed)
        for name, text in mutate_base64(item, rng, (20 if is_small else 2) // divisor):
            yield _send(f"{modality} {name}", set_at(body, path, text), is_msgpack=False)
    for is_msgpack in (False, True):
        content = encode(single["image"], is_msgpack=is_msgpack)
        for name, changed in truncate(content, rng, 20 // divisor):
            yield Mutation(name=name, content=changed, is_msgpack=is_msgpack)


def _send(name: str, body: Any, *, is_msgpack: bool, item: bytes | None = None) -> Mutation:
    content = encode(body, is_msgpack=is_msgpack)
    return Mutation(name=name, content=content, is_msgpack=is_msgpack, item=item)


def _has_bytes(body: Any) -> bool:
    """JSON would make base64 of them."""
    features = body.get("features")
    kwargs = features.get("kwargs_data") if isinstance(features, dict) else None
    entries = kwargs.values() if isinstance(kwargs, dict) else ()
    return any(isinstance(e, list) and any(isinstance(x, bytes) for x in e) for e in entries)


@pytest.mark.parametrize(
    ("divisor", "least"),
    [pytest.param(2, 500, id="some"), pytest.param(1, 1000, id="all", marks=pytest.mark.slow)],
)
def test_malformed_features_are_refused_and_affect_no_other_request(
    omni_server: ServerProcess, omni_llm: LLM, divisor: int, least: int
) -> None:
    image, audio, video = make_image_part(801), make_audio_part(801), make_video_part(801)
    single = {
        "image": render(omni_llm, ask(image, "?"), **SMALL),
        "audio": render(omni_llm, ask(audio, "?")),
        "video": render(omni_llm, ask(video, "?"), **SMALL),
    }
    parts = (image, "a", audio, "b", make_image_part(802), "c", video)
    mixed = render(omni_llm, ask(*parts), **SMALL)
    good = [mixed, without_items(mixed), *single.values()]
    expected = [generate(omni_server, body) for body in good]
    process_ids = omni_server.get_process_ids()
    items = [body["features"]["kwargs_data"][name][0] for name, body in single.items()]
    answers: Counter[str] = Counter()
    with httpx.Client(base_url=omni_server.get_url(), timeout=120.0) as client:
        for mutation in make_mutations(mixed, single, divisor):
            kind = MSGPACK if mutation.is_msgpack else {"content-type": "application/json"}
            response = client.post(PATH, content=mutation.content, headers=kind)
            if response.status_code == 200 and mutation.item is not None:
                is_same = any(is_same_item(item, mutation.item) for item in items)
                assert is_same, mutation.name
                answers["still good"] += 1
                continue
            assert response.status_code == 400, (mutation.name, response.text)
            error = response.json()["error"]
            assert error["param"] or error["code"] in UNREADABLE, (mutation.name, error)
            answers["refused"] += 1
    print(answers)
    assert answers["refused"] >= least, answers  # of those that are wrong by construction
    assert [get_token_ids(post(omni_server, body)) for body in good] == expected
    assert omni_server.get("/health").status_code == 200
    # None has died. The pool may have started another one, for items that came together.
    assert set(process_ids) <= set(omni_server.get_process_ids())
