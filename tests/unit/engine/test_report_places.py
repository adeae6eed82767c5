"""Items are given by modality; a prompt has them in an order of its own."""

from __future__ import annotations

from sensorium.engine.outputs.output_processor import place_reports
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.outputs import MediaItemReport


def make_feature(modality: str, mm_hash: str, offset: int) -> MultiModalFeatureSpec:
    position = PlaceholderRange(offset, 3)
    return MultiModalFeatureSpec(modality=modality, mm_hash=mm_hash, mm_position=position)


def make_report(modality: str, mm_hash: str) -> MediaItemReport:
    return MediaItemReport(
        modality=modality, mm_hash=mm_hash, is_processor_hit=False, transfer="none"
    )


def test_every_item_finds_its_place() -> None:
    features = (
        make_feature("audio", "song", 1),
        make_feature("image", "cat", 5),
        make_feature("audio", "song", 10),
        make_feature("image", "dog", 20),
    )
    reports = (
        make_report("image", "cat"),
        make_report("image", "dog"),
        make_report("audio", "song"),
        make_report("audio", "song"),
    )
    placed = place_reports(reports, features)
    assert [(r.mm_hash, r.mm_index, r.prompt_end) for r in placed] == [
        ("cat", 1, 8),
        ("dog", 3, 23),
        ("song", 0, 4),
        ("song", 2, 13),
    ]


def test_no_items_have_no_places() -> None:
    assert place_reports((), (make_feature("image", "cat", 0),)) == ()
