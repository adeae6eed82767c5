"""The `openai` client reads in `usage` how many tokens of a prompt are images, audio, videos."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from transformers import AutoConfig

from sensorium import LLM, SamplingParams
from tests.integration.generating import post, read_events, render
from tests.support.clients import (
    MODEL,
    Answer,
    as_base64,
    ask,
    chat,
    make_audio_part,
    make_conversations,
    make_image_part,
    make_wav,
    stream_chat,
)
from tests.support.engine import make_llm
from tests.support.server import SHARED_SERVERS, ServerProcess

pytestmark = pytest.mark.xdist_group("server")
MODALITIES = ("image", "audio", "video")
CONVERSATIONS = {
    **make_conversations(seed=90),
    "image and sound": ask(make_image_part(911), "and", make_audio_part(92), "?"),
}
TinyModel = Callable[[str], str]
Count = Callable[[Any], dict[str, int]]


@pytest.fixture(scope="module")
def client(omni_server: ServerProcess) -> Iterator[OpenAI]:
    with omni_server.make_client() as client:
        yield client


@pytest.fixture(scope="module")
def count(tiny_model: TinyModel) -> Count:
    """Return a function that counts the placeholder tokens of each modality in a prompt."""
    config = AutoConfig.from_pretrained(tiny_model("qwen2_5_omni"))
    token_ids = {name: getattr(config, f"{name}_token_id") for name in MODALITIES}
    return lambda prompt: {name: list(prompt).count(i) for name, i in token_ids.items()}


def get_media_tokens(usage: Any) -> dict[str, int]:
    details = usage["prompt_tokens_details"]
    return {name: details[f"{name}_tokens"] for name in MODALITIES}


def check_usage(answer: Answer, count: Count) -> dict[str, int]:
    """Check that text and media make up the prompt, and return the tokens of the media."""
    usage = answer.usage.model_dump()
    media, found = get_media_tokens(usage), count(answer.prompt_token_ids)
    assert media == found
    num_text = len(answer.prompt_token_ids) - sum(found.values())
    assert num_text > 0
    assert num_text + sum(media.values()) == usage["prompt_tokens"]
    return media


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_text_and_media_make_up_the_prompt(client: OpenAI, count: Count, name: str) -> None:
    media = check_usage(chat(client, CONVERSATIONS[name]), count)
    again = stream_chat(client, CONVERSATIONS[name])  # from the prefix cache
    assert check_usage(again, count) == media
    kinds = {
        "text": set(),
        "images": {"image"},
        "mixed": set(MODALITIES),
        "image and sound": {"image", "audio"},
    }
    assert {kind for kind, number in media.items() if number} == kinds.get(name, {name})


def test_several_completions_count_their_prompt_once(client: OpenAI, count: Count) -> None:
    fields = {"n": 3, "temperature": 1.0}
    one = check_usage(chat(client, CONVERSATIONS["mixed"]), count)
    assert check_usage(chat(client, CONVERSATIONS["mixed"], **fields), count) == one


def test_the_route_for_tokens_counts_as_the_chat_does(
    omni_server: ServerProcess, omni_llm: LLM, count: Count
) -> None:
    body = render(omni_llm, CONVERSATIONS["mixed"])
    expected = count(body["token_ids"])
    whole = post(omni_server, body).json()
    assert get_media_tokens(whole["usage"]) == expected
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = read_events(post(omni_server, {**body, **options}))
    assert get_media_tokens(last["usage"]) == expected
    derendered = omni_server.post("/v1/chat/completions/derender", whole).json()
    assert derendered["usage"] == whole["usage"]


def test_completions_of_text_have_no_tokens_of_media(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=2)
    assert answer.usage is not None
    assert get_media_tokens(answer.usage.model_dump()) == dict.fromkeys(MODALITIES, 0)


def test_outputs_of_the_engine_have_the_tokens_of_their_media(omni_llm: LLM, count: Count) -> None:
    params = SamplingParams(max_tokens=1)
    (output,) = omni_llm.chat(CONVERSATIONS["mixed"], params, use_tqdm=False)
    assert output.mm_tokens == count(output.prompt_token_ids)
    (output,) = omni_llm.generate(["Hello"], params, use_tqdm=False)
    assert output.mm_tokens == {}


def test_audio_outside_the_prompt_is_none_of_its_tokens(tiny_model: TinyModel) -> None:
    audio = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
    prompt: Any = {
        "prompt": "<|startoftranscript|>",
        "multi_modal_data": {"audio": (audio, 16_000)},
    }
    directory = tiny_model("whisper")
    with make_llm(directory, max_model_len=None, generation_config="none") as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.error is None
    assert len(output.mm_items) == 1
    assert output.mm_tokens == {}


def test_a_server_counts_no_audio_outside_the_prompt(tiny_model: TinyModel) -> None:
    directory = tiny_model("whisper")
    start = AutoConfig.from_pretrained(directory).decoder_start_token_id
    url = f"data:audio/wav;base64,{as_base64(make_wav())}"
    body = {"token_ids": [start], "content_parts": [{"type": "audio_url", "url": url}]}
    with SHARED_SERVERS.use(directory, "--dtype", "float32") as server:
        usage = server.post("/inference/v1/generate", body).json()["usage"]
    assert usage["prompt_tokens"] == 1
    assert get_media_tokens(usage) == dict.fromkeys(MODALITIES, 0)
