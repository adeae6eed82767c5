"""A model's way to answer: found by its name, or by looking at its template and its vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sensorium.grammar.translation import make_grammar_after
from sensorium.render.answers import names, syntax
from sensorium.render.answers.interface import AnswerContext, AnswerReader
from sensorium.render.answers.lark import Lark
from sensorium.render.answers.reader import ReaderRules, resume_reader, start_reader
from sensorium.render.answers.reasoning import REASONING, ReasoningTags
from sensorium.render.answers.syntax import CallSyntax
from sensorium.render.answers.vocabulary import Vocabulary
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)
_NUM_TAIL_TOKENS = 16
_NUM_TAIL_CHARACTERS = 64
_DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"


class ModelAnswerFormat:
    """An `AnswerFormat`. `calls`: `None` if they are not read; those that a request demands are
    written and read as Hermes' then.
    """

    def __init__(
        self,
        *,
        calls: CallSyntax | None = None,
        reasoning: ReasoningTags | None = None,
        vocabulary: Vocabulary | None = None,
        shows_tools: bool = False,
        max_string_length: int | None = None,  # of strings that a schema leaves free
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._vocabulary = vocabulary or Vocabulary()
        self._shows_tools = shows_tools
        self._max_string_length = max_string_length
        tags = () if reasoning is None else (reasoning.open, reasoning.close, "<|channel>")
        wanted = (*(calls or syntax.HERMES).special_tokens, *tags)
        special = self._vocabulary.special_tokens
        self._kept = tuple(special[text] for text in wanted if text in special)

    @property
    def kept_special_token_ids(self) -> tuple[int, ...]:
        return self._kept

    @property
    def shows_tools(self) -> bool:
        return self._shows_tools

    def opens_reasoning(self, prompt: str | Sequence[int]) -> bool:
        if self._reasoning is None:
            return False
        if not isinstance(prompt, str):
            prompt = self._vocabulary.decode(prompt[-_NUM_TAIL_TOKENS:])
        return self._reasoning.is_open_after(prompt[-_NUM_TAIL_CHARACTERS:])

    def start(self, context: AnswerContext) -> AnswerReader:
        return start_reader(self._make_rules(context), context)

    def resume(self, context: AnswerContext, state: Any) -> AnswerReader:
        return resume_reader(self._make_rules(context), context, state)

    def make_constraint(self, context: AnswerContext) -> StructuredOutputsParams | None:
        if not context.demands_call:
            return None
        lark = Lark(self._vocabulary.special_tokens, max_string_length=self._max_string_length)
        lark.add("start", "")
        is_single = not context.parallel_tool_calls or not isinstance(context.tool_choice, str)
        calls = (self._calls or syntax.HERMES).write_calls
        body = calls(lark, context.demanded_tools, is_single)
        lark.add("start", f"{self._write_reasoning(lark, context)} {body}")
        try:
            return StructuredOutputsParams(grammar=lark.write())
        except RequestError as error:
            raise RequestError(
                f"too large for a call to be demanded: {error.message}", path=("tools",)
            ) from error

    def make_constraint_after_reasoning(
        self, wanted: StructuredOutputsParams
    ) -> StructuredOutputsParams:
        if self._reasoning is None:
            return wanted
        close = self._reasoning.close
        token_id = self._vocabulary.special_tokens.get(close)
        return make_grammar_after(
            wanted, close, token_id=token_id, max_string_length=self._max_string_length
        )

    def _write_reasoning(self, lark: Lark, context: AnswerContext) -> str:
        """What may come before the calls."""
        if self._reasoning is None:
            return ""
        thought = lark.add_until("thought", self._reasoning.close) + ' "\\n"? "\\n"?'
        if context.starts_in_reasoning:
            return thought
        opening = lark.write_tag(self._reasoning.open)
        return f"({opening} {thought})?"

    def _make_rules(self, context: AnswerContext) -> ReaderRules:
        calls = self._calls
        if context.demands_call:
            calls = calls or syntax.HERMES
        return ReaderRules(reasoning=self._reasoning, calls=calls if context.reads_calls else None)


def make_answer_format(
    tokenizer: Any,
    template: str,
    *,
    tool_call_parser: str = names.AUTO,
    reasoning_parser: str = names.AUTO,
    max_string_length: int | None = None,
) -> ModelAnswerFormat:
    """Return how this model writes its answers.

    `template` is the text of the model's chat template, or of all that it has. Strings that a
    schema of a tool leaves free get at most `max_string_length` characters. Raise a `RequestError`
    that lists the names if one is unknown.
    """
    _check_name("tool_call_parser", tool_call_parser, names.TOOL_CALL_PARSERS)
    _check_name("reasoning_parser", reasoning_parser, names.REASONING_PARSERS)
    vocabulary = Vocabulary.of(tokenizer)
    call_name, reasoning_name = tool_call_parser, reasoning_parser
    if call_name == names.AUTO:
        call_name = _find_call_format(vocabulary, template)
    if reasoning_name == names.AUTO:
        reasoning_name = _find_reasoning_format(vocabulary, template)
    logger.info("answers are read as: tool calls %s, reasoning %s", call_name, reasoning_name)
    return ModelAnswerFormat(
        calls=_get_calls(call_name, vocabulary, template),
        reasoning=REASONING.get(reasoning_name),
        vocabulary=vocabulary,
        shows_tools="tools" in template or vocabulary.is_mistral,
        max_string_length=max_string_length,
    )


def _check_name(flag: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise RequestError(f"{flag} must be one of {', '.join(known)}, not {name[:100]!r}")


def _get_calls(name: str, vocabulary: Vocabulary, template: str) -> CallSyntax | None:
    if name == "mistral":
        is_named = "[ARGS]" in template or vocabulary.mistral_version >= 11
        return syntax.MISTRAL_NAMED if is_named else syntax.MISTRAL_LIST
    known = {"hermes": syntax.HERMES, "gemma4": syntax.GEMMA4, "pythonic": syntax.PYTHONIC}
    return known.get(name)


def _find_call_format(vocabulary: Vocabulary, template: str) -> str:
    if "<|tool_call>" in vocabulary or "<|tool_call>" in template:
        return "gemma4"
    if vocabulary.is_mistral or "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # what has `<function=` in it only looks like Hermes' calls
        return names.NONE if "<function=" in template else "hermes"
    return "pythonic" if "tool_code" in template else names.NONE


def _find_reasoning_format(vocabulary: Vocabulary, template: str) -> str:
    if "<|channel>" in vocabulary or "<|channel>" in template:
        return "gemma4"
    # Mistral's vocabularies had the tag before its models did.
    if vocabulary.mistral_version >= 13 or "[THINK]" in template:
        return "mistral"
    if "</think>" not in template and "<think>" not in template:
        return names.NONE
    return "deepseek_r1" if _DEEPSEEK_TURN in template else "qwen3"


PLAIN = ModelAnswerFormat()
