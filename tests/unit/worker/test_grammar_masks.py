"""Masks are there when a token is chosen, say what may follow, and fail alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers)

# isort: split
from transformers import AutoTokenizer

from sensorium.grammar.compiler import GrammarCompiler
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams
from sensorium.worker.grammar_masks import GrammarMasks, StepMasks
from sensorium.worker.request_states import RequestState

from .factories import GREEDY, make_request, make_state

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], str]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture
def masks(tokenizer: Any) -> GrammarMasks:
    return GrammarMasks(GrammarCompiler(lambda: tokenizer, eos_token_ids=(EOS,)))


def make(regex: str | None, *outputs: int, request_id: str = "r", **params: Any) -> RequestState:
    structured = None if regex is None else StructuredOutputsParams(regex=regex)
    request = make_request(
        (3, 4),
        request_id=request_id,
        params=replace(GREEDY, structured_outputs=structured, **params),
        eos_token_ids=(EOS,),
    )
    return make_state(request, output_token_ids=outputs)


def add(masks: GrammarMasks, *states: RequestState) -> None:
    for state in states:
        masks.add(state.request)


def take(masks: GrammarMasks, *states: RequestState) -> StepMasks:
    """Wait until all masks of the step are there."""
    while (taken := masks.take(states)).late_ids:
        pass
    return taken


def get_allowed(masks: GrammarMasks, state: RequestState) -> set[int]:
    mask = take(masks, state).masks[state.request.request_id]
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_requests_without_a_grammar_have_no_mask_and_start_no_thread(masks: GrammarMasks) -> None:
    state = make(None)
    add(masks, state)
    masks.start(state.request, ())
    assert masks.take([state]) == StepMasks()
    assert masks.consume([(state, 5)]).completed_ids == frozenset()
    assert not {"_compilers", "_fillers"} & vars(masks).keys()


def test_masks_follow_the_tokens_to_the_end(masks: GrammarMasks, tokenizer: Any) -> None:
    state = make("[ab]c")
    add(masks, state)
    a, b, c = (encode(tokenizer, letter)[0] for letter in "abc")
    assert get_allowed(masks, state) == {a, b}
    assert not masks.consume([(state, b)]).completed_ids
    assert get_allowed(masks, state) == {c}
    assert masks.consume([(state, c)]).completed_ids == {"r"}


def test_a_resumed_request_continues_after_its_tokens(masks: GrammarMasks, tokenizer: Any) -> None:
    a, c = encode(tokenizer, "a")[0], encode(tokenizer, "c")[0]
    state = make("[ab]c", a)
    masks.start(state.request, (a,))  # by a worker that has not seen it
    assert get_allowed(masks, state) == {c}
    masks.start(state.request, ())
    assert get_allowed(masks, make("[ab]c")) > {a}


@pytest.mark.parametrize(
    ("params", "can_end"), [({}, True), ({"ignore_eos": True}, False), ({"min_tokens": 2}, False)]
)
def test_an_end_is_masked_where_it_is_not_wanted_unless_nothing_else_is_left(
    masks: GrammarMasks, params: dict[str, Any], can_end: bool
) -> None:
    free, bound = make("a*", request_id="free", **params), make("()", request_id="bound", **params)
    add(masks, free, bound)
    assert (EOS in get_allowed(masks, free)) == can_end
    assert get_allowed(masks, bound) == {EOS}


def test_a_grammar_that_fails_ends_only_its_own_request(
    masks: GrammarMasks, tokenizer: Any
) -> None:
    bad, good = make("(", request_id="bad"), make("a", request_id="good")
    add(masks, bad, good)
    taken = take(masks, bad, good)
    assert taken.failures["bad"].path == ("structured_outputs", "regex")
    assert taken.is_without("bad")
    assert set(taken.masks) == {"good"}
    progress = masks.consume([(good, encode(tokenizer, "z")[0])])
    assert progress.failures["good"].path == ("structured_outputs", "regex")


def test_a_grammar_that_failed_keeps_nothing_of_its_request(masks: GrammarMasks) -> None:
    bad = make("(", request_id="bad")
    add(masks, bad)
    take(masks, bad)
    entry = weakref.ref(masks._entries["bad"])
    gc.disable()  # a cycle of references would last until the next collection
    try:
        masks.forget("bad")
        assert entry() is None
    finally:
        gc.enable()


def test_a_worker_without_a_tokenizer_refuses() -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        add(GrammarMasks(None), make("a"))


def test_a_forgotten_request_leaves_nothing(masks: GrammarMasks) -> None:
    state = make("a")
    add(masks, state)
    masks.forget("r")
    assert masks.take([state]) == StepMasks()
