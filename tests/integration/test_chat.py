"""Conversations: the tokens that Transformers makes of them, answers at once or streamed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer

from sensorium import LLM, RequestError, SamplingParams
from sensorium.types.outputs import RequestDelta
from tests.integration.neighbours import PARAMS
from tests.parity.cases import FAMILIES, MODALITIES, make_audio, make_image, make_media
from tests.parity.reference import make_voxtral_messages
from tests.support.engine import assert_nothing_is_left, get_token_ids, make_llm
from tests.support.media import make_pixels, write_image

TinyModel = Callable[[str], str]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=7)
NO_TEXT = "{% for m in messages %}{{ m['role'] }}{% endfor %}"


@pytest.fixture(scope="module")
def llava(tiny_model: TinyModel) -> LLM:
    return make_llm(tiny_model("llava"), max_model_len=256)


def make_messages(family: str) -> list[dict[str, Any]]:
    """Make two rounds, both with media of every kind that the model takes.

    One round has none where Transformers can't: it gives LLaVA-OneVision fewer tiles where a
    conversation has two pictures.
    """
    media = [
        {"type": modality, modality: make_media(modality, seed=index)}
        for index, modality in enumerate(MODALITIES[family])
        if (family, modality) not in {("smolvlm", "image"), ("glm4v", "video")}
    ]
    second = [] if family in ("audioflamingo3", "llava_onevision") else media
    return [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [*media, {"type": "text", "text": "what is this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "the lazy dog"}]},
        {"role": "user", "content": [{"type": "text", "text": "and this?"}, *second]},
    ]


def get_expected_ids(directory: str, messages: list[dict[str, Any]]) -> list[int]:
    """What Transformers makes of the conversation, from the messages to the tokens."""
    if directory.endswith(("llama", "phi3")):  # a tokenizer alone
        ids = AutoTokenizer.from_pretrained(directory).apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return list(ids)
    inputs = AutoProcessor.from_pretrained(directory).apply_chat_template(
        messages,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs={"do_sample_frames": False, "return_tensors": "pt"},
    )
    return list(inputs["input_ids"][0].tolist())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "voxtral"])
def test_a_conversation_has_the_tokens_that_transformers_gives_it(
    tiny_model: TinyModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.processing_utils.load_audio", lambda audio, **_: audio)
    messages = make_messages(family)
    llm = make_llm(tiny_model(family), max_model_len=2048)
    (output,) = llm.chat(messages, replace(PARAMS, max_tokens=1), use_tqdm=False)
    assert list(output.prompt_token_ids) == get_expected_ids(tiny_model(family), messages)


def test_voxtrals_tokenizer_makes_the_tokens_itself(tiny_model: TinyModel) -> None:
    case_parts = ("listen", make_audio(0.7, seed=1), "then [AUDIO] ", make_audio(0.4, seed=2))
    first = make_voxtral_messages(_Parts(case_parts))  # type: ignore[arg-type]
    rest = [{"role": "assistant", "content": "a dog"}, {"role": "user", "content": "sure?"}]
    expected = AutoProcessor.from_pretrained(tiny_model("voxtral")).apply_chat_template(
        [*first, *rest]
    )
    content = [
        part if isinstance(part, str) else {"type": "audio", "audio": part} for part in case_parts
    ]
    llm = make_llm(tiny_model("voxtral"), max_model_len=2048)
    messages = [{"role": "user", "content": content}, *rest]
    (output,) = llm.chat(messages, replace(PARAMS, max_tokens=1), use_tqdm=False)
    assert list(output.prompt_token_ids) == expected["input_ids"][0].tolist()
    with pytest.raises(RequestError, match="the tokenizer refuses this conversation"):
        llm.chat([{"role": "system", "content": "be"}, *messages], PARAMS, use_tqdm=False)
    with pytest.raises(RequestError, match="tokenizer has its own chat format"):
        llm.chat(messages, PARAMS, chat_template=NO_TEXT, use_tqdm=False)
    with pytest.raises(RequestError, match="the last message is the assistant's"):
        llm.chat(messages[:-1], PARAMS, use_tqdm=False)


class _Parts:
    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts


def test_the_first_token_is_not_doubled(tiny_model: TinyModel) -> None:
    """Where both the template and the tokenizer write it, as with the real Gemma."""
    from tokenizers.processors import TemplateProcessing

    messages = make_messages("gemma3")
    llm = make_llm(tiny_model("gemma3"))
    tokenizer = llm.get_tokenizer()
    bos = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[bos]
    )
    params = replace(PARAMS, max_tokens=1)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert list(output.prompt_token_ids) == get_expected_ids(tiny_model("gemma3"), messages)
    assert output.prompt_token_ids.count(bos[1]) == 1
    (plain,) = llm.generate("<bos>hello", params, use_tqdm=False)
    assert plain.prompt_token_ids.count(bos[1]) == 2  # a plain prompt is tokenised as it is


def ask(text: str, seed: int | None = None) -> list[dict[str, Any]]:
    content: list[Any] = [{"type": "text", "text": text}]
    if seed is not None:
        content.insert(0, {"type": "image", "image": make_image(60, 60, seed=seed)})
    return [{"role": "user", "content": content}]


def test_a_chat_is_the_prompt_that_its_template_makes(llava: LLM) -> None:
    image = make_image(60, 60, seed=3)
    prompt = {
        "prompt": "<|im_start|>user\n<image>\nwhat is this?<|im_end|>\n<|im_start|>assistant\n",
        "multi_modal_data": {"image": [image]},
    }
    expected = get_token_ids(llava.generate([prompt], PARAMS, use_tqdm=False))
    (output,) = llava.chat(ask("what is this?", seed=3), PARAMS, use_tqdm=False)
    assert get_token_ids([output]) == expected
    assert output.prompt == prompt["prompt"]
    assert output.num_encoder_hits == 1


def test_each_of_many_conversations_fails_alone(llava: LLM) -> None:
    conversations = [
        ask("one", seed=1),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 5}}]}],
        ask("three"),
        ask("<image>"),
    ]
    outputs = llava.chat(conversations, PARAMS, use_tqdm=False, return_errors=True)
    assert [output.error is None for output in outputs] == [True, False, True, False]
    alone = llava.chat(conversations[2], PARAMS, use_tqdm=False)
    assert get_token_ids(outputs[2:3]) == get_token_ids(alone)
    with pytest.raises(
        RequestError, match=r"prompts\[1\].messages\[0\].content\[0\].image_url.url"
    ):
        llava.chat(conversations, PARAMS, use_tqdm=False)
    assert llava.chat([], PARAMS, use_tqdm=False) == []
    assert_nothing_is_left(llava)


def test_options_reach_the_template_and_the_prompt(llava: LLM) -> None:
    template = "{{ greeting }} {{ messages[0].content[0].text }}"
    (output,) = llava.chat(
        ask("world"),
        PARAMS,
        chat_template=template,
        chat_template_kwargs={"greeting": "hello"},
        cache_salt="tenant",
        use_tqdm=False,
    )
    assert output.prompt == "hello world"
    with pytest.raises(TypeError, match="unknown option"):
        llava.chat(ask("a"), PARAMS, use_tqdm=False, temperatur=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="could not be processed"):
        llava.chat(ask("a", seed=1), PARAMS, mm_processor_kwargs={"size": "x"}, use_tqdm=False)


def collect(news: Generator[RequestDelta, None, None]) -> tuple[dict[int, str], RequestDelta]:
    texts: dict[int, str] = {}
    last: RequestDelta | None = None
    for entry in news:
        assert last is None or last.final is None
        last = entry
        for delta in entry.deltas:
            texts[delta.index] = texts.get(delta.index, "") + delta.text
    assert last is not None
    return texts, last


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stop", [(), ("e", "th")])
def test_a_streamed_answer_is_the_returned_one(llava: LLM, n: int, stop: tuple[str, ...]) -> None:
    params = replace(SAMPLED, n=n, stop=stop, max_tokens=40)
    (expected,) = llava.chat(ask("what?", seed=5), params, use_tqdm=False)
    texts, last = collect(llava.stream_chat(ask("what?", seed=5), params))
    assert last.final is not None
    assert last.final.outputs == expected.outputs
    assert texts == {completion.index: completion.text for completion in expected.outputs}
    assert_nothing_is_left(llava)


def test_a_stream_yields_a_delta_after_every_token(llava: LLM) -> None:
    entries = list(llava.stream("hello", replace(SAMPLED, max_tokens=5)))
    assert [len(entry.deltas[0].token_ids) for entry in entries] == [1] * 5
    assert [entry.final is not None for entry in entries] == [False] * 4 + [True]
    assert entries[-1].deltas[0].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 2])
def test_closing_a_stream_ends_its_request_and_leaves_nothing(llava: LLM, n: int) -> None:
    news = llava.stream("hello", replace(SAMPLED, n=n, max_tokens=100))
    next(news)
    assert llava.core.has_requests
    news.close()
    assert_nothing_is_left(llava)
    assert llava._driver.outputs.changed_ids == ()
    never_started = llava.stream("hello")
    never_started.close()
    assert_nothing_is_left(llava)


def test_streams_and_calls_may_be_interleaved(llava: LLM) -> None:
    prompts = ["the quick brown", "hello world", "the lazy dog"]
    params = replace(SAMPLED, max_tokens=12)
    expected = llava.generate(prompts, params, use_tqdm=False)
    streams = [llava.stream(prompt, params) for prompt in prompts[:2]]
    texts = ["", ""]
    for index, news in enumerate(streams):
        texts[index] += next(news).deltas[0].text
    (between,) = llava.generate(prompts[2:], params, use_tqdm=False)
    assert between.outputs == expected[2].outputs
    for index, news in enumerate(streams):
        texts[index] += "".join(entry.deltas[0].text for entry in news)
    assert texts == [output.outputs[0].text for output in expected[:2]]
    assert_nothing_is_left(llava)


def test_errors_in_a_streamed_prompt_are_raised(llava: LLM) -> None:
    with pytest.raises(RequestError, match="messages: must not be empty"):
        next(llava.stream_chat([[]], PARAMS))  # type: ignore[list-item]
    with pytest.raises(RequestError, match="one conversation can be streamed, not 2"):
        llava.stream_chat([ask("a"), ask("b")], PARAMS)  # type: ignore[list-item]
    with pytest.raises(RequestError, match="sampling params"):
        next(llava.stream("hello", 5))  # type: ignore[arg-type]
    assert_nothing_is_left(llava)


def test_a_stream_that_fails_raises_and_leaves_nothing(
    llava: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    news = llava.stream("hello", replace(SAMPLED, max_tokens=50))
    next(news)

    def fail(*_: object) -> None:
        raise ValueError("the GPU is on fire")

    with caplog.at_level(logging.CRITICAL), monkeypatch.context() as patch:
        patch.setattr(llava.core.runner, "launch", fail)
        with pytest.raises(RequestError, match="the GPU is on fire") as caught:
            next(news)
    (output,) = caught.value.outputs
    assert output.outputs[0].finish_reason == "error"  # type: ignore[attr-defined]
    assert_nothing_is_left(llava)


def test_a_stream_ends_when_an_interruption_ended_its_request(llava: LLM) -> None:
    first, second = (llava.stream("hello", replace(SAMPLED, max_tokens=50)) for _ in range(2))
    next(first), next(second)
    launch = llava.core.runner.launch

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    llava.core.runner.launch = interrupt  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in first:
                pass
    finally:
        llava.core.runner.launch = launch  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="ended by an interruption"):
        for _ in second:
            pass
    assert_nothing_is_left(llava)


# ---- files


def ask_with(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "what is this?"}]}]


def test_a_picture_may_be_the_path_of_its_file(
    llava: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_image(make_pixels(40, 60), "PNG")
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    given: tuple[Any, ...] = (data, path, str(path), path.name, Path(path.name))
    chats = [ask_with({"type": "image", "image": each}) for each in given]
    chats.append(ask_with({"type": "image", "path": str(path)}))
    prompts: list[Any] = [
        {"prompt": "<image>look", "multi_modal_data": {"image": media}}
        for media in (data, path, str(path), [path.name])
    ]
    for outputs in (
        llava.chat(chats, PARAMS, use_tqdm=False),
        llava.generate(prompts, PARAMS, use_tqdm=False),
    ):
        assert len({output.mm_items[0].mm_hash for output in outputs}) == 1
        assert len(set(get_token_ids(outputs))) == 1


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"image": "nowhere.png"}, "the file 'nowhere.png' can't be read: No such file"),
        ({"image": Path("nowhere.png")}, "the file 'nowhere.png' can't be read: No such file"),
        ({"image": "/"}, "the file '/' can't be read: it is no regular file"),
        ({"image": "/dev/zero"}, "the file '/dev/zero' can't be read: it is no regular file"),
        ({"image": "a\0b"}, r"the file 'a\x00b' can't be read: it is no regular file"),
        ({"image": "A" * 5000}, "the file '" + "A" * 200 + "'... can't be read: File name too"),
        ({"image": "file:///etc/hostname"}, "this server reads no local files"),
        ({"type": "image_url", "image_url": {"url": "/etc/hostname"}}, "media URLs start with"),
    ],
)
def test_an_invalid_path_is_an_error_of_its_part(
    llava: LLM, part: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as raised:
        llava.chat(ask_with({"type": "image", **part}), PARAMS, use_tqdm=False)
    assert raised.value.path[:4] == ("messages", 0, "content", 0)
    assert_nothing_is_left(llava)
