"""Markers become placeholders, and each item has its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.multimodal.placeholders import ExpandedPrompt, expand_text, expand_token_ids
from sensorium.types.errors import RequestError
from sensorium.types.model_kind import CAUSAL
from sensorium.types.multimodal import ItemLayout, ProcessedItem

Expand = Callable[..., ExpandedPrompt]


class Encoding:
    def __init__(self, text: str, spans: list[tuple[int, int]]) -> None:
        self._spans = spans
        self._ids = {"input_ids": [get_id(text[start:end]) for start, end in spans]}

    def __getitem__(self, name: str) -> list[int]:
        return self._ids[name]

    def char_to_token(self, index: int) -> int | None:
        return next((t for t, (start, end) in enumerate(self._spans) if start <= index < end), None)


class MergingTokenizer:
    """One token per character, but two line ends in a row are one token, and `~` is dropped."""

    is_fast = True

    def __call__(self, text: str, *, add_special_tokens: bool = True, **masks: bool) -> Encoding:
        assert not any(masks.values())
        spans = [match.span() for match in re.finditer(r"\n\n|[^~]", text)]
        if add_special_tokens:
            spans.insert(0, (0, 0))  # a beginning-of-text token that no character belongs to
        return Encoding(text, spans)

    def convert_tokens_to_ids(self, token: str) -> int:
        return get_id(token)


def get_id(piece: str) -> int:
    """A character's code; 10,000 for two line ends, 0 for the beginning of the text."""
    return 0 if not piece else 10_000 if piece == "\n\n" else ord(piece)


class FakeProcessor:
    """The markers are `I` and `V`; the placeholder tokens are `i` and `v`."""

    modalities = ("image", "video")
    tokenizer = MergingTokenizer()
    markers: ClassVar[dict[str, str]] = {"image": "I", "video": "V"}
    outside_audio = streaming_audio = None
    kind = CAUSAL

    def get_marker(self, modality: str) -> str:
        return modality[0].upper()

    def get_token_ids(self, modality: str) -> tuple[int, ...]:
        return (ord("v"), ord("i")) if modality == "video" else (ord("i"),)


def make_item(modality: str, text: str, name: str) -> ProcessedItem:
    marker = "v" if modality == "video" and "v" in text else "i"
    layout = ItemLayout(text=text, token_id=ord(marker), num_embeds=text.count(marker))
    return ProcessedItem(modality=modality, mm_hash=name, kwargs={}, layout=layout)


def image(replacement: str = "ii", name: str = "x") -> ProcessedItem:
    return make_item("image", replacement, name)


def video(replacement: str = "vv", name: str = "y") -> ProcessedItem:
    return make_item("video", replacement, name)


def expand(text: str, *items: ProcessedItem) -> ExpandedPrompt:
    return expand_text(FakeProcessor(), text, items)  # type: ignore[arg-type]


def splice(text: str, *items: ProcessedItem) -> ExpandedPrompt:
    token_ids = [0, *map(ord, text)]
    return expand_token_ids(FakeProcessor(), token_ids, items)  # type: ignore[arg-type]


both = pytest.mark.parametrize("prompt", [expand, splice], ids=["text", "token ids"])


def show(token_ids: list[int]) -> str:
    return "".join("^" if t == 0 else "¶" if t == 10_000 else chr(t) for t in token_ids)


def get_places(prompt: ExpandedPrompt) -> list[tuple[str, int, int, Any]]:
    return [
        (f.mm_hash, f.mm_position.offset, f.mm_position.length, f.mm_position.is_embed)
        for f in prompt[1]
    ]


@both
def test_the_nth_marker_of_a_modality_is_its_nth_item(prompt: Expand) -> None:
    items = [image("ii", "x1"), image("i", "x2"), video("vvv", "y")]
    expanded = prompt("aIbVI", *items)
    assert show(expanded[0]) == "^aiibvvvi"
    assert get_places(expanded) == [("x1", 2, 2, None), ("y", 5, 3, None), ("x2", 8, 1, None)]


@both
def test_a_prompt_without_media_stays_as_it_is(prompt: Expand) -> None:
    expanded = prompt("abc")
    assert (show(expanded[0]), expanded[1]) == ("^abc", [])


