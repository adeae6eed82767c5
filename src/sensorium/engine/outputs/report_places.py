"""Finds the place of each media item in its prompt.

A caller gives items by modality, in the order of the markers of that modality; the features of a
request are in the order of the prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sensorium.types.multimodal import MultiModalFeatureSpec
from sensorium.types.outputs import MediaItemReport


def place_reports(
    reports: Sequence[MediaItemReport], features: Sequence[MultiModalFeatureSpec]
) -> tuple[MediaItemReport, ...]:
    places: defaultdict[str, list[int]] = defaultdict(list)
    for mm_index, feature in enumerate(features):
        places[feature.modality].append(mm_index)
    queues: dict[str, Iterator[int]] = {key: iter(value) for key, value in places.items()}
    placed = []
    for report in reports:
        mm_index = next(queues[report.modality])
        end = features[mm_index].mm_position.end
        placed.append(replace(report, mm_index=mm_index, prompt_end=end))
    return tuple(placed)
