"""Every layer of a model gives a sign before it runs: those of the decoder and of the encoders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForImageTextToText

from sensorium.models.blocks import call_before_blocks, find_blocks


def test_layers_of_decoder_and_encoder_call_before_they_run(
    tiny_model: Callable[[str], str],
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny_model("qwen2_5_vl"))
    config = model.config
    names = {type(block).__name__ for block in find_blocks(model)}
    assert names == {"Qwen2_5_VLVisionBlock", "Qwen2_5_VLDecoderLayer"}
    calls: list[None] = []
    num_blocks = call_before_blocks(model, lambda: calls.append(None))
    num_layers = config.text_config.num_hidden_layers
    assert num_blocks == num_layers + config.vision_config.depth
    with torch.inference_mode():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(calls) == num_layers
