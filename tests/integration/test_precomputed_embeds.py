"""Media that comes as its encoder's output gets the same answer as the media itself.

An operator and the model's family have to allow it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from sensorium import LLM, RequestError
from sensorium.multimodal.item_codec import PrecomputedEmbeds
from sensorium.render.renderer import ChatRenderer
from sensorium.types.outputs import RequestOutput
from tests.integration.media_steps import (
    GREEDY,
    OPTIONS,
    LlmOf,
    assert_idle,
    forget_outputs,
    make_new_image,
)
from tests.parity.cases import make_media
from tests.support.engine import get_hf_model, make_llm, process_with_tensors

TinyModel = Callable[[str], str]
FAMILIES = {
    "llava": "image",
    "llava_next": "image",
    "llava_onevision": "image",
    "qwen2_audio": "audio",
    "audioflamingo3": "audio",
    "voxtral": "audio",
}


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModel) -> Iterator[LLM]:
    with make_llm(
        tiny_model("llava"), max_model_len=256, enable_mm_embeds=True, **OPTIONS["lru"]
    ) as llm:
        yield llm
        assert_idle(llm)


def make_message(modality: str, media: object, **fields: Any) -> list[dict[str, Any]]:
    part = {"type": modality, modality: media, **fields}
    return [{"role": "user", "content": [part, {"type": "text", "text": "what is this?"}]}]


def ask(llm: LLM, modality: str, media: object, **fields: Any) -> RequestOutput:
    forget_outputs(llm)
    message = make_message(modality, media, **fields)
    (output,) = llm.chat(message, GREEDY, use_tqdm=False)
    return output


def make_embeds(llm: LLM, modality: str, media: object) -> torch.Tensor:
    renderer = ChatRenderer(llm.input_processor.processor)
    prompt = renderer.render(make_message(modality, media))
    processed, tensors = process_with_tensors(llm, "embeds", prompt, GREEDY)
    (feature,) = processed.request.mm_features
    num_embeds = [feature.mm_position.get_num_embeds()]
    with torch.inference_mode():
        (embeds,) = get_hf_model(llm).encode(modality, [tensors[feature.mm_hash]], num_embeds)
    return embeds.clone()


def encode(embeds: torch.Tensor) -> str:
    tensor = {
        "dtype": str(embeds.dtype).removeprefix("torch."),
        "shape": list(embeds.shape),
        "data": embeds.contiguous().view(torch.uint8).numpy().tobytes(),
    }
    return base64.b64encode(msgspec.msgpack.encode({"tensors": {"embeds": tensor}})).decode()


def get_answer(output: RequestOutput) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return output.prompt_token_ids, output.outputs[0].token_ids


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_get_the_answer_of_the_media_that_they_were_made_of(
    tiny_model: TinyModel, name: str
) -> None:
    modality = FAMILIES[name]
    with make_llm(tiny_model(name), enable_mm_embeds=True) as llm:
        media, other = (make_media(modality, seed=seed) for seed in (1, 2))
        expected = get_answer(ask(llm, modality, media))
        assert get_answer(ask(llm, modality, other)) != expected
        embeds = make_embeds(llm, modality, media)
        for given in (embeds, encode(embeds)):
            assert get_answer(ask(llm, f"{modality}_embeds", given)) == expected
        assert_idle(llm)


def test_image_features_from_transformers_are_valid_embeddings(llm: LLM) -> None:
    image = make_new_image()
    processor = llm.input_processor.processor.hf_processor
    pixels = processor.image_processor(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        features = get_hf_model(llm).model.get_image_features(pixel_values=pixels).pooler_output
    (embeds,) = features
    expected = get_answer(ask(llm, "image", image))
    assert get_answer(ask(llm, "image_embeds", embeds)) == expected


def test_embeddings_and_media_may_be_in_one_prompt(llm: LLM) -> None:
    image, other = make_new_image(), make_new_image()
    embeds = make_embeds(llm, "image", image)
    prompt = {"prompt": "<image><image>which?"}
    parts = [{"image": [image, other]}, {"image": [PrecomputedEmbeds(embeds), other]}]
    answers = []
    for data in parts:
        forget_outputs(llm)
        answers += llm.generate({**prompt, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    assert get_answer(answers[0]) == get_answer(answers[1])


@pytest.mark.parametrize("cache_type", ["lru", "shm", "off"])
@pytest.mark.parametrize("pool_size", [0, 1])
def test_caches_and_pools_make_no_difference(
    tiny_model: TinyModel, llm: LLM, cache_type: str, pool_size: int
) -> None:
    image = make_new_image()
    embeds, expected = make_embeds(llm, "image", image), get_answer(ask(llm, "image", image))
    options = {**OPTIONS[cache_type], "mm_processor_pool_size": pool_size}
    with make_llm(
        tiny_model("llava"), max_model_len=256, enable_mm_embeds=True, **options
    ) as other:
        first, second = (ask(other, "image_embeds", embeds.clone()) for _ in range(2))
        assert get_answer(first) == get_answer(second) == expected
        assert first.mm_items[0].mm_hash == second.mm_items[0].mm_hash
        assert second.mm_items[0].is_processor_hit == (cache_type != "off")
        assert "process" not in first.mm_items[0].times
        assert_idle(other)


def test_a_tensor_that_changes_afterwards_changes_nothing(llm: LLM) -> None:
    embeds = make_embeds(llm, "image", make_new_image())
    expected = get_answer(ask(llm, "image_embeds", embeds, uuid="changing"))
    embeds.zero_()
    assert get_answer(ask(llm, "image_embeds", None, uuid="changing")) == expected


@pytest.mark.parametrize(
    ("embeds", "reason"),
    [
        (torch.zeros(4, 63), "width 64, not 63"),
        (torch.full((4, 64), torch.nan), "not finite"),
        (torch.full((4, 64), torch.inf), "not finite"),
        (torch.zeros(4, 64, dtype=torch.long), "floating-point"),
        (torch.zeros(300, 64), "context"),
        (torch.full((4, 64), 1e300, dtype=torch.float64), "not finite"),
    ],
)
def test_embeddings_that_the_model_can_not_take_are_refused(
    llm: LLM, embeds: torch.Tensor, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        ask(llm, "image_embeds", embeds)
    assert_idle(llm)


def test_embeddings_are_refused_unless_an_operator_allows_them(llm_of: LlmOf) -> None:
    with pytest.raises(RequestError, match=r"content\[0\]: .* start it with enable_mm_embeds"):
        ask(llm_of("lru"), "image_embeds", torch.zeros(4, 64))


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "internvl", "idefics3"])
def test_embeddings_are_refused_for_models_that_need_more_than_their_number(
    tiny_model: TinyModel, name: str
) -> None:
    with make_llm(tiny_model(name), enable_mm_embeds=True) as llm:
        with pytest.raises(RequestError, match="takes no embeddings of image"):
            ask(llm, "image_embeds", torch.zeros(4, 64))
        assert_idle(llm)


def test_a_model_without_the_modality_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="this model takes no audio"):
        ask(llm, "audio_embeds", torch.zeros(4, 64))
