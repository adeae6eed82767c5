"""Encoders are captured when a shape comes again, and replayed from then on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from sensorium.models.hf_model import HfModel
from sensorium.models.loading import load_config, load_model
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.worker.graphs import encoder_graphs
from sensorium.worker.graphs.encoder_graphs import NUM_BEFORE_CAPTURE, EncoderGraphs
from sensorium.worker.graphs.recorder import pause_garbage_collection
from tests.parity.graph_parts import AgainRecorder

PATCH = 3 * 2 * 14 * 14  # numbers in a patch: channels, frames, height, width
MERGED = 4  # patches per embedding


@pytest.fixture(scope="module")
def hf_model(tiny_model: Callable[[str], str]) -> HfModel:
    directory = tiny_model("qwen2_5_vl")
    cpu = torch.device("cpu")
    return load_model(directory, load_config(directory), dtype=torch.float32, device=cpu)


@pytest.fixture
def recorder() -> AgainRecorder:
    return AgainRecorder()


@pytest.fixture
def graphs(hf_model: HfModel, recorder: AgainRecorder) -> EncoderGraphs:
    return EncoderGraphs(hf_model, recorder, max_bytes=1)


@pytest.fixture
def at_once(graphs: EncoderGraphs, monkeypatch: pytest.MonkeyPatch) -> EncoderGraphs:
    """Graphs that are captured when a shape comes for the first time."""
    monkeypatch.setattr(encoder_graphs, "NUM_BEFORE_CAPTURE", 0)
    return graphs


def make_item(seed: int, height: int = 4, width: int = 6) -> MultiModalKwargsItem:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(height * width, PATCH, generator=generator),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def count_embeds(items: Sequence[MultiModalKwargsItem]) -> list[int]:
    return [len(item["pixel_values"]) // MERGED for item in items]


@torch.inference_mode()
def encode(runner: Any, *items: MultiModalKwargsItem) -> list[torch.Tensor]:
    result: list[torch.Tensor] = runner.encode("image", items, count_embeds(items))
    return result


def assert_encodes(graphs: EncoderGraphs, hf_model: HfModel, item: Any) -> None:
    [found], [expected] = encode(graphs, item), encode(hf_model, item)
    assert torch.equal(found, expected)


def test_a_shape_is_captured_when_it_has_come_a_few_times(
    graphs: EncoderGraphs, hf_model: HfModel, recorder: AgainRecorder
) -> None:
    for seed in range(NUM_BEFORE_CAPTURE):
        assert_encodes(graphs, hf_model, make_item(seed))
    assert recorder.recordings == []
    assert_encodes(graphs, hf_model, make_item(90))
    assert len(recorder.recordings) == 1
    assert recorder.num_replays == 0
    for seed in (91, 92, 91):
        assert_encodes(graphs, hf_model, make_item(seed))
    assert recorder.num_replays == 3


def test_results_of_earlier_replays_stay_as_they_are(
    at_once: EncoderGraphs, hf_model: HfModel
) -> None:
    results = [encode(at_once, make_item(seed))[0] for seed in range(4)]
    for seed, result in enumerate(results):
        assert torch.equal(result, encode(hf_model, make_item(seed))[0])


def test_pictures_of_equal_size_and_another_grid_have_their_own_graph(
    at_once: EncoderGraphs, hf_model: HfModel, recorder: AgainRecorder
) -> None:
    sides = [(4, 6), (6, 4), (2, 12), (4, 6), (12, 2), (6, 4)]
    for seed, (height, width) in enumerate(sides):
        assert_encodes(at_once, hf_model, make_item(seed, height, width))
    assert len(recorder.recordings) == 4
    assert recorder.num_replays == 2


def test_several_items_are_never_replayed(at_once: EncoderGraphs, recorder: AgainRecorder) -> None:
    for _ in range(2):
        assert len(encode(at_once, make_item(1), make_item(2))) == 2
    assert recorder.recordings == []


def test_a_shape_that_comes_twice_as_often_takes_the_place_of_the_rarest(
    at_once: EncoderGraphs,
    hf_model: HfModel,
    recorder: AgainRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_graphs, "_MAX_GRAPHS", 2)
    widths = [2, 2, 2, 4, 6, 6, 6, 4]  # the third time, the shape of width 6 takes that of width 4
    for seed, width in enumerate(widths):
        assert_encodes(at_once, hf_model, make_item(seed, 4, width))
    assert len(recorder.recordings) == 3
    assert recorder.num_replays == 2
    assert at_once.num_graphs == 2


def test_more_shapes_than_room_are_not_captured_again_and_again(
    graphs: EncoderGraphs, recorder: AgainRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "_MAX_GRAPHS", 2)
    for _ in range(12):
        for width in (2, 4, 6):
            encode(graphs, make_item(1, 2, width))
    assert len(recorder.recordings) == 2
    assert recorder.num_replays == 2 * (12 - NUM_BEFORE_CAPTURE - 1)


def test_shapes_that_came_often_long_ago_give_way(
    graphs: EncoderGraphs, recorder: AgainRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "_MAX_GRAPHS", 1)
    monkeypatch.setattr(encoder_graphs, "_COUNTS_UNTIL_AGED", 8)
    for width in [2] * 16 + [4] * 16:
        encode(graphs, make_item(1, 2, width))
    assert len(recorder.recordings) == 2


def test_an_item_with_large_masks_has_no_graph(
    at_once: EncoderGraphs, recorder: AgainRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "_MAX_KEY_BYTES", 8)
    for _ in range(2):
        encode(at_once, make_item(1))
    assert recorder.recordings == []
    assert len(at_once._counts) == 0


def test_shapes_that_come_once_are_forgotten(
    graphs: EncoderGraphs, recorder: AgainRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "_MAX_COUNTED", 2)
    for width in (2, 4, 6, 2, 4, 6, 2):
        encode(graphs, make_item(1, 2, width))
    assert recorder.recordings == []
    assert len(graphs._counts) == 2


class _FailingRecorder(AgainRecorder):
    def record(self, function: Any) -> Any:
        del function
        raise RuntimeError("operation not permitted when stream is capturing")


class _FullRecorder(AgainRecorder):
    """A recorder for which there is no memory at first."""

    num_failures = 0

    def record(self, function: Any) -> Any:
        self.num_failures += 1
        if self.num_failures < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(function)


class _WrongRecorder(AgainRecorder):
    def record(self, function: Any) -> Any:
        recording = super().record(function)
        recording.replay = lambda *_: None  # type: ignore[method-assign]
        return recording


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [(_FailingRecorder(), "not permitted when"), (_WrongRecorder(), "a replay is off by")],
)
def test_an_encoder_that_can_not_be_captured_runs_without_graphs(
    hf_model: HfModel,
    recorder: AgainRecorder,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder_graphs, "NUM_BEFORE_CAPTURE", 0)
    graphs = EncoderGraphs(hf_model, recorder, max_bytes=1)
    with caplog.at_level("INFO"):
        for width in (2, 2, 4, 6, 8):  # three shapes are tried, each of them once
            assert_encodes(graphs, hf_model, make_item(1, 2, width))
    assert graphs.refused.keys() == {"image"}
    assert len(graphs._counts) == 0
    messages = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("the image encoder runs without CUDA graphs")


def test_an_item_without_finite_numbers_says_nothing_about_graphs(
    at_once: EncoderGraphs, hf_model: HfModel, recorder: AgainRecorder
) -> None:
    bad = make_item(1)
    bad["pixel_values"][0] = float("nan")
    for _ in range(4):
        assert not torch.isfinite(encode(at_once, bad)[0]).all()
    assert at_once._refusals == {}
    for seed in range(2):
        assert_encodes(at_once, hf_model, make_item(seed))
    assert recorder.num_replays == 1


def test_a_lack_of_memory_is_tried_again_later(
    hf_model: HfModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "NUM_BEFORE_CAPTURE", 0)
    recorder = _FullRecorder()
    graphs = EncoderGraphs(hf_model, recorder, max_bytes=1)
    for seed in range(4):
        assert_encodes(graphs, hf_model, make_item(seed))
    assert graphs._refusals == {}
    assert graphs.num_graphs == 1


def test_a_bad_item_fails_only_itself_and_does_not_turn_graphs_off(
    at_once: EncoderGraphs, hf_model: HfModel, recorder: AgainRecorder
) -> None:
    bad = make_item(1)
    for _ in range(2):
        with (
            torch.inference_mode(),
            pytest.raises(RequestError, match="gave 6 embeddings for media items that need 7"),
        ):
            at_once.encode("image", [bad], [7])
    for seed in range(2):
        assert_encodes(at_once, hf_model, make_item(seed))
    assert recorder.num_replays == 1


def test_python_frees_nothing_while_a_graph_is_captured() -> None:
    assert gc.isenabled()
    with pause_garbage_collection():
        assert not gc.isenabled()
        with pause_garbage_collection():
            pass
        assert not gc.isenabled()
    with suppress(KeyError), pause_garbage_collection():
        raise KeyError
    assert gc.isenabled()
