"""Compiles grammars for frontends, which only check them, and for the core, which uses them.

Owns the tokenizer of llguidance, which is made for the first grammar, and a cache of the latest
results, which includes refused grammars. Any number of threads may use a compiler.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from sensorium.grammar.tokenizer import WORD_BITS, make_tokenizer
from sensorium.grammar.translation import make_grammar
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams
from sensorium.utils.lru import LruCache

_MAX_GRAMMARS = 64
# CPU time of the thread and not elapsed time, so that a busy machine does not refuse a grammar.
MAX_COMPILE_S = 4.0
# The library's defaults, except for the limit on the memory of one grammar (1 to 2 kB per state),
# and except that errors don't show the internals of the parser.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_MAX_REASON = 300
# llguidance recurses as deep as a grammar is nested, and does not check for the end of the stack.
# This many addresses are reserved, but memory is taken only for those that are used. The deepest
# nesting that fits into a grammar of the greatest length needs less than a quarter of them.
_STACK_BYTES = 2**28
_stack_lock = threading.Lock()
Words = npt.NDArray[np.int64]  # bit i of word w is set if token 64 * w + i may come next


class Matcher:
    """The state of one answer in its grammar, which decides which tokens may come next.

    Only one thread at a time may use a matcher.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy())

    @property
    def error(self) -> str | None:
        """The reason why this matcher has failed and can't be used again; `None` if it has not."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().replace("<non-verbose/>", "")
        return " ".join(reason.split())[:_MAX_REASON]

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete, so that the grammar allows no further text."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def consume(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the answer; if the grammar does not allow them, `error` is set."""
        self._matcher.consume_tokens(list(token_ids))

    def fill_mask(self, words: Words) -> None:
        """Overwrite the bit mask `words` with the tokens that may come next, without the GIL."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


class GrammarCompiler:
    """A compiler that turns constraints on answers into matchers, for the tokens of one model."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Any],
        *,
        vocab_size: int = 0,
        eos_token_ids: Sequence[int] = (),
        max_string_length: int | None = None,  # for strings that have no limit in their schema
    ) -> None:
        self._load_tokenizer = load_tokenizer  # called once, for the first grammar
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_string_length = max_string_length
        # A grammar -> its matcher, or the error with which it was refused.
        self._compiled: LruCache[StructuredOutputsParams, Matcher | RequestError] = LruCache(
            _MAX_GRAMMARS
        )
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """Return a new matcher for a constraint, at the beginning of an answer.

        Raise `RequestError` with the path of the field if the constraint is malformed, can't be
        met, or is too complex.
        """
        with self._lock:
            known = self._compiled.get(params)
            if known is not None:
                return _take(known)
        made = _run_on_large_stack(lambda: self._compile(params))
        with self._lock:
            self._compiled.put(params, made)
            return _take(made)

    def make_mask(self) -> Words:
        """Return a new bit mask over the vocabulary in which no token is allowed."""
        return np.zeros(int(self._tokenizer.vocab_size) // WORD_BITS, dtype=np.int64)

    @cached_property
    def end_mask(self) -> Words:
        """The bit mask in which only the tokens that end an answer are allowed."""
        words = self.make_mask().view(np.uint64)
        for token_id in self._tokenizer.eos_tokens:
            words[token_id // WORD_BITS] |= np.uint64(1 << token_id % WORD_BITS)
        return words.view(np.int64)

    @property
    def _tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            return self._made_tokenizer

    @cached_property
    def _made_tokenizer(self) -> LLTokenizer:
        return make_tokenizer(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)

    def _compile(self, params: StructuredOutputsParams) -> Matcher | RequestError:
        """Return the matcher of a constraint, or the error to raise if it can't be used."""
        tokenizer = self._tokenizer
        path = ("structured_outputs", params.kind)
        began = time.thread_time()
        try:
            grammar = make_grammar(params, max_string_length=self._max_string_length)
        except RequestError as error:
            return copy.copy(error)  # without its causes, which hold frames and their values
        except UnicodeEncodeError:
            return RequestError("has an unpaired surrogate (U+D800 to U+DFFF): remove it", path)
        matcher = Matcher(LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS))
        if matcher.error is not None:
            return RequestError(matcher.error, path)
        if (reason := self._try(matcher.copy())) is not None:
            return RequestError(reason, path)
        if time.thread_time() - began > MAX_COMPILE_S:
            return RequestError(f"takes over {MAX_COMPILE_S:g} s to compile: make it simpler", path)
        return matcher

    def _try(self, matcher: Matcher) -> str | None:
        """Return why a grammar can't be used, or `None` if it can.

        As a test, this computes the mask for the first token, and consumes an allowed token that
        does not end the answer.
        """
        mask = self.make_mask()
        matcher.fill_mask(mask)
        if matcher.error is not None:
            return f"can't be met by any answer, or is too complex: {matcher.error}"
        others = mask & ~self.end_mask
        if others.any():
            word = int(others.nonzero()[0][0])
            lowest = (int(others[word]) & -int(others[word])).bit_length() - 1
            matcher.consume((word * WORD_BITS + lowest,))
        if matcher.error is not None:
            return f"forces an answer that has no end, or is too complex: {matcher.error}"
        return None


def _take(made: Matcher | RequestError) -> Matcher:
    if isinstance(made, RequestError):
        raise copy.copy(made)
    return made.copy()


def _run_on_large_stack(work: Callable[[], Matcher | RequestError]) -> Matcher | RequestError:
    """Call `work` in a thread with a large stack, and return its result or raise its error."""
    result: Future[Matcher | RequestError] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    # The stack size is a setting of the whole process. The lock keeps concurrent calls from
    # restoring a wrong size. Other code that starts a thread meanwhile also gets the large stack.
    with _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar-stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return result.result()
