"""Finds the format of a model's answers by name, or from its chat template and vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from sensorium.grammar.translation import make_grammar_after
from sensorium.render.answers import formats
from sensorium.render.answers.answer import AnswerContext
from sensorium.render.answers.formats import hermes
from sensorium.render.answers.lark import Lark
from sensorium.render.answers.reader import AnswerReader, read_state
from sensorium.render.answers.syntax import CallFormat, ReasoningFormat, Vocabulary
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)
_NUM_TAIL_TOKENS = 16
_NUM_TAIL_CHARACTERS = 64
Format = TypeVar("Format", CallFormat, ReasoningFormat)


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The formats in which a model writes reasoning and tool calls in its answers.

    Without a format of tool calls, calls are read only if the request requires one: a grammar then
    makes the model write the call in the Hermes format.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    shows_tools: bool = False  # the chat template shows the tools to the model
    max_string_length: int | None = None  # characters of a string that a schema leaves free

    @cached_property
    def kept_special_token_ids(self) -> tuple[int, ...]:
        """Return the ids of special tokens that stay in the text, because they mark its parts."""
        tags = () if self.reasoning is None else self.reasoning.special_tokens
        wanted = (*(self.calls or hermes.CALLS).special_tokens, *tags)
        special = self.vocabulary.special_tokens
        return tuple(special[text] for text in wanted if text in special)

    def opens_reasoning(self, prompt: str | Sequence[int]) -> bool:
        """Return whether an answer to this prompt (text or token ids) begins inside reasoning."""
        if self.reasoning is None:
            return False
        if not isinstance(prompt, str):
            prompt = self.vocabulary.decode(prompt[-_NUM_TAIL_TOKENS:])
        return self.reasoning.is_open_after(prompt[-_NUM_TAIL_CHARACTERS:])

    def start(self, context: AnswerContext) -> AnswerReader:
        """Return a reader that reads an answer from its first character on."""
        return AnswerReader(context, calls=self._get_calls(context), reasoning=self.reasoning)

    def resume(self, context: AnswerContext, state: Any) -> AnswerReader:
        """Return a reader that continues an answer from the `state` of an earlier reader.

        Raise a `RequestError` if the state is invalid.
        """
        calls = self._get_calls(context)
        read = read_state(state, calls=calls, reasoning=self.reasoning)
        return AnswerReader(context, calls=calls, reasoning=self.reasoning, state=read)

    def make_constraint(self, context: AnswerContext) -> StructuredOutputsParams | None:
        """Return a grammar for the required tool call, or `None` if the request requires none.

        Raise a `RequestError` if the grammar of the tools becomes too large.
        """
        if not context.demands_call:
            return None
        lark = Lark(self.vocabulary.special_tokens, max_string_length=self.max_string_length)
        lark.add("start", "")
        is_single = not context.parallel_tool_calls or not isinstance(context.tool_choice, str)
        calls = self.calls or hermes.CALLS
        body = calls.write_calls(lark, context.demanded_tools, is_single)
        lark.add("start", f"{self._write_reasoning(lark, context)} {body}")
        try:
            return StructuredOutputsParams(grammar=lark.write())
        except RequestError as error:
            raise RequestError(
                f"are too large for a required tool call: {error.message}", path=("tools",)
            ) from error

    def make_constraint_after_reasoning(
        self, wanted: StructuredOutputsParams
    ) -> StructuredOutputsParams:
        """Return a constraint that leaves reasoning free and applies `wanted` to the text after it.

        The answer must begin inside reasoning. A model without reasoning gets `wanted` itself.
        """
        if self.reasoning is None:
            return wanted
        return make_grammar_after(
            wanted,
            self.reasoning.close,
            token_id=self.vocabulary.special_tokens.get(self.reasoning.close),
            max_string_length=self.max_string_length,
        )

    def _write_reasoning(self, lark: Lark, context: AnswerContext) -> str:
        """Return an expression for the reasoning before tool calls; empty if there is no format."""
        if self.reasoning is None:
            return ""
        thought = lark.add_until("thought", self.reasoning.close) + ' "\\n"? "\\n"?'
        if context.starts_in_reasoning:
            return thought
        return f"({lark.write_tag(self.reasoning.open)} {thought})?"

    def _get_calls(self, context: AnswerContext) -> CallFormat | None:
        if context.demands_call:
            return self.calls or hermes.CALLS
        return self.calls if context.reads_calls else None


def make_answer_format(
    tokenizer: Any,
    template: str,
    *,
    tool_call_parser: str = formats.AUTO,
    reasoning_parser: str = formats.AUTO,
    max_string_length: int | None = None,
) -> AnswerFormat:
    """Return the formats in which this model writes reasoning and tool calls.

    `template` is the text of the model's chat template, or of all templates that it has. The
    parsers are names of formats, "none", or "auto" to detect the format from the template and the
    tokenizer. Raise a `RequestError` that lists the known names if one is unknown.
    """
    vocabulary = Vocabulary.of(tokenizer)
    _check_name("tool_call_parser", tool_call_parser, formats.TOOL_CALL_PARSERS)
    _check_name("reasoning_parser", reasoning_parser, formats.REASONING_PARSERS)
    calls = _find_format(formats.CALL_FORMATS, tool_call_parser, vocabulary, template)
    reasoning = _find_format(formats.REASONING_FORMATS, reasoning_parser, vocabulary, template)
    names = [formats.NONE if found is None else found.name for found in (calls, reasoning)]
    logger.info("formats of answers: tool calls %s, reasoning %s", *names)
    if calls is not None and calls.choose_variant is not None:
        calls = calls.choose_variant(vocabulary, template)
    return AnswerFormat(
        calls=calls,
        reasoning=reasoning,
        vocabulary=vocabulary,
        shows_tools="tools" in template or vocabulary.is_mistral,
        max_string_length=max_string_length,
    )


def _check_name(flag: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise RequestError(f"{flag} must be one of {', '.join(known)}, not {name[:100]!r}")


def _find_format(
    known: Sequence[Format], name: str, vocabulary: Vocabulary, template: str
) -> Format | None:
    for entry in known:
        is_used = name == formats.AUTO and entry.is_used_by(vocabulary, template)
        if is_used or name == entry.name:
            return entry
    return None


PLAIN = AnswerFormat()
