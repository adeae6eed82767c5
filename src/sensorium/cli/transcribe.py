"""The command `transcribe`, which transcribes audio and video files.

It uses a model in this process, or a running server. Both give their results to a
`TranscriptWriter`. A file that fails is named on stderr, and the others are still transcribed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from sensorium.checkpoints.files import CONFIG, read_json
from sensorium.checkpoints.first_look import find_directory
from sensorium.cli import flags
from sensorium.cli.keys import VARIABLE, get_client_key
from sensorium.cli.speech.audio_folders import FoundAudio, find_audio_files
from sensorium.cli.speech.transcript_writer import AudioFile, TranscriptWriter
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.embedded.cache import PACKED_MODEL
from sensorium.speech.formats import SPEECH_FORMATS, as_json, as_plain, as_verbose
from sensorium.speech.instructions import CANNOT_TRANSLATE, find_instruction
from sensorium.speech.live.session import DELAYS_MS
from sensorium.types.errors import RequestError
from sensorium.types.options import join_words, list_options
from sensorium.types.sampling import SamplingParams
from sensorium.utils.printable import make_one_line

if TYPE_CHECKING:
    from sensorium.engine.llm import LLM
    from sensorium.speech.formats import SpeechFormat
    from sensorium.speech.transcript import Transcript

_DESCRIPTION = """Transcribe audio and videos of any length. Text is printed as it is found; several
files are computed together. With --output-dir each file gets a transcript of its own, such as
talk.srt for talk.mp3. A file that fails is named on stderr, the others are transcribed all the
same, and the exit code is 1."""
_EXAMPLES = """examples:
  sensorium transcribe talk.mp3 --model openai/whisper-small
  sensorium transcribe *.mp4 --model MODEL --format srt --output-dir subtitles
  sensorium transcribe talk.mp3 --model MODEL --format verbose_json --word-timestamps
  sensorium transcribe recordings --model MODEL --output-dir transcripts
  sensorium transcribe rede.flac --model MODEL --language de --task translate
  sensorium transcribe talk.mp3 --url http://localhost:8000
  ffmpeg -i film.mkv -f wav - | sensorium transcribe - --model MODEL
  arecord -q -t raw -f S16_LE -r 16000 -c 1 | sensorium transcribe --live - --url URL