@both
@pytest.mark.parametrize(
    ("text", "items", "message"),
    [
        ("a", (image(),), r"0 'I' marker\(s\), but 1 image item\(s\)"),
        ("II", (image(),), r"2 'I' marker\(s\), but 1 image item\(s\)"),
        ("I", (), r"1 'I' marker\(s\), but 0 image item\(s\)"),
        ("I", (video(),), r"1 'I' marker\(s\), but 0 image item\(s\)"),
        ("VI", (image(), video(), video()), r"1 'V' marker\(s\), but 2 video item\(s\)"),
    ],
)
def test_markers_and_items_must_match(
    prompt: Expand, text: str, items: tuple[ProcessedItem, ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        prompt(text, *items)


@both
def test_only_placeholders_of_a_replacement_are_embeddings(prompt: Expand) -> None:
    expanded = prompt("aI", image("<i,ii>"))
    assert show(expanded[0]) == "^a<i,ii>"
    mask = (False, True, False, True, True, False)
    assert get_places(expanded) == [("x", 2, 6, mask)]


@both
@pytest.mark.parametrize("text", ["iI", "Ii", "aIbvc", "v"])
def test_a_placeholder_that_belongs_to_no_item_is_refused(prompt: Expand, text: str) -> None:
    with pytest.raises(RequestError, match="belongs to no media item"):
        prompt(text, *[image()] * text.count("I"))


@both
def test_an_item_without_embeddings_is_refused(prompt: Expand) -> None:
    with pytest.raises(RequestError, match="this image is too small"):
        prompt("aI", image("<>"))


@both
def test_a_placeholder_of_another_modality_is_no_embedding_of_an_item(prompt: Expand) -> None:
    assert get_places(prompt("I", image("ivi"))) == [("x", 1, 3, (True, False, True))]


def test_a_token_that_merges_with_text_belongs_to_the_item() -> None:
    expanded = expand("a\nI\nb", image("\nii\n"))
    assert show(expanded[0]) == "^a¶ii¶b"
    assert get_places(expanded) == [("x", 2, 4, (False, True, True, False))]


def test_a_token_that_two_items_share_belongs_to_the_first() -> None:
    expanded = expand("II", image("\nii\n", "x1"), image("\nii\n", "x2"))
    assert show(expanded[0]) == "^\nii¶ii\n"
    assert get_places(expanded) == [
        ("x1", 1, 4, (False, True, True, False)),
        ("x2", 5, 3, (True, True, False)),
    ]


def test_token_ids_are_not_merged_across_the_border_of_an_item() -> None:
    expanded = splice("II", image("\nii\n", "x1"), image("\nii\n", "x2"))
    assert show(expanded[0]) == "^\nii\n\nii\n"
    assert [place[1:3] for place in get_places(expanded)] == [(1, 4), (5, 4)]


def test_a_replacement_that_the_tokenizer_drops_is_refused() -> None:
    with pytest.raises(RequestError, match="drops a part of the prompt at its image"):
        expand("aI", image("~ii"))


@given(
    parts=st.lists(st.sampled_from(["a", "\n", "I", "V"]), max_size=12),
    replacements=st.lists(st.sampled_from(["i", "iii", "\ni\n", "<ii>"]), min_size=12),
)
@settings(deadline=None)
def test_features_are_sorted_disjoint_and_hold_exactly_the_placeholders(
    parts: list[str], replacements: list[str]
) -> None:
    names = iter(range(100))
    items = [
        (image if part == "I" else video)(
            replacement.replace("i", "i" if part == "I" else "v"), f"h{next(names)}"
        )
        for part, replacement in zip(parts, replacements, strict=False)
        if part in "IV"
    ]
    token_ids, features = expand("".join(parts), *items)
    assert [f.mm_hash for f in features] == [item.mm_hash for item in items]
    placed = set()
    end = 0
    for feature, item in zip(features, items, strict=True):
        place = feature.mm_position
        assert place.offset >= end
        end = place.end
        assert place.get_num_embeds() == len(re.findall("[iv]", item.layout.text))
        for first, last in place.extract_embeds_range():
            placed.update(range(first, last))
    assert placed == {i for i, t in enumerate(token_ids) if t in (ord("i"), ord("v"))}
