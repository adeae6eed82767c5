"""A conversation becomes a prompt with markers that match its items."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.render.messages import ChatOptions
from sensorium.render.renderer import ChatRenderer
from sensorium.types.errors import RequestError
from tests.unit.render import templates

MARKERS = {"image": "<image>", "audio": "<audio>"}


def make_renderer(
    template: Any = templates.COUNTED,
    *,
    modalities: tuple[str, ...] = ("image",),
    bos_token: str | None = "<s>",
    tokenizer_template: Any = None,
) -> ChatRenderer:
    tokenizer = SimpleNamespace(
        bos_token=bos_token,
        special_tokens_map={} if bos_token is None else {"bos_token": bos_token},
        chat_template=tokenizer_template,
    )
    hf_processor = SimpleNamespace(chat_template=template) if modalities else None
    processor: Any = SimpleNamespace(
        hf_processor=hf_processor,
        tokenizer=tokenizer,
        modalities=modalities,
        markers={modality: MARKERS[modality] for modality in modalities},
        streaming_audio=None,
    )
    return ChatRenderer(processor)


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image(item: object, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": item, **more}


def test_items_come_in_the_order_of_their_markers() -> None:
    messages = [
        *ask(image("a"), "one", image("b", uuid="u")),
        {"role": "assistant", "content": "ok"},
        *ask("two", image("c")),
    ]
    prompt = make_renderer().render(messages)
    assert prompt.text == (
        "<|im_start|>user\n<image>one<image><|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\ntwo<image><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [item.media for item in prompt.media] == ["a", "b", "c"]
    assert [item.uuid for item in prompt.media] == [None, "u", None]
    places = [(0, 0), (0, 2), (2, 1)]
    paths = [("messages", index, "content", part) for index, part in places]
    assert [item.path for item in prompt.media] == paths


def test_text_without_media_renders_no_items() -> None:
    prompt = make_renderer().render(ask("hello"))
    assert prompt.media == ()


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ("see <image>", r"messages\[0\].content: contains '<image>'"),
        ([image("a"), "see <image>"], r"messages\[0\].content\[1\].text: contains '<image>'"),
    ],
)
def test_a_marker_in_user_text_is_refused(content: Any, path: str) -> None:
    with pytest.raises(RequestError, match=path):
        make_renderer().render([{"role": "user", "content": content}])


def test_a_marker_that_is_put_together_of_parts_is_refused() -> None:
    with pytest.raises(RequestError, match="'<image>' 2 times, but the conversation has 1 image"):
        make_renderer().render(ask("<ima", "ge>", image("a")))


def test_a_marker_in_a_tool_is_refused() -> None:
    options = ChatOptions(tools=[{"description": "<image>"}])
    with pytest.raises(RequestError, match="'<image>' 1 times, but the conversation has 0 image"):
        make_renderer(templates.TOOLS).render(ask("a"), options)


def test_a_template_that_drops_a_message_can_not_shift_its_media() -> None:
    last_only = "{{ messages[-1].content if messages[-1].content is string else '<image>' }}"
    messages = [*ask(image("a")), {"role": "assistant", "content": "ok"}, *ask(image("b"))]
    with pytest.raises(RequestError, match="'<image>' 1 times, but the conversation has 2 image"):
        make_renderer(last_only).render(messages)


def test_a_modality_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(RequestError, match=r"takes no audio \(it takes: image\)"):
        make_renderer().render(ask({"type": "audio", "audio": b"x"}))
    with pytest.raises(RequestError, match=r"takes no image \(it takes: text only\)"):
        make_renderer(modalities=(), tokenizer_template=templates.DUMPS).render(ask(image("a")))


@pytest.mark.parametrize(
    ("template", "modalities", "bos_token", "expected"),
    [
        (templates.STRICT, ("image",), "<s>", False),  # the template has written it
        (templates.COUNTED, ("image",), "<s>", True),
        (templates.COUNTED, ("image",), None, True),
        (templates.COUNTED, (), "<s>", False),  # a tokenizer adds nothing to a chat
    ],
)
def test_special_tokens_are_added_where_transformers_adds_them(
    template: str, modalities: tuple[str, ...], bos_token: str | None, expected: bool
) -> None:
    renderer = make_renderer(
        template, modalities=modalities, bos_token=bos_token, tokenizer_template=template
    )
    assert renderer.render(ask("a")).add_special_tokens is expected


def test_templates_are_found_in_their_order() -> None:
    def name_of(renderer: ChatRenderer, **options: Any) -> str:
        return renderer.render(ask("a"), ChatOptions(**options)).text or ""

    own = make_renderer("processor", tokenizer_template="tokenizer")
    assert name_of(own) == "processor"
    assert name_of(own, chat_template="mine") == "mine"
    assert name_of(make_renderer(None, tokenizer_template="tokenizer")) == "tokenizer"
    named = make_renderer({"default": "first", "tool_use": "second", "rag": "third"})
    assert name_of(named) == "first"
    assert name_of(named, tools=[{"name": "f"}]) == "second"
    assert name_of(named, chat_template="rag") == "third"


def test_a_model_without_a_template_needs_one() -> None:
    with pytest.raises(RequestError, match="this model has no chat template"):
        make_renderer(None).render(ask("a"))
    message = "chat_template: must name one of the model's templates: other, rag"
    with pytest.raises(RequestError, match=message):
        make_renderer({"other": "a", "rag": "b"}).render(ask("a"))


def test_templates_that_callers_bring_are_kept_in_bounds() -> None:
    renderer = make_renderer()
    for index in range(100):
        renderer.render(ask("a"), ChatOptions(chat_template=f"template {index}"))
    assert renderer._get_template.cache_info().currsize == 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "<image>", "data:,"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["url", "data", "text", "function"]), inner, max_size=2)
    ),
    max_leaves=4,
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "image", "input_audio", "audio", "x"]) | JSON},
    optional={name: JSON for name in ("text", "image_url", "image", "input_audio", "uuid", "url")},
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JSON},
    optional={
        "content": JSON | st.lists(PARTS | JSON, max_size=3),
        "tool_calls": JSON,
        "name": JSON,
    },
)
RENDERERS = [
    make_renderer(source, modalities=("image", "audio"))
    for source in (templates.COUNTED, templates.STRINGS, templates.STRICT, templates.TOOLS)
]


@given(messages=st.lists(MESSAGES | JSON, max_size=3), renderer=st.sampled_from(RENDERERS))
def test_anything_gives_a_prompt_with_a_marker_per_item_or_a_request_error(
    messages: list[Any], renderer: ChatRenderer
) -> None:
    try:
        prompt = renderer.render(messages)
    except RequestError:
        return
    for modality, marker in MARKERS.items():
        num_items = sum(item.modality == modality for item in prompt.media)
        assert (prompt.text or "").count(marker) == num_items
