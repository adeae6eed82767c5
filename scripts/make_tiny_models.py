"""Makes tiny random models with tokenizer, processor and chat template, offline.

    python scripts/make_tiny_models.py build/tiny-models [family ...]

Weights are scaled so that the models are sensitive to their inputs: with the usual initialisation a
random model only echoes, and a wrong mask, position or embedding would not change its tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as tf

from sensorium.models import ensure_torchvision

ensure_torchvision()

from tiny_models import (  # noqa: E402  (after the shim)
    audio,
    ctc_transducer,
    gemma,
    qwen,
    recognition,
    speech,
    text,
    vision,
)

FAMILIES: dict[str, Callable[[Path], None]] = {
    "llama": text.make_llama,
    "phi3": text.make_phi3,
    "llava": vision.make_llava,
    "llava_next": vision.make_llava_next,
    "llava_onevision": vision.make_llava_onevision,
    "idefics3": vision.make_idefics3,
    "smolvlm": vision.make_smolvlm,
    "internvl": vision.make_internvl,
    "aya_vision": vision.make_aya_vision,
    "cohere2_vision": vision.make_cohere2_vision,
    "qwen2_vl": qwen.make_qwen2_vl,
    "qwen2_5_vl": qwen.make_qwen2_5_vl,
    "qwen3_vl": qwen.make_qwen3_vl,
    "qwen3_vl_moe": qwen.make_qwen3_vl_moe,
    "glm4v": qwen.make_glm4v,
    "gemma3": gemma.make_gemma3,
    "gemma4": gemma.make_gemma4,
    "gemma4_causal": gemma.make_gemma4_causal,
    "qwen2_audio": audio.make_qwen2_audio,
    "audioflamingo3": audio.make_audioflamingo3,
    "qwen2_5_omni": audio.make_qwen2_5_omni,
    "voxtral": audio.make_voxtral,
    "voxtral_realtime": audio.make_voxtral_realtime,
    "glmasr": recognition.make_glmasr,
    "qwen3_asr": recognition.make_qwen3_asr,
    "whisper": speech.make_whisper,
    "whisper_en": speech.make_whisper_en,
    "moonshine": speech.make_moonshine,
    "wav2vec2": ctc_transducer.make_wav2vec2,
    "wav2vec2_layer": ctc_transducer.make_wav2vec2_layer,
    "hubert": ctc_transducer.make_hubert,
    "wavlm": ctc_transducer.make_wavlm,
    "data2vec-audio": ctc_transducer.make_data2vec_audio,
    "unispeech": ctc_transducer.make_unispeech,
    "unispeech-sat": ctc_transducer.make_unispeech_sat,
    "wav2vec2-conformer": ctc_transducer.make_wav2vec2_conformer,
    "sew": ctc_transducer.make_sew,
    "wav2vec2-bert": ctc_transducer.make_wav2vec2_bert,
    "parakeet_ctc": ctc_transducer.make_parakeet_ctc,
    "parakeet_tdt": ctc_transducer.make_parakeet_tdt,
    "parakeet_rnnt": ctc_transducer.make_parakeet_rnnt,
}


def make_family(name: str, parent: Path) -> Path:
    """The directory of a family's model below `parent`, made if it isn't there."""
    directory = parent / name
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=parent, prefix=f".{name}.") as folder:
            FAMILIES[name](Path(folder) / name)
            with suppress(OSError):  # someone else was faster
                (Path(folder) / name).rename(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tiny random models.")
    parser.add_argument("directory", type=Path, help="where to put them, one folder each")
    parser.add_argument(
        "families", nargs="*", metavar="family", help=f"default: all of {', '.join(FAMILIES)}"
    )
    arguments = parser.parse_args()
    tf.utils.logging.disable_progress_bar()
    for name in arguments.families or FAMILIES:
        if name not in FAMILIES:
            parser.error(f"unknown family {name!r}: choose from {', '.join(FAMILIES)}")
        print(f"{name:16s} {make_family(name, arguments.directory)}", flush=True)


if __name__ == "__main__":
    main()
