"""Seconds of audio that are transcribed in a second, against Transformers' `generate`.

Whisper tiny.en in float32. Clips have 10 seconds of noise, no two alike, and the number of tokens
that each is decoded to is fixed for all parties: 25, or from 5 to 60 with the same mean. The
parties are `LLM.generate`, `model.generate` one clip after another, and `model.generate` with all
clips in one batch, which runs to the longest answer. Features are computed within the time of each.
They run in turn, several times, in one process with the same number of threads. Ratios are those of
neighbours in time, and all figures are medians. Next to the elapsed time stands that of the
processors, which other programs on the machine disturb less.

again: `LLM.transcribe` of files for the first time and for the second, and how often a file is
decoded, features are computed and the encoder is run in each.

With --random the weights are random, and DIRECTORY needs a config and a tokenizer only.

python benchmarks/speech.py [--model DIRECTORY [--random]] [--device cuda] [--rounds N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import soundfile  # type: ignore[import-untyped]
import torch
import transformers

from records import write_record
from sensorium import LLM, SamplingParams
from sensorium.engine.speech.models import WhisperModel
from sensorium.multimodal.processing.audio import AudioProcessor

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from fetch_real_models import fetch

RATE = 16_000
CLIP_S = 10.0
NUM_TOKENS = 25
MIXED = (5, 60, 12, 20, 36, 16, 28, 23)  # 25 in the mean
MAX_SINGLE = 4  # clips one by one in a turn: their speed doesn't depend on how many there are
SIZES = (1, 8, 32)
Samples = npt.NDArray[np.float32]
Answers = list[list[int]]
_seeds = count()


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Audio clips, and to how many tokens each of them is decoded."""

    audios: list[Samples]
    lengths: list[int]


@dataclass(kw_only=True)
class Times:
    """The seconds that a party took for a second of audio, by the clock and of processors."""

    clock: list[float] = field(default_factory=list)
    processors: list[float] = field(default_factory=list)


class Reference:
    """Transformers' model and feature extractor."""

    def __init__(self, directory: Path, device: str) -> None:
        model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        )
        self._model = model.eval().to(device)
        self._extractor = transformers.WhisperFeatureExtractor.from_pretrained(directory)
        config = model.generation_config
        self.prompt = [config.decoder_start_token_id, config.no_timestamps_token_id]

    @torch.inference_mode()
    def run(self, clips: Clips) -> Answers:
        """Decode all clips in one batch, as long as the longest of them."""
        audio = self._extractor(clips.audios, sampling_rate=RATE, return_tensors="pt")
        length = max(clips.lengths)
        tokens = self._model.generate(
            audio.input_features.to(self._model.device),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            num_beams=1,
        )
        rows = [row[2:] if row[:2] == self.prompt else row for row in tokens.tolist()]
        return [row[:number] for row, number in zip(rows, clips.lengths, strict=True)]

    def run_singly(self, clips: Clips) -> Answers:
        pairs = zip(clips.audios, clips.lengths, strict=True)
        return [self.run(Clips(audios=[a], lengths=[b]))[0] for a, b in pairs]


