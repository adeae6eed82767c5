"""Puts processed items into a prompt: expands the markers and finds the tokens of each item.

Text is expanded as text and tokenised once, because tokens may merge across the border of a
replacement. In a prompt of token ids, the markers are replaced token by token, because its caller
has decided where the borders are.

Texts that can't fit into the context are refused before they are tokenised whole, because that
takes microseconds and hundreds of bytes for each character:
  1. A text can't fit if it has more characters than the context has tokens, times the length of the
     longest token.
  2. A text that is shorter, but long, is counted in pieces, until they have more tokens than the
     context holds. So a refusal takes no more work than a prompt that fills the context.

A text that fits is never refused. A tokenizer may drop characters (spaces, accents, unknown
ones), so the first bound assumes a longest token of at least `_MIN_LONGEST_TOKEN` characters. A cut
may change the tokens next to it, so the count leaves out `_TOKENS_AT_CUTS` of each piece: a word of
100 characters that a vocabulary lacks is one token as a whole, and up to 100 in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

from sensorium.multimodal.processing.audio import AudioProcessor
from sensorium.multimodal.processing.processor import (
    MultiModalProcessor,
    tokenize,
    tokenize_fragment,
)
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.multimodal import ItemLayout, MultiModalFeatureSpec, PlaceholderRange

_SHORT_CHARACTERS = 2**16  # tokenised whole in a tenth of a second, whatever the context is
_LIKELY_CHARACTERS = 8  # for each token of the context; most texts with fewer characters fit
_MIN_LONGEST_TOKEN = 128
_PIECE_CHARACTERS = 2**14
_TOKENS_AT_CUTS = 128


class TextLength:
    """A thread-safe check that refuses texts with too many tokens without tokenising them whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def check(self, text: str, max_tokens: int) -> None:
        """Raise a `RequestError` if the text certainly has more than `max_tokens` tokens."""
        if len(text) <= max(_SHORT_CHARACTERS, _LIKELY_CHARACTERS * max_tokens):
            return
        check_unicode(text)
        most = self._longest_token * max_tokens
        if len(text) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters, but the {max_tokens} tokens that it may "
                f"have can't stand for more than {most}",
                path=("prompt",),
            )
        self._check_pieces(text, max_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """Return the characters of the vocabulary's longest token, at least `_MIN_LONGEST_TOKEN`.

        The bound also holds for a byte-level vocabulary, which has one character for each byte,
        because every character of a text has at least one byte. It is computed for the first long
        text, because reading a vocabulary takes a tenth of a second.
        """
        lengths = map(len, self._tokenizer.get_vocab())
        return max(_MIN_LONGEST_TOKEN, max(lengths, default=0))

    def _check_pieces(self, text: str, max_tokens: int) -> None:
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            end = start + _PIECE_CHARACTERS
            found = len(tokenize_fragment(self._tokenizer, text[start:end]))
            num_tokens += max(0, found - _TOKENS_AT_CUTS)
            if num_tokens > max_tokens:
                raise RequestError(
                    f"the prompt has {len(text)} characters, and the first "
                    f"{min(end, len(text))} of them are more than the {max_tokens} tokens that "
                    "it may have",
                    path=("prompt",),
                )


def check_unicode(text: str) -> None:
    """Raise a `RequestError` if the text has lone surrogates, which can't be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt is not valid Unicode: {error.reason}", path=("prompt",)
        ) from error


class LaidOutItem(Protocol):
    """The attributes of a media item that are needed to put it into a prompt."""

    @property
    def modality(self) -> str: ...

    @property
    def mm_hash(self) -> str: ...

    @property
    def layout(self) -> ItemLayout | None: ...


ExpandedPrompt = tuple[list[int], list[MultiModalFeatureSpec]]
_Span = tuple[LaidOutItem, int, int]  # an item and its half-open range


def expand_text(
    processor: MultiModalProcessor,
    text: str,
    items: Sequence[LaidOutItem],
    *,
    add_special_tokens: bool = True,
    check_length: Callable[[str], None] = check_unicode,
) -> ExpandedPrompt:
    """Replace the markers in the text of a prompt, tokenise it, and locate the media items.

    The n-th marker of a modality stands for the n-th item of that modality. `check_length` gets the
    expanded text, and raises a `RequestError` if that is too long to be tokenised.
    """
    check_unicode(text)
    if processor.outside_audio is not None:
        check_length(text)
        token_ids = tokenize_fragment(processor.tokenizer, text)
        return _place_outside(processor.outside_audio, token_ids, items)
    expanded, spans = _replace_markers(processor, text, items)
    check_length(expanded)
    token_ids, find_token = tokenize(
        processor.tokenizer, expanded, add_special_tokens=add_special_tokens
    )
    ranges = []
    for item, start, end in spans:
        first, last = find_token(start), find_token(end - 1)
        if first is None or last is None:
            raise RequestError(f"the tokenizer drops a part of the prompt at its {item.modality}")
        ranges.append((item, first, last + 1))
    return token_ids, _make_features(processor, token_ids, ranges)


def expand_token_ids(
    processor: MultiModalProcessor,
    token_ids: Sequence[int],
    items: Sequence[LaidOutItem],
    *,
    max_tokens: int | None = None,
) -> ExpandedPrompt:
    """Replace the marker tokens in a prompt of token ids, and locate the media items.

    Raise a `RequestError` if that gives more than `max_tokens` tokens. None means no limit.
    """
    if processor.outside_audio is not None:
        return _place_outside(processor.outside_audio, token_ids, items)
    modality_of = {
        processor.tokenizer.convert_tokens_to_ids(marker): modality
        for modality, marker in processor.markers.items()
    }
    queues = _make_queues(processor, [modality_of[t] for t in token_ids if t in modality_of], items)
    expanded: list[int] = []
    ranges: list[_Span] = []
    for token_id in token_ids:
        if token_id not in modality_of:
            expanded.append(token_id)
            continue
        item = next(queues[modality_of[token_id]])
        start = len(expanded)
        expanded.extend(tokenize_fragment(processor.tokenizer, _get_layout(item).text))
        ranges.append((item, start, len(expanded)))
        if max_tokens is not None and len(expanded) > max_tokens:
            raise RequestError(
                f"the prompt has more than the {max_tokens} tokens that it may have, with "
                "those of its media",
                path=("prompt",),
            )
    return expanded, _make_features(processor, expanded, ranges)


def place_items(
    items: Sequence[LaidOutItem], positions: Sequence[tuple[str, PlaceholderRange]]
) -> list[MultiModalFeatureSpec]:
    """Return the media items of a prompt that another process has expanded, at their positions.

    The n-th position of a modality belongs to the n-th item of that modality. Raise an
    `InvariantError` if an item does not fit its position: then the two processes expand prompts
    differently.
    """
    queues = {name: iter([i for i in items if i.modality == name]) for name, _ in positions}
    features = []
    for modality, position in positions:
        item = next(queues[modality], None)
        if item is None or _get_layout(item).num_embeds != position.get_num_embeds():
            raise InvariantError(
                f"the {modality} at token {position.offset} of an expanded prompt does not fit "
                "what this process has made of it"
            )
        features.append(
            MultiModalFeatureSpec(
                modality=modality,
                mm_hash=item.mm_hash,
                mm_position=position,
                has_content_hash=True,
            )
        )
    return features


def _place_outside(
    audios: AudioProcessor, token_ids: Sequence[int], items: Sequence[LaidOutItem]
) -> ExpandedPrompt:
    """Return the prompt of a model that attends to audio outside its prompt, and the audio item.

    An empty prompt becomes the tokens with which the decoder begins. The item's range counts the
    positions of the audio from 0, not tokens of the prompt.
    """
    if len(items) != 1:
        raise RequestError(
            f"this model needs exactly one audio item in addition to its prompt, but {len(items)} "
            "came with it"
        )
    num_positions = _get_layout(items[0]).num_embeds
    if num_positions > audios.max_positions:
        raise RequestError(
            f"the audio has {num_positions} positions, and a prompt of this model takes at most "
            f"{audios.max_positions}: send it in pieces, or let it be transcribed, which takes "
            "audio of any length"
        )
    feature = MultiModalFeatureSpec(
        modality=items[0].modality,
        mm_hash=items[0].mm_hash,
        mm_position=PlaceholderRange(0, num_positions),
        has_content_hash=True,
    )
    return list(token_ids) or list(audios.start_token_ids), [feature]


def _replace_markers(
    processor: MultiModalProcessor, text: str, items: Sequence[LaidOutItem]
) -> tuple[str, list[_Span]]:
    """Return a text with its markers replaced, and the range of characters of each item."""
    modality_of = {marker: modality for modality, marker in processor.markers.items()}
    pattern = "|".join(f"({re.escape(marker)})" for marker in modality_of) or "(?!)"
    pieces = [piece for piece in re.split(pattern, text) if piece]
    queues = _make_queues(processor, [modality_of[p] for p in pieces if p in modality_of], items)
    spans: list[_Span] = []
    length = 0
    for index, piece in enumerate(pieces):
        if piece in modality_of:
            item = next(queues[modality_of[piece]])
            pieces[index] = _get_layout(item).text
            spans.append((item, length, length + len(pieces[index])))
        length += len(pieces[index])
    return "".join(pieces), spans


def _make_queues(
    processor: MultiModalProcessor, found: Sequence[str], items: Sequence[LaidOutItem]
) -> dict[str, Iterator[LaidOutItem]]:
    """Return an iterator over the items of each modality; `found` are the markers' modalities.

    Raise a `RequestError` unless each modality has as many items as markers.
    """
    queues = {}
    for modality in processor.modalities:
        own = [item for item in items if item.modality == modality]
        if found.count(modality) != len(own):
            raise RequestError(
                f"the prompt has {found.count(modality)} {processor.get_marker(modality)!r} "
                f"marker(s), but {len(own)} {modality} item(s) came with it",
                path=("prompt",),
            )
        queues[modality] = iter(own)
    return queues


def _make_features(
    processor: MultiModalProcessor, token_ids: Sequence[int], ranges: Sequence[_Span]
) -> list[MultiModalFeatureSpec]:
    placeholder_ids = {i for m in processor.modalities for i in processor.get_token_ids(m)}
    features: list[MultiModalFeatureSpec] = []
    end_of_last = 0
    for item, first, end in ranges:
        start = max(first, end_of_last)  # neighbours may share a token across their border
        _check_no_placeholder(token_ids[end_of_last:start], placeholder_ids)
        layout = _get_layout(item)
        is_embed = tuple(token_id == layout.token_id for token_id in token_ids[start:end])
        position = PlaceholderRange(start, end - start, None if all(is_embed) else is_embed)
        if position.get_num_embeds() == 0:
            raise RequestError(f"this {item.modality} is too small: the model sees nothing of it")
        if position.get_num_embeds() != layout.num_embeds:
            raise RequestError(
                f"the layout of this {item.modality} has {layout.num_embeds} embeddings, but its "
                f"text has room for {position.get_num_embeds()}"
            )
        features.append(
            MultiModalFeatureSpec(
                modality=item.modality,
                mm_hash=item.mm_hash,
                mm_position=position,
                has_content_hash=True,
            )
        )
        end_of_last = end
    _check_no_placeholder(token_ids[end_of_last:], placeholder_ids)
    return features


def _get_layout(item: LaidOutItem) -> ItemLayout:
    if item.layout is None:
        raise InvariantError(f"{item.modality} {item.mm_hash} came into a prompt without a layout")
    return item.layout


def _check_no_placeholder(token_ids: Sequence[int], placeholder_ids: set[int]) -> None:
    if placeholder_ids.intersection(token_ids):
        raise RequestError(
            "the prompt holds a media placeholder token that belongs to no media item: remove it",
            path=("prompt",),
        )
