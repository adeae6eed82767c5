"""A random Qwen2.5-VL of the shape of the 3B one, made on the device, and prompts with an image."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
import transformers

from qwen_shapes import IMAGE_PAD, VISION_END, VISION_START, make_config
from sensorium import SamplingParams
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreRequest

NUM_TEXT_TOKENS = 80
GRID = 32  # patches along each side of an image
PATCH_ELEMENTS = 3 * 2 * 14 * 14
NUM_IMAGE_TOKENS = (GRID // 2) ** 2
_ids = count()

Prompt = tuple[list[int], dict[str, torch.Tensor]]


def make_model(device: str, *, is_tiny: bool) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
            make_config("tiny" if is_tiny else "3b"),
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        )
    model.generation_config.eos_token_id = None
    return model.eval()


def make_prompts(
    num_prompts: int, *, seed: int, num_text_tokens: int = NUM_TEXT_TOKENS
) -> list[Prompt]:
    """Token ids and the tensors of an image, all random."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(num_prompts):
        text = torch.randint(100, 150_000, (num_text_tokens,), generator=generator).tolist()
        image = [VISION_START, *[IMAGE_PAD] * NUM_IMAGE_TOKENS, VISION_END]
        tensors = {
            "pixel_values": torch.randn(GRID * GRID, PATCH_ELEMENTS, generator=generator),
            "image_grid_thw": torch.tensor([[1, GRID, GRID]]),
        }
        prompts.append((text[:16] + image + text[16:], tensors))
    return prompts


def make_request(token_ids: list[int], *, max_tokens: int) -> EngineCoreRequest:
    index = next(_ids)
    return EngineCoreRequest(
        request_id=f"request-{index}",
        prompt_token_ids=tuple(token_ids),
        sampling_params=SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            max_tokens=max_tokens,
            ignore_eos=True,
        ),
        mm_features=(
            MultiModalFeatureSpec(
                modality="image",
                mm_hash=f"image-{index}",
                mm_position=PlaceholderRange(token_ids.index(IMAGE_PAD), NUM_IMAGE_TOKENS),
            ),
        )
        if IMAGE_PAD in token_ids
        else (),
    )