def run_ours(llm: LLM, prompt: list[int], clips: Clips) -> Answers:
    prompts: list[Any] = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"audio": [(audio, RATE)]}}
        for audio in clips.audios
    ]
    params = [
        SamplingParams(temperature=0.0, min_tokens=number, max_tokens=number)
        for number in clips.lengths
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def make_clips(size: int, *, is_mixed: bool) -> Clips:
    """Make clips that no cache has seen."""
    generator = np.random.default_rng(next(_seeds))
    audios = [generator.normal(0, 0.1, int(CLIP_S * RATE)).astype(np.float32) for _ in range(size)]
    lengths = [MIXED[i % len(MIXED)] if is_mixed else NUM_TOKENS for i in range(size)]
    return Clips(audios=audios, lengths=lengths)


def measure_size(
    llm: LLM, reference: Reference, size: int, *, is_mixed: bool, num_rounds: int
) -> dict[str, Any]:
    parties: dict[str, Callable[[Clips], Answers]] = {
        "ours": lambda clips: run_ours(llm, reference.prompt, clips),
        "batch": reference.run,
        "singly": reference.run_singly,
    }
    times = {name: Times() for name in parties}
    num_equal = 0
    for index in range(num_rounds):
        clips = make_clips(size, is_mixed=is_mixed)
        some = Clips(audios=clips.audios[:MAX_SINGLE], lengths=clips.lengths[:MAX_SINGLE])
        answers = {}
        # The order turns around, so that no party is always the one after another.
        for name in list(parties)[:: -1 if index % 2 else 1]:
            asked = some if name == "singly" and not is_mixed else clips
            if name == "singly" and is_mixed:
                continue  # the same as with equal lengths
            clock, processors = perf_counter(), process_time()
            answers[name] = parties[name](asked)
            audio_s = CLIP_S * len(asked.audios)
            times[name].clock.append((perf_counter() - clock) / audio_s)
            times[name].processors.append((process_time() - processors) / audio_s)
        num_equal += sum(a == b for a, b in zip(answers["ours"], answers["batch"], strict=True))
    figures = summarize(times) | {"equal_answers": f"{num_equal} of {num_rounds * size}"}
    print(f"{size} clips{', mixed' if is_mixed else ''}: {json.dumps(figures)}", flush=True)
    return figures


def summarize(times: dict[str, Times]) -> dict[str, Any]:
    """Return the speed of each party, and ours against those of the others."""
    figures: dict[str, Any] = {}
    for name, each in times.items():
        if each.clock:
            figures[f"{name}_sound_s_per_s"] = round(1 / statistics.median(each.clock), 2)
    for name in ("batch", "singly"):
        for kind in ("clock", "processors"):
            if times[name].clock:
                unit = "" if kind == "clock" else "_of_processor_time"
                figures[f"ratio_to_{name}{unit}"] = get_ratio(
                    getattr(times[name], kind), getattr(times["ours"], kind)
                )
    return figures


def get_ratio(times: list[float], others: list[float]) -> float:
    """Return the median ratio of neighbours in time."""
    return round(statistics.median(a / b for a, b in zip(times, others, strict=True)), 2)


@contextmanager
def counting(llm: LLM) -> Iterator[Counter[str]]:
    """Count how often files are decoded, features are computed and the encoder is run."""
    counter: Counter[str] = Counter()

    def count_calls(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            counter[name] += 1
            return call(*arguments, **options)

        return counted

    hf_model = llm.core.runner._hf_model
    decode = "sensorium.multimodal.decoding.decoding.decode_audio"
    from sensorium.multimodal.decoding.audio import decode_audio

    with ExitStack() as stack:
        for patched in (
            patch(decode, count_calls("decoded", decode_audio)),
            patch.object(
                AudioProcessor, "process", count_calls("features", AudioProcessor.process)
            ),
            patch.object(hf_model, "encode", count_calls("encoded", hf_model.encode)),
        ):
            stack.enter_context(patched)
        yield counter


def measure_again(llm: LLM, size: int, num_rounds: int, *, has_files: bool) -> dict[str, Any]:
    """Transcribe as many files at once twice, each time to the same number of tokens."""
    speech = llm._speech
    assert isinstance(speech, WhisperModel)
    settings = replace(speech.settings, temperatures=(0.0,), max_new_tokens=NUM_TOKENS)
    llm._speech = replace(speech, settings=settings)
    first, second = Times(), Times()
    counts: dict[str, Counter[str]] = {"first": Counter(), "second": Counter()}
    # All tokens are decoded, also those behind the end of the text.
    sampling = SamplingParams(ignore_eos=True)
    warm = make_clips(1, is_mixed=False).audios[0]
    llm.transcribe([(warm, RATE)], use_tqdm=False, sampling=sampling)
    with counting(llm) as counter:
        for _ in range(num_rounds):
            audios = make_clips(size, is_mixed=False).audios
            files: list[Any] = [make_file(s) if has_files else (s, RATE) for s in audios]
            for name, times in (("first", first), ("second", second)):
                counter.clear()
                clock, processors = perf_counter(), process_time()
                transcripts = llm.transcribe(files, use_tqdm=False, sampling=sampling)
                times.clock.append(perf_counter() - clock)
                times.processors.append(process_time() - processors)
                counts[name] += counter
                for found in transcripts:
                    assert found.usage.num_output_tokens == NUM_TOKENS
    llm._speech = speech
    figures = {
        "first_ms": round(1e3 * statistics.median(first.clock), 1),
        "second_ms": round(1e3 * statistics.median(second.clock), 1),
        "ratio": get_ratio(first.clock, second.clock),
        "ratio_of_processor_time": get_ratio(first.processors, second.processors),
        "num_files": num_rounds * size,
        "calls": {
            name: {part: seen[part] for part in ("decoded", "features", "encoded")}
            for name, seen in counts.items()
        },
    }
    print(f"{size} clips, again: {json.dumps(figures)}", flush=True)
    return figures


def make_file(samples: Samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, "PCM_16", format="FLAC")
    return file.getvalue()


def measure(
    directory: Path,
    num_rounds: int,
    sizes: tuple[int, ...],
    device: str,
    *,
    has_files: bool,
    **options: Any,
) -> dict[str, Any]:
    reference = Reference(directory, device)
    with LLM(directory, max_num_seqs=max(SIZES), dtype="float32", device=device, **options) as llm:
        warm = make_clips(1, is_mixed=False)
        reference.run(warm)
        run_ours(llm, reference.prompt, warm)
        figures: dict[str, Any] = {"num_threads": torch.get_num_threads(), "clip_s": CLIP_S}
        for size in sizes:
            # Few clips are soon done, and vary more.
            rounds = num_rounds * (3 if size == 1 else 1)
            figures.setdefault("again", {})[str(size)] = measure_again(
                llm, size, rounds, has_files=has_files
            )
            for is_mixed in (False, True) if size > 1 else (False,):
                kind = "mixed" if is_mixed else "equal"
                figures.setdefault(kind, {})[str(size)] = measure_size(
                    llm, reference, size, is_mixed=is_mixed, num_rounds=rounds
                )
    return figures


def make_random(source: Path, folder: Path) -> Path:
    """Make a checkpoint with random weights from a config and a tokenizer."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(0)
    config = transformers.WhisperConfig.from_pretrained(folder)
    model: Any = transformers.WhisperForConditionalGeneration(config)
    generation = transformers.GenerationConfig.from_pretrained(folder)
    model.generation_config = generation  # a new model has another one, which would replace it
    model.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a Whisper (default: tiny.en, fetched)")
    parser.add_argument("--random", action="store_true", help="give it random weights")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="clips at once")
    parser.add_argument("--threads", type=int, help="of torch, for all (default: torch's own)")
    parser.add_argument(
        "--max-num-encoder-embeds", type=int, help="of a step of ours (default: the engine's)"
    )
    parser.add_argument(
        "--samples", action="store_true", help="give samples, not files, where PyAV is missing"
    )
    parser.add_argument("--record", action="store_true", help="write a record")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()  # it warns of each length that is given
    transformers.utils.logging.disable_progress_bar()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    directory = arguments.model or fetch("whisper")
    with TemporaryDirectory() as folder:
        if arguments.random:
            directory = make_random(directory, Path(folder) / "whisper")
        figures = measure(
            directory,
            arguments.rounds,
            tuple(arguments.sizes),
            arguments.device,
            has_files=not arguments.samples,
            max_num_encoder_embeds=arguments.max_num_encoder_embeds,
        )
    if arguments.record:
        name = "speech" if arguments.device == "cpu" else "speech_cuda"
        print(f"record: {write_record(name, figures, commit=arguments.commit).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