"""
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} s of audio [{elapsed}<{remaining}]"
_STDIN = "-"
_KEY_VARIABLE = "OPENAI_API_KEY"
# Paths of errors that every file would have, because they are of the options.
_SHARED_PATHS = (("language",), ("prompt",), ("temperature",), ("task",))


def add_transcribe(commands: Any) -> None:
    parser = commands.add_parser(
        "transcribe",
        help="transcribe what is said in audio and videos",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE",
        help="An audio file, or a video with audio; - is stdin. Of a directory, all files below it "
        "that have names of audio or video files.",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help=f"{flags.MODEL_HELP} With --url: its name."
    )
    _add_output_flags(parser)
    _add_speech_flags(parser)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        metavar="URL",
        help="Send the files to this server instead of loading a model. Text is streamed.",
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"The server's key. Default: ${VARIABLE} or ${_KEY_VARIABLE}, if one of them is set.",
    )
    server.add_argument(
        "--live",
        action="store_true",
        help="Transcribe while it is spoken: print words as they come, each turn on a line of its "
        "own. FILE must be -, with raw audio: PCM of 16 bits, 16 kHz, one channel. It needs --url.",
    )
    server.add_argument(
        "--delay",
        type=_read_delay,
        metavar="DELAY",
        help="With --live, how far words are behind the audio, for models that write while you "
        f"speak: {join_words((*DELAYS_MS, 'a number of milliseconds'))}. Default: the model's own.",
    )
    flags.add_quiet(parser)
    flags.add_options(parser, "transcribe", *flags.ENGINE_GROUPS)
    parser.set_defaults(run=_transcribe)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format",
        choices=sorted(SPEECH_FORMATS, key="text".__ne__),
        default="text",
        help="The format of transcripts, as in OpenAI's API. verbose_json has the times of "
        "segments. Default: text.",
    )
    group.add_argument(
        "-o",
        "--output-dir",
        metavar="DIR",
        help="Write each transcript to a file in this directory, which is made if it is missing. "
        "Files with the same name are replaced. Default: transcripts are printed.",
    )
    group.add_argument(
        "--word-timestamps",
        action="store_true",
        help="Also give the times of words. It needs the format verbose_json.",
    )


def _add_speech_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speech")
    group.add_argument(
        "--language",
        metavar="NAME",
        help="What is spoken: en or english. Default: the model finds it.",
    )
    group.add_argument(
        "--task",
        choices=("transcribe", "translate"),
        default="transcribe",
        help="Write what is said in its own language, or in English. Default: transcribe.",
    )
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        help="Text that comes before, with names or in the wanted style. Default: none.",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="N",
        help="0 takes the likeliest words, and tries higher temperatures if the text is bad. "
        "Default: 0.",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="The seed of texts at temperatures above 0."
    )


def _read_delay(given: str) -> str | int:
    if given in DELAYS_MS:
        return given
    if given.isdecimal():
        return int(given)
    words = join_words((*DELAYS_MS, "a number of milliseconds"))
    raise argparse.ArgumentTypeError(f"must be {words}, not {given!r}")


def _transcribe(arguments: argparse.Namespace) -> None:
    found = FoundAudio() if arguments.live else find_audio_files(arguments.words)
    _check_usage(arguments, found.audios)
    if arguments.live:
        _run_live(arguments)
        return
    params = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
    audios, problems = found.audios, found.problems
    for line in (*found.notes, *problems):
        print(f"sensorium: {make_one_line(line)}", file=sys.stderr)
    num_failed = len(problems)
    if audios:
        is_headed = len(audios) + len(problems) > 1
        writer = TranscriptWriter(
            audios, arguments.format, arguments.output_dir, is_headed=is_headed
        )
        if arguments.url is None:
            _run_model(arguments, audios, writer, params)
        else:
            _run_server(arguments, audios, writer)
        num_failed += writer.num_failed
    if num_failed:
        sys.exit(1)


def _check_usage(arguments: argparse.Namespace, audios: Sequence[AudioFile]) -> None:
    names, form = list(dict.fromkeys(arguments.words)), arguments.format
    if not names:
        arguments.refuse("there is no file: give at least one, or - for stdin")
    _check_live_usage(arguments, names)
    if arguments.word_timestamps and form != "verbose_json":
        arguments.refuse("--word-timestamps needs --format verbose_json")
    num_files = max(len(names), len(audios))
    if arguments.output_dir is None and num_files > 1 and form != "text":
        arguments.refuse(f"several files in the format {form} need --output-dir")
    if arguments.output_dir is not None:
        targets: dict[str, str] = {}  # name of the transcript's file -> the file it is of
        named = (AudioFile(name) for name in names if not os.path.isdir(name))
        for audio in {audio.name: audio for audio in (*named, *audios)}.values():
            other = targets.setdefault(audio.get_target(form), audio.name)
            if other != audio.name:
                pair = " and ".join(map(make_one_line, (other, audio.name)))
                arguments.refuse(f"{pair} would be written to the same file")
    if arguments.url is not None:
        _check_server_usage(arguments)
    elif arguments.api_key is not None:
        arguments.refuse("--api-key needs --url")


def _check_live_usage(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    if not arguments.live:
        if arguments.delay is not None:
            arguments.refuse("--delay needs --live")
        return
    if names != [_STDIN]:
        arguments.refuse("--live reads raw audio from stdin: give - as the only file")
    if arguments.url is None:
        arguments.refuse(
            "--live needs a server: start one with sensorium serve, and give its --url"
        )
    if arguments.format != "text" or arguments.output_dir is not None:
        arguments.refuse("--live prints text: leave --format and --output-dir out")
    if arguments.task != "transcribe":
        arguments.refuse("--live does not translate")
    for name in ("temperature", "seed"):
        if getattr(arguments, name) is not None:
            arguments.refuse(f"--{name} has no effect with --live: leave it out")


def _check_server_usage(arguments: argparse.Namespace) -> None:
    if not arguments.url.startswith(("http://", "https://")):
        arguments.refuse(f"--url must begin with http:// or https://, not {arguments.url!r}")
    options = [each for group in flags.ENGINE_GROUPS for each in list_options(group)]
    for each in options:
        if "transcribe" in each.commands and hasattr(arguments, each.destination):
            arguments.refuse(f"{each.flag} has no effect on a server: leave it or --url out")
    if arguments.word_timestamps and arguments.task == "translate":
        arguments.refuse("a server does not give the times of words of a translation")


def _run_model(
    arguments: argparse.Namespace,
    audios: Sequence[AudioFile],
    writer: TranscriptWriter,
    params: SamplingParams,
) -> None:
    arguments.model = arguments.model or EMBEDDED_MODEL
    if arguments.task == "translate":
        _check_translation(arguments.model)
    with flags.load_llm(arguments) as llm:
        from tqdm import tqdm

        from sensorium.engine.speech.batch import AudioProgress

        with (
            closing(_start(arguments, llm, audios, params)) as deltas,
            tqdm(disable=None, unit="s", bar_format=_BAR) as bar,
        ):
            progress = AudioProgress(bar)
            for delta in deltas:
                for segment in delta.segments:
                    writer.add_text(delta.index, segment.text)
                progress.add(delta)
                if delta.final is None:
                    continue
                error = delta.final.error
                if error is None:
                    content = _write(delta.final, arguments.format, arguments.word_timestamps)
                    writer.finish(delta.index, content)
                elif error.path in _SHARED_PATHS:
                    raise error
                else:
                    writer.fail(delta.index, str(error))


def _check_translation(model: str) -> None:
    """Raise a `RequestError`, before the model is loaded, if its config excludes translation."""
    directory = PACKED_MODEL if model == EMBEDDED_MODEL else find_directory(model)
    if directory is not None:
        kind = str(read_json(directory / CONFIG).get("model_type"))
        if not find_instruction(kind, directory.name).can_translate:
            raise _name_other(model, RequestError(CANNOT_TRANSLATE, path=("task",)))


def _name_other(model: str, error: RequestError) -> RequestError:
    return RequestError(
        f"{model} can't be used: {error.message}. Name another with --model, such as "
        "openai/whisper-small."
    )


def _start(
    arguments: argparse.Namespace, llm: LLM, audios: Sequence[AudioFile], params: SamplingParams
) -> Any:
    """Return the generator of transcripts, or raise a `RequestError` that names the model."""
    try:
        return llm.stream_transcripts(
            [audio.get_source() for audio in audios],
            task=arguments.task,
            language=arguments.language,
            prompt=arguments.prompt or "",
            temperature=arguments.temperature,
            needs_segments=arguments.format not in ("text", "json"),
            needs_words=arguments.word_timestamps,
            sampling=params,
        )
    except RequestError as error:
        raise _name_other(arguments.model, error) from error


def _write(transcript: Transcript, form: SpeechFormat, has_words: bool) -> str:
    import msgspec

    if form == "json":
        return msgspec.json.encode(as_json(transcript)).decode() + "\n"
    if form == "verbose_json":
        return msgspec.json.encode(as_verbose(transcript, has_words=has_words)).decode() + "\n"
    return as_plain(transcript, form)


def _run_live(arguments: argparse.Namespace) -> None:
    from sensorium.cli.speech.live_client import LiveClient

    names = ("model", "language", "prompt", "delay")
    chosen = {name: getattr(arguments, name) for name in names}
    client = LiveClient(
        arguments.url,
        key=get_client_key(arguments.api_key, _KEY_VARIABLE),
        fields={name: value for name, value in chosen.items() if value is not None},
    )
    if sys.stdin is None:  # it was closed
        sys.exit("sensorium: there is no standard input to read audio from")
    if client.run(sys.stdin.fileno()):
        sys.exit(1)


def _run_server(
    arguments: argparse.Namespace, audios: Sequence[AudioFile], writer: TranscriptWriter
) -> None:
    from sensorium.cli.speech.speech_client import SpeechClient

    fields: dict[str, Any] = {
        "model": arguments.model,
        "response_format": arguments.format,
        "language": arguments.language,
        "prompt": arguments.prompt,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "timestamp_granularities[]": ["segment", "word"] if arguments.word_timestamps else None,
    }
    client = SpeechClient(
        arguments.url,
        key=get_client_key(arguments.api_key, _KEY_VARIABLE),
        task=arguments.task,
        fields={name: value for name, value in fields.items() if value is not None},
    )
    client.run(audios, writer)
