"""Items are batched for an encoder, and its embeddings are split again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sensorium.models.hf_model import HfModel, find_blocks
from sensorium.models.loading import load_config, load_model
from sensorium.models.media_batches import collate, split_output
from sensorium.models.seams.paged_attention import _paged_attention
from sensorium.types.errors import ModelError, RequestError


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[[str], str]) -> HfModel:
    directory = tiny_model("llama")
    cpu = torch.device("cpu")
    return load_model(directory, load_config(directory), dtype=torch.float32, device=cpu)


def test_equal_shapes_are_concatenated_in_order() -> None:
    items = [{"pixels": torch.full((n, 2), float(n))} for n in (1, 3)]
    assert collate(items)["pixels"].tolist() == [[1, 1], [3, 3], [3, 3], [3, 3]]


def test_items_that_are_not_of_a_kind_are_refused() -> None:
    items = [{"a": torch.ones(1)}, {"b": torch.ones(1)}]
    with pytest.raises(RequestError, match=r"different tensors: \['a'\], \['b'\]"):
        collate(items)


ROWS = torch.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize(
    "output",
    [
        SimpleNamespace(pooler_output=ROWS),
        SimpleNamespace(pooler_output=ROWS.reshape(2, 3, 2)),
        SimpleNamespace(pooler_output=(ROWS[:4].reshape(2, 2, 2), ROWS[4:5], ROWS[5:])),
        SimpleNamespace(
            pooler_output=torch.cat([ROWS.reshape(2, 3, 2), torch.full((2, 1, 2), 9.0)], dim=1),
            attention_mask=torch.tensor([[1, 1, 1, 0]] * 2),
        ),
    ],
    ids=["rows", "a batch", "a list", "a padded batch"],
)
def test_embeddings_without_parts_are_split_by_their_counts(output: Any) -> None:
    parts = split_output(output, [9, 9], [1, 5])
    assert torch.equal(parts[0], ROWS[:1])
    assert torch.equal(parts[1], ROWS[1:])


def test_a_count_that_does_not_fit_the_placeholders_is_refused() -> None:
    with pytest.raises(RequestError, match="gave 6 embeddings for media items that need 5"):
        split_output(SimpleNamespace(pooler_output=ROWS), [1, 1], [2, 3])


def test_an_item_of_several_parts_gets_them_all() -> None:
    output = SimpleNamespace(pooler_output=(ROWS[:1], ROWS[1:3], ROWS[3:]))
    parts = split_output(output, [2, 1], [3, 3])
    assert torch.equal(parts[0], ROWS[:3])
    assert torch.equal(parts[1], ROWS[3:])


@pytest.mark.parametrize(
    ("output", "num_parts", "num_embeds", "message"),
    [
        ((ROWS[:4], ROWS[4:]), [1, 1], [3, 3], "gave 4 embeddings for media items that need 3"),
        ((ROWS[:2], ROWS[2:4], ROWS[4:]), [2, 1, 0], [2, 2, 2], "gave 4 embeddings for"),
        (
            ROWS.reshape(3, 2, 2),
            [2, 1, 0],
            [2, 2, 2],
            "gave 4 embeddings for media items that need 2",
        ),
    ],
)
def test_counts_that_fit_only_together_are_refused(
    output: Any, num_parts: list[int], num_embeds: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        split_output(SimpleNamespace(pooler_output=output), num_parts, num_embeds)


def test_embeddings_replace_tokens_that_need_not_be_in_the_vocabulary(llama: HfModel) -> None:
    ids = torch.tensor([3, 10**6, 4])
    width = llama.text_config.hidden_size
    embeds, _ = llama.embed(ids, torch.tensor([1]), torch.full((1, width), 7.0))
    plain, _ = llama.embed(torch.tensor([3, 4]), None, None)
    assert torch.equal(embeds[0, [0, 2]], plain[0])
    assert bool((embeds[0, 1] == 7.0).all())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logit_scale": 2.0}, lambda x: x * 2),
        ({"logits_scaling": 4.0}, lambda x: x / 4),
        ({"final_logit_softcapping": 3.0}, lambda x: 3 * torch.tanh(x / 3)),
    ],
)
def test_logits_are_scaled_as_the_config_says(
    llama: HfModel, changes: dict[str, float], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.linspace(-1, 1, llama.text_config.hidden_size)[None]
    plain = llama.logits(hidden)
    for name, value in changes.items():
        monkeypatch.setattr(llama.text_config, name, value, raising=False)
    torch.testing.assert_close(llama.logits(hidden), expected(plain))


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_attention_that_no_backend_honours_is_refused_by_name(name: str) -> None:
    tensor = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ModelError, match=f"Identity needs attention with '{name}'"):
        _paged_attention(
            torch.nn.Identity(),
            tensor,
            tensor,
            tensor,
            attention_call=None,  # type: ignore[arg-type]
            **{name: 1.0},
        )


def test_a_mask_that_a_layer_makes_is_refused() -> None:
    tensor = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ModelError, match="Identity makes an attention mask of its own"):
        _paged_attention(
            torch.nn.Identity(),
            tensor,
            tensor,
            tensor,
            tensor,
            attention_call=None,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["aya_vision", "cohere2_vision"])
def test_logits_that_the_model_does_not_scale_are_unchanged(
    tiny_model: Callable[[str], str], family: str, dtype: torch.dtype
) -> None:
    directory = tiny_model(family)
    cpu = torch.device("cpu")
    hf_model = load_model(directory, load_config(directory), dtype=dtype, device=cpu)
    hf_model.probe_layers()
    hidden = torch.linspace(-1, 1, hf_model.text_config.hidden_size, dtype=dtype)[None]
    unscaled = hf_model.model.get_output_embeddings()(hidden).float()
    assert hf_model.text_config.logit_scale == 0.25
    assert torch.equal(hf_model.logits(hidden), unscaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_scaled_as_the_model_scales_them(
    tiny_model: Callable[[str], str], dtype: torch.dtype
) -> None:
    directory = tiny_model("gemma4")
    cpu = torch.device("cpu")
    hf_model = load_model(directory, load_config(directory), dtype=dtype, device=cpu)
    hf_model.probe_layers()
    hidden = 50 * torch.linspace(-1, 1, hf_model.text_config.hidden_size, dtype=dtype)[None]
    softcap = hf_model.text_config.final_logit_softcapping
    unscaled = hf_model.model.get_output_embeddings()(hidden).float()
    assert torch.equal(hf_model.logits(hidden), torch.tanh(unscaled / softcap) * softcap)


def test_logits_that_are_computed_in_another_way_are_refused(
    tiny_model: Callable[[str], str],
) -> None:
    directory = tiny_model("llama")
    cpu = torch.device("cpu")
    hf_model = load_model(directory, load_config(directory), dtype=torch.float32, device=cpu)
    own = hf_model.model.get_output_embeddings()
    hf_model._head = lambda hidden: own(hidden).flip(-1)
    with pytest.raises(ModelError, match="can't be run: its logits are neither the output of its"):
        hf_model.probe_layers()


def test_layers_of_decoder_and_encoder_call_before_they_run(
    tiny_model: Callable[[str], str],
) -> None:
    directory = tiny_model("qwen2_5_vl")
    cpu = torch.device("cpu")
    hf_model = load_model(directory, load_config(directory), dtype=torch.float32, device=cpu)
    names = {type(block).__name__ for block in find_blocks(hf_model.model)}
    assert names == {"Qwen2_5_VLVisionBlock", "Qwen2_5_VLDecoderLayer"}
    calls: list[None] = []
    num_blocks = hf_model.call_before_blocks(lambda: calls.append(None))
    num_layers = hf_model.text_config.num_hidden_layers
    assert num_blocks == num_layers + hf_model.config.vision_config.depth
    with torch.inference_mode(), hf_model.own_attention():
        hf_model.model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(calls) == num_layers
