"""Tools and reasoning through OpenAI's own client, with an engine that follows a script."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

from sensorium.render.answers.format import make_answer_format
from sensorium.server.http.openai import chat as chat_answers
from sensorium.types.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestDelta,
    RequestOutput,
)
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, serve

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nParis, then.\n</think>\n\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
HI: Any = [{"role": "user", "content": "hi"}]
# Three tokens; 5 is special and stays in the text.
TOKENIZER = SimpleNamespace(
    added_tokens_decoder={5: SimpleNamespace(content="<tool_call>", special=True)},
    decode=lambda ids: "<think>\n" if 99 in ids else "assistant\n",
)


@dataclass
class SpeakingEngine(ScriptedEngine):
    """Says `text`, a few characters a token."""

    text: str = ""
    length: int = 3
    prompt_token_ids: tuple[int, ...] = (1, 2)
    reason: FinishReason = FinishReason.STOP

    async def stream(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        may_repeat: bool = False,
    ) -> AsyncGenerator[RequestDelta, None]:
        del group, may_repeat
        self.calls.append((prompt, params))
        pieces = [self.text[i : i + self.length] for i in range(0, len(self.text), self.length)]
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            entries = tuple(
                CompletionDelta(
                    index=choice,
                    text=piece,
                    token_ids=(index,),
                    finish_reason=self.reason if is_last else None,
                    logprobs=None if params.logprobs is None else (_make_logprob(index, piece),),
                )
                for choice in range(params.n)
            )
            final = self._make_output(pieces, params, request_id) if is_last else None
            yield RequestDelta(
                request_id=request_id,
                deltas=entries,
                prompt_token_ids=self.prompt_token_ids,
                final=final,
            )

    def _make_output(
        self, pieces: list[str], params: SamplingParams, request_id: str
    ) -> RequestOutput:
        logprobs = tuple(_make_logprob(index, piece) for index, piece in enumerate(pieces))
        outputs = tuple(
            CompletionOutput(
                index=choice,
                text=self.text,
                token_ids=tuple(range(len(pieces))),
                finish_reason=self.reason,
                logprobs=None if params.logprobs is None else logprobs,
            )
            for choice in range(params.n)
        )
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=True,
        )


def _make_logprob(token_id: int, text: str) -> dict[int, Logprob]:
    return {token_id: Logprob(logprob=-1.0, rank=1, decoded_token=text)}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    template = "{{ tools }}<tool_call><think>"
    with serve(SpeakingEngine(), make_answer_format(TOKENIZER, template)) as running:
        yield running


@pytest.fixture
def engine(server: RunningServer) -> Any:
    server.engine.__dict__.update(SpeakingEngine().__dict__)
    return server.engine


@pytest.fixture
def openai(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(openai: OpenAI, **options: Any) -> Any:
    return openai.chat.completions.create(model="tiny", messages=HI, **options)


def join(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Return what a client joins from a stream, and the order of its parts."""
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "order": []}
    for choice in (c for chunk in chunks for c in chunk.choices if c.index == index):
        delta = choice.delta
        if delta.role:
            whole["order"].append("role")
        if delta.content:
            whole["content"] += delta.content
            whole["order"].append("content")
        if reasoning := (delta.model_extra or {}).get("reasoning_content"):
            whole["reasoning"] += reasoning
            whole["order"].append("reasoning")
        for call in delta.tool_calls or ():
            whole["order"].append("call")
            if call.index == len(whole["calls"]):
                assert (call.type, bool(call.id), bool(call.function.name)) == (
                    "function",
                    True,
                    True,
                )
                whole["calls"].append([call.function.name, ""])
            else:
                assert call.id is None
                assert call.function.name is None
            whole["calls"][call.index][1] += call.function.arguments
        if choice.finish_reason:
            whole["reason"] = choice.finish_reason
            whole["order"].append("end")
    return whole


def test_a_tool_call_has_the_shape_of_openai(openai: OpenAI, engine: Any) -> None:
    engine.text = CALL
    (choice,) = ask(openai, tools=[TOOL]).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")
    (prompt, params) = engine.calls[-1]
    assert prompt.options.tools == [TOOL]
    assert params.kept_special_token_ids == (5,)


@pytest.mark.parametrize("length", [1, 3, 7, 1000])
def test_a_stream_adds_up_to_the_whole_answer(openai: OpenAI, engine: Any, length: int) -> None:
    engine.text, engine.length = f"{THOUGHT}Let me see.\n{CALL}\n{CALL}\n", length
    options: Any = {"tools": [TOOL, OTHER], "n": 2, "logprobs": True, "stream": False}
    whole = ask(openai, **options)
    chunks = list(
        ask(openai, **{**options, "stream": True}, stream_options={"include_usage": True})
    )
    for choice in whole.choices:
        joined = join(chunks, choice.index)
        message = choice.message
        assert joined["content"] == message.content == "Let me see."
        assert joined["reasoning"] == message.model_extra["reasoning_content"] == "Paris, then."
        assert [tuple(call) for call in joined["calls"]] == [
            (call.function.name, call.function.arguments) for call in message.tool_calls
        ]
        assert len(joined["calls"]) == 2
        assert joined["reason"] == choice.finish_reason == "tool_calls"
        assert (joined["order"][0], joined["order"][-1]) == ("role", "end")
        rest = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        told = [entry.token for c in rest if c.logprobs for entry in c.logprobs.content]
        assert told == [entry.token for entry in choice.logprobs.content]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_arguments_are_streamed_in_pieces(openai: OpenAI, engine: Any) -> None:
    engine.text = CALL
    order = join(list(ask(openai, tools=[TOOL], stream=True)))["order"]
    assert order[0] == "role"
    assert order[-1] == "end"
    assert order.count("call") > 3


