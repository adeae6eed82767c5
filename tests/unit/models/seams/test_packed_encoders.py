"""Towers that pack their pictures attend to all of them in one call, and never ask the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sensorium.models  # noqa: F401  (before Transformers' model classes)
from sensorium.models.hf_model import HfModel
from sensorium.models.loading import load_config, load_model
from sensorium.models.seams import packed_encoders
from sensorium.models.seams.host_copies import keep_host_copies
from sensorium.models.seams.packed_encoders import PACKED_ATTENTION

PACKING_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "qwen2_5_omni")
GRIDS = ((1, 16, 20), (1, 24, 12), (1, 4, 4))  # time, height and width in patches

LoadTiny = Callable[[str], HfModel]


@pytest.fixture(scope="module")
def load_tiny(tiny_model: Callable[[str], str]) -> LoadTiny:
    def load(family: str) -> HfModel:
        directory, cpu = tiny_model(family), torch.device("cpu")
        return load_model(directory, load_config(directory), dtype=torch.float32, device=cpu)

    return load


def make_items(hf_model: HfModel) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Return random pictures of the sizes of `GRIDS`, and their numbers of embeddings."""
    config = hf_model.config.vision_config
    num_values = 3 * config.temporal_patch_size * config.patch_size**2
    generator = torch.Generator().manual_seed(0)
    items, num_embeds = [], []
    for time, height, width in GRIDS:
        num_patches = time * height * width
        items.append(
            {
                "pixel_values": torch.randn(num_patches, num_values, generator=generator),
                "image_grid_thw": torch.tensor([[time, height, width]]),
            }
        )
        num_embeds.append(num_patches // config.spatial_merge_size**2)
    return items, num_embeds


@pytest.mark.parametrize("family", PACKING_FAMILIES)
def test_packed_embeddings_are_those_of_the_model_on_its_own(
    load_tiny: LoadTiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_model = load_tiny(family)
    items, num_embeds = make_items(hf_model)
    with torch.inference_mode():
        with hf_model.own_attention():
            expected = hf_model.encode("image", items, num_embeds)
        calls = _count_calls(monkeypatch)
        found = hf_model.encode("image", items, num_embeds)

    assert calls, "the packed attention was not called"
    assert all(has_lengths for has_lengths in calls)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _count_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note for each call of the attention whether it comes with lengths."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[bool] = []

    def attend(*arguments: Any, **options: Any) -> Any:
        calls.append(options.get("cu_seq_lens_q") is not None)
        return packed_encoders._packed_attention(*arguments, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, PACKED_ATTENTION, attend)
    return calls


@pytest.mark.parametrize("family", PACKING_FAMILIES)
def test_an_item_has_the_same_embeddings_in_a_batch_of_one(
    load_tiny: LoadTiny, family: str
) -> None:
    hf_model = load_tiny(family)
    items, num_embeds = make_items(hf_model)
    with torch.inference_mode():
        together = hf_model.encode("image", items, num_embeds)
        for item, count, embeds in zip(items, num_embeds, together, strict=True):
            [alone] = hf_model.encode("image", [item], [count])
            torch.testing.assert_close(alone, embeds, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", PACKING_FAMILIES)
def test_a_tower_never_reads_from_its_device(load_tiny: LoadTiny, family: str) -> None:
    """The device is `meta`: its tensors have no numbers, and reading one is an error."""
    hf_model = load_tiny(family)
    items, _ = make_items(hf_model)
    tower = next(tower for tower in hf_model._towers if hasattr(tower.config, "patch_size"))
    tower.to("meta")
    pixels = torch.cat([item["pixel_values"] for item in items]).to("meta")
    grids = torch.cat([item["image_grid_thw"] for item in items])
    on_device = grids.to("meta")

    with torch.inference_mode(), keep_host_copies([(on_device, grids)]):
        output = tower(pixels, grid_thw=on_device)

    assert output.pooler_output.device.type == "meta"


def test_without_the_host_copies_a_tower_reads_from_its_device(load_tiny: LoadTiny) -> None:
    hf_model = load_tiny("qwen2_5_vl")
    items, _ = make_items(hf_model)
    tower = hf_model._towers[0].to("meta")
    with torch.inference_mode(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        tower(items[0]["pixel_values"].to("meta"), grid_thw=items[0]["image_grid_thw"].to("meta"))


@pytest.mark.parametrize("family", ["llava", "idefics3", "gemma3", "qwen2_audio", "internvl"])
def test_towers_without_that_path_keep_their_attention(load_tiny: LoadTiny, family: str) -> None:
    hf_model = load_tiny(family)
    assert hf_model._towers == []
    configs = [getattr(hf_model.config, name, None) for name in ("vision_config", "audio_config")]
    assert all(c._attn_implementation == "sdpa" for c in configs if c is not None)


def test_attention_without_lengths_uses_its_mask() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 5, 8)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, ..., 3:] = False
    module = torch.nn.Module()
    arguments = (module, query, key, value, mask)
    found, _ = ALL_ATTENTION_FUNCTIONS[PACKED_ATTENTION](*arguments, scaling=0.5, is_causal=False)
    theirs, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=0.5, is_causal=False)
    unmasked, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        *arguments[:4], None, scaling=0.5, is_causal=False
    )
    assert torch.equal(found, theirs)
    assert not torch.allclose(found, unmasked)
