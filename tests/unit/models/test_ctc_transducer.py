"""How CTC/transducer models are recognised, what checkpoints may lack, and what is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sensorium.core.admission import Limits
from sensorium.engine.assembly.memory import plan_memory
from sensorium.engine.assembly.options import EngineOptions
from sensorium.models.ctc_transducer import CtcTransducerModel
from sensorium.models.families import find_model_class
from sensorium.models.loading import get_model_class, load_config, load_model
from sensorium.types.errors import ModelError
from sensorium.types.model_kind import NO_DECODER
from tests.parity.ctc_transducer_reference import WITHOUT_PADDING

CPU = torch.device("cpu")
TinyModel = Callable[[str], str]


def load(directory: str, dtype: torch.dtype = torch.float32) -> CtcTransducerModel:
    hf_model = load_model(directory, load_config(directory), dtype=dtype, device=CPU)
    assert isinstance(hf_model, CtcTransducerModel)
    return hf_model


def make_lacking(source: str, directory: Path, *ends: str) -> str:
    """Make a copy of a checkpoint without the weights with names that end so."""
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.endswith(ends)}
    assert len(kept) == len(weights) - len(ends)
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def test_weights_for_training_may_be_missing(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("wav2vec2")
    load(make_lacking(source, tmp_path / "as published", "masked_spec_embed"))
    lacking = make_lacking(source, tmp_path / "broken", "masked_spec_embed", "lm_head.bias")
    with pytest.raises(ModelError, match=r"lack 1 tensors of the model, for example lm_head\.bias"):
        load(lacking)


def test_a_model_without_a_head_is_no_ctc_transducer_model(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    directory = tmp_path / "headless"
    shutil.copytree(tiny_model("wav2vec2"), directory)
    path = directory / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": ["Wav2Vec2ForPreTraining"]})
    )
    config = load_config(str(directory))
    assert find_model_class(config).kind.decoder != "none"
    with pytest.raises(ModelError, match="it does not generate text"):
        get_model_class(str(directory), config)


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (family, dtype)
        for family in ("hubert", "wavlm", "parakeet_tdt", *WITHOUT_PADDING)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        # There it changes less than rounding does.
        if (family, dtype) != ("wav2vec2-conformer", torch.bfloat16)
    ],
)
def test_what_padding_changes_is_found_in_every_dtype(
    tiny_model: TinyModel, family: str, dtype: torch.dtype
) -> None:
    assert load(tiny_model(family), dtype)._can_pad is (family not in WITHOUT_PADDING)


@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_ctc"])
def test_memory_is_planned_only_for_encoders_and_tables(tiny_model: TinyModel, family: str) -> None:
    limits = Limits(
        max_model_len=2,
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        encoder_cache_size=1000,
        max_num_encoder_embeds=500,
    )
    plan = plan_memory(
        load_config(tiny_model(family)),
        EngineOptions(),
        kind=NO_DECODER,
        limits=limits,
        weights_bytes=7,
        element_size=4,
        device=CPU,
    )
    assert (plan.weights_bytes, plan.kv_cache_bytes, plan.step_bytes) == (7, 0, 0)
    assert plan.encoder_cache_bytes == 16_000
    assert plan.encoder_peak_bytes > 500 * 32 * 4
    assert plan.graph_bytes == plan.encoder_graph_bytes == 0


def test_a_transducer_that_never_advances_ends_separately_for_each_recording(
    tiny_model: TinyModel,
) -> None:
    hf_model = load(tiny_model("parakeet_tdt"))
    head, config = hf_model.model.joint.head, hf_model.config
    with torch.no_grad():
        head.bias[config.blank_token_id] = -1e3
        head.bias[config.vocab_size] = 1e3  # a duration of 0 frames
    encoded = torch.randn(2, 5, config.decoder_hidden_size)
    with torch.inference_mode():
        tables = hf_model._transduce(encoded, [2, 5], [19, 49])
    assert [len(table) for table in tables] == [19, 49]
    assert not tables[1][:, 2:].any()
