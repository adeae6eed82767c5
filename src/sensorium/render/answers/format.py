"""Finds the format of a model's answers by name, or from its chat template and vocabulary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from sensorium.grammar.translation import make_grammar_after
from sensorium.render.answers import formats
from sensorium.render.answers.answer import AnswerContext
from sensorium.render.answers.formats import hermes
from sensorium.render.answers.lark import Lark
from sensorium.render.answers.reader import AnswerReader, read_state
from sensorium.render.answers.syntax import CallFormat, ReasoningFormat
from sensorium.render.answers.vocabulary import Vocabulary
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)
_NUM_TAIL_TOKENS = 16
_NUM_TAIL_CHARACTERS = 64
Format = TypeVar("Format", CallFormat, ReasoningFormat)


class AnswerFormat:
    """The way in which a model writes its answers. It starts a reader for each completion.

    If the model has no format of tool calls, no calls are read. Only a call that a request demands
    is written and read, in the format of Hermes.
    """

    def __init__(
        self,
        *,
        calls: CallFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        vocabulary: Vocabulary | None = None,
        shows_tools: bool = False,
        max_string_length: int | None = None,  # of strings that a schema leaves free
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._vocabulary = vocabulary or Vocabulary()
        self.shows_tools = shows_tools  # whether the chat template shows the tools to the model
        self._max_string_length = max_string_length
        tags = () if reasoning is None else reasoning.special_tokens
        wanted = (*(calls or hermes.CALLS).special_tokens, *tags)
        special = self._vocabulary.special_tokens
        # Special tokens that must be in the text to be read.
        self.kept_special_token_ids = tuple(special[text] for text in wanted if text in special)

    def opens_reasoning(self, prompt: str | Sequence[int]) -> bool:
        """Return whether an answer to this prompt begins in the middle of reasoning."""
        if self._reasoning is None:
            return False
        if not isinstance(prompt, str):
            prompt = self._vocabulary.decode(prompt[-_NUM_TAIL_TOKENS:])
        return self._reasoning.is_open_after(prompt[-_NUM_TAIL_CHARACTERS:])

    def start(self, context: AnswerContext) -> AnswerReader:
        """Return a reader for the beginning of an answer."""
        return AnswerReader(context, calls=self._get_calls(context), reasoning=self._reasoning)

    def resume(self, context: AnswerContext, state: Any) -> AnswerReader:
        """Return a reader that goes on from a state. Raise a `RequestError` if that is invalid."""
        calls, reasoning = self._get_calls(context), self._reasoning
        read = read_state(state, calls=calls, reasoning=reasoning)
        return AnswerReader(context, calls=calls, reasoning=reasoning, state=read)

    def make_constraint(self, context: AnswerContext) -> StructuredOutputsParams | None:
        """Return a constraint with which the text is a call, or `None` if no call is demanded."""
        if not context.demands_call:
            return None
        lark = Lark(self._vocabulary.special_tokens, max_string_length=self._max_string_length)
        lark.add("start", "")
        is_single = not context.parallel_tool_calls or not isinstance(context.tool_choice, str)
        calls = self._calls or hermes.CALLS
        body = calls.write_calls(lark, context.demanded_tools, is_single)
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
        """Return a constraint that applies the wanted one after the end of the reasoning.

        The text begins in the middle of reasoning.
        """
        if self._reasoning is None:
            return wanted
        close = self._reasoning.close
        token_id = self._vocabulary.special_tokens.get(close)
        return make_grammar_after(
            wanted, close, token_id=token_id, max_string_length=self._max_string_length
        )

    def _write_reasoning(self, lark: Lark, context: AnswerContext) -> str:
        """Return the body of a rule for reasoning before the calls."""
        if self._reasoning is None:
            return ""
        thought = lark.add_until("thought", self._reasoning.close) + ' "\\n"? "\\n"?'
        if context.starts_in_reasoning:
            return thought
        opening = lark.write_tag(self._reasoning.open)
        return f"({opening} {thought})?"

    def _get_calls(self, context: AnswerContext) -> CallFormat | None:
        if context.demands_call:
            return self._calls or hermes.CALLS
        return self._calls if context.reads_calls else None


def make_answer_format(
    tokenizer: Any,
    template: str,
    *,
    tool_call_parser: str = formats.AUTO,
    reasoning_parser: str = formats.AUTO,
    max_string_length: int | None = None,
) -> AnswerFormat:
    """Return the format of this model's answers.

    `template` is the text of the model's chat template, or of all templates that it has. Strings
    without a bound in a tool's schema get at most `max_string_length` characters. Raise a
    `RequestError` that lists the known parsers if one is unknown.
    """
    vocabulary = Vocabulary.of(tokenizer)
    _check_name("tool_call_parser", tool_call_parser, formats.TOOL_CALL_PARSERS)
    _check_name("reasoning_parser", reasoning_parser, formats.REASONING_PARSERS)
    calls = _find_format(formats.CALL_FORMATS, tool_call_parser, vocabulary, template)
    reasoning = _find_format(formats.REASONING_FORMATS, reasoning_parser, vocabulary, template)
    names = [formats.NONE if found is None else found.name for found in (calls, reasoning)]
    logger.info("answers are read as: tool calls %s, reasoning %s", *names)
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
