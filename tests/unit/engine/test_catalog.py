"""The list of families says what is true of their models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

import sensorium
from sensorium.cli.models import HEADER, format_table, get_rows
from sensorium.engine.assembly.catalog import describe_model
from sensorium.engine.assembly.options import LoadingOptions
from sensorium.models.ctc_transducer import CtcTransducerModel
from sensorium.models.encoder_decoder import EncoderDecoderModel
from sensorium.models.families import KNOWN_MODELS, OWN_MODELS
from sensorium.multimodal.processing.processor import PROCESSOR_CALLS, MultiModalProcessor
from sensorium.types.families import FAMILIES
from tests.parity.cases import MODALITIES
from tests.parity.ctc_transducer_reference import FAMILIES as RECOGNISERS
from tests.parity.speaking import FAMILIES as SPEECH_FAMILIES

MODEL_TYPES = [family.model_type for family in FAMILIES]
STREAMED = {"voxtral_realtime"}
TINY_MODELS = {"qwen2_5_omni_thinker": "qwen2_5_omni"}


def test_every_family_is_tested_and_every_tested_one_is_listed() -> None:
    listed = {TINY_MODELS.get(name, name) for name in MODEL_TYPES}
    assert listed | {"gemma4_causal", "whisper_en", "wav2vec2_layer"} == {
        *MODALITIES,
        *SPEECH_FAMILIES,
        *RECOGNISERS,
        *STREAMED,
    }
    assert len(KNOWN_MODELS) == len(FAMILIES)


def test_the_list_names_exactly_the_families_with_code_of_their_own() -> None:
    speech = {name for name, kind in OWN_MODELS.items() if kind is EncoderDecoderModel}
    ctc_transducer = {name for name, kind in OWN_MODELS.items() if kind is CtcTransducerModel}
    code = {
        "models/families": OWN_MODELS.keys() - speech - ctc_transducer - STREAMED,
        "models/streaming": STREAMED,
        "models/encoder_decoder": speech,
        "models/ctc_transducer": ctc_transducer,
        "multimodal/processing": PROCESSOR_CALLS.keys() | STREAMED,
    }
    for place, by_type in code.items():
        assert {f.model_type for f in FAMILIES if place in f.own_code} == set(by_type)
        path = Path(sensorium.__file__).parent / place
        assert path.is_dir() or path.with_suffix(".py").is_file()


def test_the_page_has_the_list_as_it_is_printed() -> None:
    """The rest of the page is compared by `make test`, after the tests that it counts."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    missing = [row for row in get_rows() if f"| {' | '.join(row)} |\n" not in page]
    assert missing == []


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_modalities_are_those_of_the_processor(
    tiny_model: Callable[[str], str], model_type: str
) -> None:
    directory = tiny_model(TINY_MODELS.get(model_type, model_type))
    config = AutoConfig.from_pretrained(directory)
    listed = next(family for family in FAMILIES if family.model_type == model_type)
    assert config.model_type == model_type
    assert MultiModalProcessor(directory, config).modalities == listed.modalities


def test_a_ctc_transducer_model_is_described_as_one(tiny_model: Callable[[str], str]) -> None:
    text = describe_model(LoadingOptions(model=tiny_model("parakeet_tdt")))
    assert "ParakeetForTDT" in text
    assert "besides text: audio" in text
    assert "audio:        16000 samples a second" in text
    assert "context:      none: it takes nothing but audio" in text
    assert "transcribes, long audio in pieces" in text


def test_the_table_has_a_line_for_each_family() -> None:
    lines = format_table(get_rows(), HEADER).splitlines()
    assert len(lines) == len(FAMILIES) + 1
    assert len({line.index(row[1]) for line, row in zip(lines[1:], get_rows(), strict=True)}) == 1


def test_a_model_is_described_without_its_weights(tiny_model: Callable[[str], str]) -> None:
    text = describe_model(LoadingOptions(model=tiny_model("qwen2_5_vl")))
    assert "Qwen2_5_VLForConditionalGeneration" in text
    assert "<|image_pad|>, <|video_pad|>" in text
    assert "8192 tokens" in text
    assert "switched off: -" in text
