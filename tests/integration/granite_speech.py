"""Compares a tiny Granite Speech with Transformers, in a process that may stand in for torchaudio.

python -m tests.integration.granite_speech DIRECTORY

The model is made in the directory. The last line of the output is JSON. Transformers looks for
torchaudio as soon as it is imported, so the caller puts the stand-in into `PYTHONPATH`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import transformers as tf

from sensorium import LLM, RequestError, SamplingParams
from sensorium.engine.assembly.catalog import describe_model
from sensorium.engine.assembly.options import LoadingOptions
from sensorium.models.hf_model import HfModel
from tests.integration.odd_models import make_granite_speech

_NUM_SAMPLES = (16_000, 16_000, 16_000, 9_000, 33_333, 9_000, 50_001)  # some are equally long
_PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
_PROMPT = "hello <|audio|> what is it"


def main() -> None:
    directory = make_granite_speech(Path(sys.argv[1]))
    llm = LLM(directory, device="cpu", dtype="float32", max_model_len=512, use_tqdm_on_load=False)
    generator = np.random.default_rng(0)
    audios = [(0.1 * generator.standard_normal(n)).astype(np.float32) for n in _NUM_SAMPLES]
    batches: list[int] = []
    encode = HfModel.encode

    def count(hf_model: HfModel, modality: str, items: Any, num_embeds: Any) -> Any:
        batches.append(len(items))
        return encode(hf_model, modality, items, num_embeds)

    HfModel.encode = count  # type: ignore[method-assign]
    prompts: Any = [{"prompt": _PROMPT, "multi_modal_data": {"audio": s}} for s in audios]
    outputs = llm.generate(prompts, _PARAMS, use_tqdm=False)
    try:
        two: Any = {"prompt": 2 * "<|audio|>", "multi_modal_data": {"audio": audios[:2]}}
        llm.generate(two, _PARAMS, use_tqdm=False)
        refusal = ""
    except RequestError as error:
        refusal = str(error)
    print(
        json.dumps(
            {
                "switched_off": llm.input_processor.switched_off.reasons,
                "only_one": llm.input_processor.switched_off.only_one,
                "most_in_a_batch": max(batches),
                "ours": [list(output.outputs[0].token_ids) for output in outputs],
                "theirs": generate_alone(directory, audios),
                "refusal": refusal,
                "description": describe_model(LoadingOptions(model=directory), is_tried=True),
            }
        )
    )


def generate_alone(directory: str, audios: list[Any]) -> list[list[int]]:
    """Return the tokens of Transformers' `generate`, for one audio item after another."""
    processor = tf.AutoProcessor.from_pretrained(directory)
    model = tf.GraniteSpeechForConditionalGeneration.from_pretrained(directory).eval()
    model.generation_config.eos_token_id = None
    answers = []
    for audio in audios:
        inputs = processor(text=[_PROMPT], audio=[audio], return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
        answers.append(tokens[inputs["input_ids"].shape[1] :].tolist())
    return answers


if __name__ == "__main__":
    main()
