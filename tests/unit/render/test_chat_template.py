"""What a template takes is found by asking it, and it never sees media."""

from __future__ import annotations

from typing import Any

import pytest

from sensorium.render.chat_template import ChatTemplate
from sensorium.render.messages import ChatOptions, load_chat_template, parse_messages
from sensorium.types.errors import RequestError
from tests.unit.render import templates

IMAGE = {"type": "image", "image": "https://example.com/secret.png"}
QUESTION: list[dict[str, Any]] = [
    {"role": "user", "content": ["one", IMAGE, {"type": "text", "text": "two"}]}
]


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = ChatTemplate(
        source,
        markers={"image": "<image>", "video": "<video>"},
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
    return template.render(parse_messages(messages), ChatOptions(**options))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (templates.STRINGS, "<s>[INST] one\n<image>\ntwo [/INST]"),
        (templates.DUMPS, "user: one\n<image>\ntwo\n"),
        (templates.PICTURES_FIRST, "USER: <image>\none two ASSISTANT:"),
        (
            templates.COUNTED,
            "<|im_start|>user\none<image>two<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            templates.KEYED,
            "<|im_start|>user\none<image>two<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            templates.STRICT,
            "<s><start_of_turn>user\none<image>two<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
    ids=["strings", "dumps", "pictures first", "counted", "keyed", "strict"],
)
def test_media_is_rendered_in_the_form_that_the_template_supports(source: str, text: str) -> None:
    assert render(source, QUESTION) == text


def test_media_that_a_template_of_parts_does_not_support_becomes_its_marker() -> None:
    video = {"type": "video", "url": "https://example.com/secret.mp4"}
    text = render(templates.COUNTED, [{"role": "user", "content": [IMAGE, video, "what?"]}])
    assert text.startswith("<|im_start|>user\n<image><video>what?<|im_end|>")


def test_a_string_reaches_a_template_that_wants_parts() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "what?"},
    ]
    text = render(templates.PICTURES_FIRST, messages)
    assert text == "SYSTEM: be brief USER: hello ASSISTANT: hi USER: what? ASSISTANT:"


def test_parts_of_text_reach_a_template_that_wants_strings() -> None:
    messages = [
        {"role": "user", "content": ["one", "two"]},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
    ]
    assert render(templates.STRINGS, messages) == "<s>[INST] one\ntwo [/INST]three</s>"


def test_variables_of_the_template_can_be_set() -> None:
    text = render(templates.COUNTED, QUESTION, chat_template_kwargs={"add_vision_id": True})
    assert "onePicture 1: <image>two" in text


def test_an_objection_of_the_template_is_quoted() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="refuses this conversation: roles must alternate"):
        render(templates.STRICT, messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ messages[0].content.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_broken_template_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses"):
        render(source, QUESTION)


def test_a_template_sees_placeholders_and_no_media() -> None:
    source = "{{ messages[0].content | tojson }} {{ messages[0].content }}"
    assert "secret" not in render(source, QUESTION)
    seen = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% if c.type == 'image' %}<image>{{ c | length }}{% endif %}{% endfor %}{% endfor %}"  # noqa: E501
    assert render(seen, QUESTION) == "one<image>1two"


@pytest.mark.parametrize(("source", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_a_developer_message_becomes_a_system_message_where_unsupported(
    source: str, role: str
) -> None:
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": "a"}]
    assert render(source + templates.DUMPS, messages) == f"{role}: be\nuser: a\n"


def test_tools_and_their_calls_reach_the_template() -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        {"role": "user", "content": "what colour?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
    ]
    text = render(templates.TOOLS, messages, tools=[{"type": "function"}])
    assert text == (
        '{"type": "function"}\nuser: what colour?\nCALL look {"at": "sky"} True\ntool: blue\n'
    )


def test_a_template_without_tools_does_not_write_none() -> None:
    call = {"function": {"name": "look"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
    ]
    assert render(templates.DUMPS, messages) == "user: a\nassistant: \n"


def test_the_last_message_can_be_continued() -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    text = render(
        templates.COUNTED, messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_a_template_is_probed_once_per_form(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(templates.COUNTED, markers={"image": "<image>"}, special_tokens={})
    count = 0
    original = ChatTemplate._render

    def render_and_count(self: ChatTemplate, *arguments: Any, **more: Any) -> str:
        nonlocal count
        count += 1
        return original(self, *arguments, **more)

    monkeypatch.setattr(ChatTemplate, "_render", render_and_count)
    messages = parse_messages(QUESTION)
    template.render(messages, ChatOptions())
    assert count == 3  # parts of text, pictures, the conversation
    template.render(messages, ChatOptions())
    assert count == 4


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"chat_template": 5}, "chat_template: must be a string"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs: must be an object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: can't set messages"),
    ({"chat_template_kwargs": {1: 2}}, "must have strings as names"),
    ({"continue_final_message": True}, "needs add_generation_prompt=False"),
    ({"tools": {"a": 1}}, "tools: must be a list, not dict"),
    ({"tools": ["f"]}, r"tools\[0\]: must be an object, not str"),
]


@pytest.mark.parametrize(("options", "reason"), BAD_OPTIONS)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        ChatOptions(**options)


def test_a_template_may_be_given_as_text_or_file_or_name(tmp_path: Any) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(templates.DUMPS)
    assert load_chat_template(path) == load_chat_template(str(path)) == templates.DUMPS
    assert load_chat_template(templates.DUMPS) == templates.DUMPS
    assert load_chat_template("tool_use") == "tool_use"
    assert load_chat_template(None) is None
    for missing in (str(tmp_path / "none.jinja"), tmp_path / "none.jinja", tmp_path):
        with pytest.raises(RequestError, match="chat_template"):
            load_chat_template(missing)
