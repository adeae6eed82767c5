"""Items are encoded in batches per modality, and a bad one fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ENCODED, MultiModalKwargsItem
from sensorium.worker.encoder_runner import EncoderCache, EncoderJob, EncoderRunner

from .factories import make_feature


class FakeModel:
    """Encodes an item of value v to embeddings of v; a batch with a bad value fails as a whole."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[float]]] = []

    def to_model(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float()

    def encode(
        self, modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        values = [float(item["value"]) for item in items]
        self.batches.append((modality, values))
        if -1.0 in values:
            raise RequestError("negative")
        if -2.0 in values:
            raise RuntimeError("sizes don't match")
        return list(
            torch.cat(
                [torch.full((n, 2), v) for v, n in zip(values, num_embeds, strict=True)]
            ).split(list(num_embeds))
        )


def job(key: str, value: float, num_embeds: int = 2, modality: str = "image") -> EncoderJob:
    return EncoderJob(
        key=key,
        feature=make_feature(key, 0, num_embeds, modality=modality),
        item={"value": torch.tensor(value)},
    )


@pytest.fixture
def hf_model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def cache() -> EncoderCache:
    return EncoderCache()


@pytest.fixture
def runner(hf_model: FakeModel, cache: EncoderCache) -> EncoderRunner:
    return EncoderRunner(hf_model, cache)  # type: ignore[arg-type]


def test_items_of_one_modality_run_in_one_batch(
    runner: EncoderRunner, hf_model: FakeModel, cache: EncoderCache
) -> None:
    jobs = [job("a", 1.0, 3), job("v", 5.0, modality="video"), job("b", 2.0, 1)]
    assert runner.run(jobs).failed == {}
    assert hf_model.batches == [("image", [1.0, 2.0]), ("video", [5.0])]
    assert cache["a"].tolist() == [[1.0, 1.0]] * 3
    assert cache["b"].tolist() == [[2.0, 2.0]]


def take(key: str, embeds: torch.Tensor, num_embeds: int) -> EncoderJob:
    return EncoderJob(key=key, feature=make_feature(key, 0, num_embeds), item={"embeds": embeds})


def test_encoded_items_are_copied_next_to_newly_encoded_ones(
    runner: EncoderRunner, hf_model: FakeModel, cache: EncoderCache
) -> None:
    given = torch.tensor([[3.0, 4.0]])
    jobs = [job("a", 1.0), take("b", given, 1), take("c", torch.ones(2, 2), 2)]
    assert runner.run(jobs).failed == {}
    assert hf_model.batches == [("image", [1.0])]
    given.zero_()  # the memory of a cache, which is used again
    assert cache["b"].tolist() == [[3.0, 4.0]]
    assert cache["c"].tolist() == [[1.0, 1.0]] * 2


class Store:
    """A store that keeps the names of what was saved, and is never asked."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save_encoded(self, mm_hash: str, encoded: torch.Tensor) -> None:  # noqa: ARG002
        self.saved.append(mm_hash)


def test_only_items_encoded_here_under_their_own_hash_are_kept(runner: EncoderRunner) -> None:
    jobs = [job(key, 7.0) for key in "abc"]
    own = [replace(each, feature=replace(each.feature, has_content_hash=True)) for each in jobs]
    came = replace(own[1], item={**own[1].item, ENCODED: torch.zeros(2, 2)})
    store = runner.store = Store()
    encoded = runner.run([own[0], came, jobs[2]])
    assert encoded.loaded == {"b"}
    assert store.saved == ["a"]
    assert (runner.num_loaded, runner.num_encoded) == (1, 2)


def test_wrong_embeddings_fail_only_their_item(runner: EncoderRunner, cache: EncoderCache) -> None:
    jobs = [take("few", torch.ones(1, 2), 2), take("good", torch.ones(2, 2), 2)]
    jobs.append(take("large", torch.full((2, 2), 1e30).double() * 1e30, 2))
    failed = runner.run(jobs).failed
    assert failed.keys() == {"few", "large"}
    assert "made 1 embeddings for an item that has 2 places" in failed["few"]
    assert "not finite" in failed["large"]
    assert "good" in cache


def test_nothing_to_encode_runs_nothing(runner: EncoderRunner, hf_model: FakeModel) -> None:
    assert runner.run([]).failed == {}
    assert hf_model.batches == []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (-1.0, "RequestError: negative"),
        (-2.0, "RuntimeError: sizes don't match"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
    ],
)
def test_only_the_bad_item_of_a_batch_fails_with_its_reason(
    runner: EncoderRunner, cache: EncoderCache, bad: float, reason: str
) -> None:
    failed = runner.run([job("a", 1.0), job("bad", bad), job("b", 2.0)]).failed
    assert failed.keys() == {"bad"}
    assert failed["bad"].startswith("the image could not be encoded: ")
    assert reason in failed["bad"]
    assert "bad" not in cache
    assert cache["a"].tolist() == [[1.0, 1.0]] * 2
    assert cache["b"].tolist() == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_a_bad_item_does_not_touch_another_modality(
    runner: EncoderRunner, hf_model: FakeModel, cache: EncoderCache, bad: float
) -> None:
    failed = runner.run([job("bad", bad), job("v", 3.0, modality="video")]).failed
    assert failed.keys() == {"bad"}
    assert "v" in cache
    assert hf_model.batches.count(("video", [3.0])) == 1


def test_items_of_unequal_shape_run_separately_without_padding(
    runner: EncoderRunner, hf_model: FakeModel
) -> None:
    wide = EncoderJob(
        key="wide",
        feature=make_feature("wide", 0, 2),
        item={"value": torch.tensor(3.0), "mask": torch.ones(1, 5)},
    )
    narrow = EncoderJob(
        key="narrow",
        feature=make_feature("narrow", 0, 2),
        item={"value": torch.tensor(4.0), "mask": torch.ones(1, 4)},
    )
    assert runner.run([wide, narrow]).failed == {}
    assert hf_model.batches == [("image", [3.0]), ("image", [4.0])]


def test_a_lone_item_that_fails_is_not_tried_again(
    runner: EncoderRunner, hf_model: FakeModel
) -> None:
    assert "negative" in runner.run([job("a", -1.0)]).failed["a"]
    assert len(hf_model.batches) == 1


def test_a_step_reads_from_the_device_once_however_many_batches_it_has(
    runner: EncoderRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = 0
    read = torch.Tensor.tolist

    def count_and_read(tensor: torch.Tensor) -> object:
        nonlocal num_reads
        num_reads += 1
        return read(tensor)

    def refuse(tensor: torch.Tensor) -> bool:
        raise AssertionError(f"{tensor} was read")

    monkeypatch.setattr(torch.Tensor, "tolist", count_and_read)
    monkeypatch.setattr(torch.Tensor, "__bool__", refuse)
    jobs = [job(f"{m}{i}", 1.0, modality=m) for m in ("image", "video", "audio") for i in range(3)]
    assert runner.run(jobs).failed == {}
    assert num_reads == 1
