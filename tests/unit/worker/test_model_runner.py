"""The runner does what the schedule says, and refuses what the model can not run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.kv_layout import LayerSpec, group_layers
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.request import EngineCoreRequest
from sensorium.types.scheduling import (
    EncoderInput,
    KVCacheGroup,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
    StartedRequest,
)
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.model_runner import ModelRunner

from .factories import GREEDY, make_feature, make_request, make_scheduled

VOCAB_SIZE = 16


class CountingModel:
    """A model of one attention-free layer: the next token is the last one plus one.

    An embedding of an item stands for the token that its value names.
    """

    device = torch.device("cpu")
    vocab_size = VOCAB_SIZE
    bidirectional_modalities: frozenset[str] = frozenset()
    has_causal_full_layers = False
    has_mrope = False
    alignment_heads: ClassVar[dict[int, list[int]]] = {}
    long_after = None

    def choosing_factors(self, is_long: torch.Tensor | None) -> AbstractContextManager[None]:
        assert is_long is None
        return nullcontext()

    def make_conditions(self, delays: torch.Tensor | None) -> dict[str, Any]:
        assert delays is None
        return {}

    def encode(
        self, modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        del modality
        values = [int(item["value"]) for item in items]
        if any(value < 0 for value in values):
            raise ValueError("negative")
        pairs = zip(values, num_embeds, strict=True)
        return [torch.eye(VOCAB_SIZE)[torch.tensor([v] * n)] for v, n in pairs]

    def embed(
        self, input_ids: torch.Tensor, mm_index: torch.Tensor | None, mm_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        embeds = torch.eye(VOCAB_SIZE)[input_ids.clamp(max=VOCAB_SIZE - 1)]
        if mm_index is not None and mm_embeds is not None:
            embeds = embeds.index_copy(0, mm_index, mm_embeds)
        return embeds[None], {}

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, call: object, extra: dict[str, Any]
    ) -> torch.Tensor:
        del positions, call, extra
        return embeds[0].roll(1, dims=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 10

    def get_mrope_positions(self, *_: object) -> tuple[torch.Tensor, int]:
        raise IndexError("the grid is too large")


def make_runner(
    hf_model: CountingModel | None = None, payloads: dict[str, MultiModalKwargsItem] | None = None
) -> ModelRunner:
    spec = LayerSpec(layer_index=0, num_kv_heads=1, key_dim=2, value_dim=2, window=None, source=0)
    groups = (KVCacheGroup(num_blocks=9),)
    cpu = torch.device("cpu")
    return ModelRunner(
        hf_model or CountingModel(),  # type: ignore[arg-type]
        kv_cache=KVCache(
            group_layers([spec]), groups, block_size=4, dtype=torch.float32, device=cpu
        ),
        groups=groups,
        block_size=4,
        attention=TorchPagedAttention(block_size=4, dtype=torch.float32),
        payloads=payloads or {},
    )


def start(
    runner: ModelRunner,
    requests: Sequence[EngineCoreRequest],
    scheduled: Sequence[ScheduledRequest],
    **changes: Any,
) -> ModelRunnerOutput:
    return execute(
        runner,
        SchedulerOutput(
            scheduled=tuple(scheduled),
            started=tuple(StartedRequest(request=request) for request in requests),
            **changes,
        ),
    )


def execute(runner: ModelRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
    return runner.finish(runner.launch(plan))


def test_a_request_continues_from_the_tokens_it_sampled() -> None:
    runner = make_runner()
    request = make_request((3, 4))
    first = start(runner, [request], [make_scheduled("r", 0, 2, block_ids=((1,),))])
    second = start(runner, [], [make_scheduled("r", 2, 3)])
    assert (first.token_ids, second.token_ids) == ({"r": (5,)}, {"r": (6,)})


def test_a_chunk_before_the_last_samples_nothing() -> None:
    runner = make_runner()
    blocks = ((1,),)
    chunk = make_scheduled("r", 0, 2, block_ids=blocks, num_sampled=0)
    assert start(runner, [make_request((3, 4, 8))], [chunk]).token_ids == {}
    assert start(runner, [], [make_scheduled("r", 2, 3)]).token_ids == {"r": (9,)}


def test_a_resumed_request_has_its_blocks_replaced_and_its_tokens_back() -> None:
    runner = make_runner()
    request = make_request((3, 4))
    start(runner, [request], [make_scheduled("r", 0, 2, block_ids=((1,),))])
    resumed = SchedulerOutput(
        stopped_request_ids=("r",),
        started=(StartedRequest(request=request, output_token_ids=(9,)),),
        scheduled=(make_scheduled("r", 0, 3, block_ids=((7,),)),),
    )
    assert execute(runner, resumed).token_ids == {"r": (10,)}


def test_a_stopped_request_is_forgotten() -> None:
    runner = make_runner()
    start(runner, [make_request((3, 4))], [make_scheduled("r", 0, 2, block_ids=((1,),))])
    start(runner, [], [], stopped_request_ids=("r",))
    with pytest.raises(KeyError):
        start(runner, [], [make_scheduled("r", 2, 3)])


def test_an_item_that_fails_takes_only_its_own_requests_along() -> None:
    payloads = {"good": {"value": torch.tensor(6)}, "bad": {"value": torch.tensor(-1)}}
    runner = make_runner(payloads=payloads)
    requests = [
        make_request((1, 1), make_feature("good", 1, 1), request_id="a"),
        make_request((1, 1), make_feature("bad", 1, 1), request_id="b"),
        make_request((2,), request_id="c"),
    ]
    scheduled = [
        make_scheduled("a", 0, 2, block_ids=((1,),), encoder_inputs=_encode("good")),
        make_scheduled("b", 0, 2, block_ids=((2,),), encoder_inputs=_encode("bad")),
        make_scheduled("c", 0, 1, block_ids=((3,),)),
    ]
    output = start(runner, requests, scheduled)
    assert output.token_ids == {"a": (7,), "c": (3,)}
    assert output.failed_encodes.keys() == {"bad"}
    assert "good" in runner.encoder_cache
    start(runner, [], [], freed_encoder_keys=("good",))
    assert "good" not in runner.encoder_cache


def _encode(key: str) -> tuple[EncoderInput, ...]:
    return (EncoderInput(mm_index=0, key=key),)


def test_a_step_says_how_long_it_encoded() -> None:
    runner = make_runner(payloads={"good": {"value": torch.tensor(6)}})
    request = make_request((1, 1), make_feature("good", 1, 1))
    scheduled = make_scheduled("r", 0, 2, block_ids=((1,),), encoder_inputs=_encode("good"))
    encoding = start(runner, [request], [scheduled])
    decoding = start(runner, [], [make_scheduled("r", 2, 3)])
    assert encoding.encode_s > 0
    assert decoding.encode_s == 0


def test_a_step_with_only_failed_requests_runs_no_model() -> None:
    runner = make_runner(payloads={"bad": {"value": torch.tensor(-1)}})
    request = make_request((1, 1), make_feature("bad", 1, 1))
    scheduled = make_scheduled("r", 0, 2, block_ids=((1,),), encoder_inputs=_encode("bad"))
    output = start(runner, [request], [scheduled])
    assert output.token_ids == {}
    assert "negative" in output.failed_encodes["bad"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"min_tokens": 1}, 0),
        ({"min_tokens": 0}, 5),
        ({"min_tokens": 1, "ignore_eos": True}, 5),
        ({"min_tokens": 1, "ignore_eos": True, "stop_token_ids": (5,)}, 0),
    ],
)
def test_what_would_end_a_request_is_banned_before_min_tokens(
    changes: dict[str, Any], expected: int
) -> None:
    """After 4 comes 5, which ends the request; token 0 is the first of the others."""
    params = replace(GREEDY, **changes)
    request = make_request((4,), params=params, eos_token_ids=(5,))
    output = start(make_runner(), [request], [make_scheduled("r", 0, 1, block_ids=((1,),))])
    assert output.token_ids == {"r": (expected,)}


def test_a_token_outside_the_vocabulary_is_refused_unless_an_item_replaces_it() -> None:
    runner = make_runner()
    runner.add_request(make_request((1, 99, 2), make_feature("x", 1, 1)))
    with pytest.raises(RequestError, match="token id 99 is outside the model's vocabulary of 16"):
        runner.add_request(make_request((1, 99, 2)))
    masked = make_feature("x", 1, 2, (False, True))
    with pytest.raises(RequestError, match="token id 99"):
        runner.add_request(make_request((1, 99, 2), masked))


def test_media_that_gives_no_positions_is_the_callers_fault() -> None:
    hf_model = CountingModel()
    hf_model.has_mrope = True
    runner = make_runner(hf_model, {"x": {}})
    with pytest.raises(RequestError, match=r"no positions.*the grid is too large"):
        runner.add_request(make_request((1, 2), make_feature("x", 1, 1)))


def test_an_item_that_failed_before_may_be_sent_again_whatever_happened_between() -> None:
    payloads: dict[str, MultiModalKwargsItem] = {"x": {"value": torch.tensor([-1])}}
    runner = make_runner(payloads=payloads)
    feature = make_feature("x", 0, 1)
    encoder_inputs = (EncoderInput(mm_index=0, key="x"),)

    def plan(request_id: str, stopped: tuple[str, ...]) -> SchedulerOutput:
        request = make_request((9, 4), feature, request_id=request_id)
        entry = make_scheduled(request_id, 0, 2, block_ids=((1,),), encoder_inputs=encoder_inputs)
        return SchedulerOutput(
            scheduled=(entry,),
            started=(StartedRequest(request=request),),
            stopped_request_ids=stopped,
        )

    assert "negative" in execute(runner, plan("a", ())).failed_encodes["x"]
    run = runner.encoder_runner.run
    runner.encoder_runner.run = lambda _: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        runner.launch(plan("b", ("a",)))
    runner.encoder_runner.run = run  # type: ignore[method-assign]
    payloads["x"] = {"value": torch.tensor([3])}
    again = execute(runner, plan("c", ("b",)))
    assert again.failed_requests == {}
    assert again.token_ids == {"c": (5,)}