def test_parts_of_an_answer_come_in_their_order(openai: OpenAI, engine: Any) -> None:
    engine.text = f"{THOUGHT}Yes. {CALL}"
    order = join(list(ask(openai, tools=[TOOL], stream=True)))["order"]
    assert [o for i, o in enumerate(order) if o not in order[:i]] == [
        *("role", "reasoning", "content", "call", "end")
    ]


def test_without_tools_calls_are_text(openai: OpenAI, engine: Any) -> None:
    engine.text = CALL
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}):
        (choice,) = ask(openai, **options).choices
        assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
        assert choice.finish_reason == "stop"


def test_without_parallel_calls_only_one_is_returned(openai: OpenAI, engine: Any) -> None:
    engine.text = CALL + CALL
    (choice,) = ask(openai, tools=[TOOL], parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"


def test_an_answer_that_was_cut_off_says_so(openai: OpenAI, engine: Any) -> None:
    engine.text, engine.reason = CALL[:60], FinishReason.LENGTH
    (choice,) = ask(openai, tools=[TOOL]).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"')
    assert join(list(ask(openai, tools=[TOOL], stream=True)))["reason"] == "length"


def test_reasoning_that_the_prompt_opened_is_separated(openai: OpenAI, engine: Any) -> None:
    engine.text, engine.prompt_token_ids = "So.\n</think>\n\nHi", (1, 99)
    message = ask(openai).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("Hi", "So.")
    joined = join(list(ask(openai, stream=True)))
    assert (joined["content"], joined["reasoning"]) == ("Hi", "So.")


def test_reasoning_may_be_left_out(openai: OpenAI, engine: Any) -> None:
    engine.text = f"{THOUGHT}Hi"
    options = {"extra_body": {"include_reasoning": False}}
    message = ask(openai, **options).choices[0].message
    assert (message.content, message.model_extra) == ("Hi", {})
    chunks = list(ask(openai, stream=True, **options))
    joined = join(chunks)
    assert (joined["content"], joined["reasoning"]) == ("Hi", "")
    assert all(choice.delta.content or choice.delta.role or choice.finish_reason
               for chunk in chunks for choice in chunk.choices)  # fmt: skip


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_demanded_call_is_constrained_when_the_prompt_is_known(
    openai: OpenAI, engine: Any, choice: Any
) -> None:
    engine.text = CALL
    answer = ask(openai, tools=[TOOL, OTHER], tool_choice=choice).choices[0]
    assert (answer.finish_reason, len(answer.message.tool_calls)) == ("tool_calls", 1)
    prompt, params = engine.calls[-1]
    assert params.structured_outputs is None
    for text, start in (("assistant\n", 'start: ("<think>"'), ("<think>\n", "start: thought_")):
        adapted = prompt.adapt_params(text, params).structured_outputs
        assert adapted.grammar.startswith(start)
        assert ("time" in adapted.grammar) == (choice == "required")
    ask(openai, tools=[TOOL])
    prompt, params = engine.calls[-1]
    assert prompt.adapt_params("<think>", params) is params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{**TOOL, "type": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [OTHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a\n"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "x" * 129}}]}, "tools[0].function.name"),
        ({"tools": [OTHER, OTHER]}, "tools[1].function.name"),
        (
            {"tools": [{"function": {"name": "a", "description": 1}}]},
            "tools[0].function.description",
        ),
        ({"tools": [{"function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict"),
        (
            {"tools": [{"function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters.properties",
        ),
        (
            {"tools": [{"function": {"name": "a", "parameters": {"required": [1]}}}]},
            "tools[0].function.parameters.required",
        ),
        ({"tools": [OTHER] * 1025}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "x"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"function": 1}}, "tool_choice.function.name"),
        (
            {"tools": [TOOL], "tool_choice": {"function": {"name": "time"}}},
            "tool_choice.function.name",
        ),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ],
)
def test_a_wrong_field_is_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_special_tokens_may_be_asked_for(server: RunningServer, engine: Any) -> None:
    engine.text = "x"
    assert server.chat(skip_special_tokens=False).status_code == 200
    assert not engine.calls[-1][1].skip_special_tokens
    assert server.complete(skip_special_tokens=False).status_code == 200
    assert not engine.calls[-1][1].skip_special_tokens


def test_a_template_that_shows_no_tools_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    chat_answers._warn_of_hidden_tools.cache_clear()
    with serve() as running, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert running.chat(tools=[TOOL]).status_code == 200
    assert caplog.text.count("does not show tools") == 1
