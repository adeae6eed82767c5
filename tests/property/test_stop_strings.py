"""Text ends at a stop string however tokens part it, down to the bytes of a character."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.types.outputs import CompletionOutput
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from sensorium.types.sampling import SamplingParams

ALPHABET = "ab é日🙂"
texts = st.text(alphabet=ALPHABET, min_size=1, max_size=14)
stops = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), max_size=4).map(tuple)
cuts = st.sets(st.integers(1, 55))


class ByteTokenizer:
    """A vocabulary made for one text: token n is its n-th piece, and 0 is a special token."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = [b"", *pieces]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        del skip_special_tokens
        return b"".join(self._pieces[i] for i in token_ids).decode(errors="replace")


def part(text: str, cuts: set[int]) -> list[bytes]:
    encoded = text.encode()
    borders = [0, *sorted(cut for cut in cuts if cut < len(encoded)), len(encoded)]
    return [encoded[a:b] for a, b in pairwise(borders)]


def complete(
    pieces: Sequence[bytes], reason: FinishReason = FinishReason.LENGTH, **params: object
) -> CompletionOutput:
    """Feed the pieces token by token; with `STOP`, a special token ends them."""
    processor = OutputProcessor(ByteTokenizer(pieces))
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(0,),
        sampling_params=SamplingParams(max_tokens=99, **params),
    )
    processor.add_request(request, None)
    token_ids = [*range(1, len(pieces) + 1), *([0] if reason is FinishReason.STOP else [])]
    for token_id in token_ids:
        is_last = token_id == token_ids[-1]
        output = EngineCoreOutput(
            request_id="r", new_token_ids=(token_id,), finish_reason=reason if is_last else None
        )
        finished, stopped = processor.process([output])
        assert stopped == (["r"] if finished and not is_last else [])
        if finished:
            assert processor.process([output]) == ([], [])
            return finished[0].outputs[0]
    raise AssertionError("it did not end")


def find_first_end(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Return start and end of the first stop string, as found character by character.

    If several end at the same character it is the longest of them.
    """
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts), end
    return None


@given(
    text=texts,
    cuts=cuts,
    stop=stops,
    is_included=st.booleans(),
    reason=st.sampled_from((FinishReason.LENGTH, FinishReason.STOP)),
)
@example("aba", set(), ("ba", "a"), False, FinishReason.LENGTH)
@example("b🙂a", {1, 2, 3, 4, 5}, ("🙂a",), True, FinishReason.LENGTH)
@example("a🙂", {1, 2}, ("a🙂",), False, FinishReason.STOP)
@settings(max_examples=500)
def test_the_text_ends_where_a_reader_sees_the_first_stop_string(
    text: str, cuts: set[int], stop: tuple[str, ...], is_included: bool, reason: FinishReason
) -> None:
    completion = complete(
        part(text, cuts), reason, stop=stop, include_stop_str_in_output=is_included
    )
    found = find_first_end(text, stop)
    if found is None:
        assert (completion.text, completion.stop_reason) == (text, None)
        assert completion.finish_reason is reason
    else:
        start, end = found
        assert completion.text == text[: end if is_included else start]
        assert completion.stop_reason == text[start:end]
        assert completion.finish_reason is FinishReason.STOP


@given(text=texts, cuts=cuts, stop=stops)
@settings(max_examples=300)
def test_generation_ends_with_the_token_that_completes_the_stop_string(
    text: str, cuts: set[int], stop: tuple[str, ...]
) -> None:
    """Or with the one that completes the character behind it, if the token parts that."""
    pieces = part(text, cuts)
    found = find_first_end(text, stop)
    count = len(complete(pieces, stop=stop).token_ids)
    if found is None:
        assert count == len(pieces)
        return
    ends = [len(b"".join(pieces[: i + 1])) for i in range(len(pieces))]
    borders = {len(text[:i].encode()) for i in range(len(text) + 1)}
    least = len(text[: found[1]].encode())
    assert count == 1 + next(i for i, end in enumerate(ends) if end >= least and end in borders)


@given(text=texts, cuts=cuts, other_cuts=cuts, stop=stops, is_included=st.booleans())
@settings(max_examples=200)
def test_tokens_do_not_change_where_the_text_ends(
    text: str, cuts: set[int], other_cuts: set[int], stop: tuple[str, ...], is_included: bool
) -> None:
    first, second = (
        complete(part(text, c), stop=stop, include_stop_str_in_output=is_included)
        for c in (cuts, other_cuts)
    )
    assert first.text == second.text
    assert first.stop_reason == second.stop_reason
