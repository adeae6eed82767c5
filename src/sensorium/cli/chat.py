"""The commands `chat`, with the model's chat template, and `generate`, without one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from sensorium.cli import flags
from sensorium.types.errors import CapacityError, ModelError, RequestError
from sensorium.types.outputs import RequestOutput
from sensorium.types.request import TextPrompt
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    from sensorium.engine.llm import LLM

_HELP = "/image, /audio or /video FILE|URL adds media to the next question; /reset; /quit or Ctrl-D"
_DESCRIPTION = """Ask one question with the model's chat template, and print the answer as it comes.
Media stands before the text: images, then audio, then videos. Without a
question it is read from stdin; on a terminal a conversation begins."""
_EXAMPLES = """examples:
  sensorium chat MODEL "What is this?" --image cat.png
  sensorium chat MODEL "What is said here?" --audio speech.wav -v
  sensorium chat MODEL --image cat.png < question.txt
  sensorium chat MODEL                      (on a terminal: a conversation)
  sensorium chat                            (with sensorium-mini)
  sensorium chat "What is this?" --image cat.png
"""
_TRANSFERS = {  # `MediaItemReport.transfer` -> words
    "tensors": "sent to the engine",
    "shared": "read from shared memory",
    "none": "the engine had it",
}
Part = dict[str, Any]


def add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="ask a model about images, audio and videos",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_words(
        chat,
        "QUESTION",
        f"{flags.MODEL_HELP} Then the question. Without one it is read from stdin, or a "
        "conversation begins. A single word is a model, unless it has spaces or marks that no "
        "model has.",
    )
    flags.add_media_flags(chat, "that goes with the (first) question")
    chat.add_argument(
        "--system",
        metavar="TEXT",
        help="A system message that stands in front of the conversation.",
    )
    chat.add_argument(
        "--chat-template",
        metavar="FILE",
        help="The file of a chat template. Default: the model's own.",
    )
    chat.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="After each answer, write to stderr which cache served each media item, the number of "
        "tokens, and times.",
    )
    flags.add_quiet(chat)
    flags.add_sampling_flags(chat, max_tokens=256)
    flags.add_options(chat, "chat", *flags.ENGINE_GROUPS)
    chat.set_defaults(run=_chat)


def add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="generate from prompts, in this process",
        description="Generate from one or more prompts, batched, and print the answers. "
        "Prompts are taken as they are: no chat template is applied (`sensorium chat` does).",
    )
    flags.add_words(
        generate,
        "PROMPT",
        f"{flags.MODEL_HELP} Then prompts: text, with the model's marker for each media item. A "
        "single word is a prompt.",
    )
    flags.add_media_flags(generate, "for the prompt's markers, in order (one prompt only)")
    flags.add_quiet(generate)
    flags.add_sampling_flags(generate, max_tokens=64, has_n=True)
    flags.add_options(generate, "generate", *flags.ENGINE_GROUPS)
    generate.set_defaults(run=_generate)


def _chat(arguments: argparse.Namespace) -> None:
    """Answer the question that is an argument or on stdin, or hold a conversation on a terminal."""
    arguments.model, text, too_much = flags.split_question(arguments.words, arguments.named_model)
    if too_much:
        arguments.refuse(f"unrecognized arguments: {' '.join(too_much)}")
    params = flags.make_sampling_params(arguments)
    parts = [_make_part(m, source) for m in flags.MEDIA_FLAGS for source in getattr(arguments, m)]
    if text is None and not sys.stdin.isatty():
        try:
            text = sys.stdin.read().strip()
        except UnicodeDecodeError as error:
            raise RequestError(f"the question on stdin can't be read as text: {error}") from error
        if not text:
            hint = _hint_at_question(arguments)
            raise RequestError(f"there is no question: give it as an argument or on stdin{hint}")
    with _load(arguments) as llm:
        answer = partial(_answer, arguments, llm, params)
        if text is None:
            _converse(answer, arguments.system, parts)
        else:
            answer([*_make_system(arguments.system), _make_question(parts, text)])


def _load(arguments: argparse.Namespace) -> LLM:
    try:
        return flags.load_llm(arguments)
    except ModelError as error:
        raise ModelError(f"{error}{_hint_at_question(arguments)}") from error


def _hint_at_question(arguments: argparse.Namespace) -> str:
    return "" if arguments.named_model is not None else flags.hint_at_question(arguments.words)


def _converse(answer: Callable[[list[Part]], str], system: str | None, parts: list[Part]) -> None:
    """Read questions from the terminal and answer them, until end of input or `/quit`.

    `answer` takes all messages and returns the reply. `parts` are media for the first question. A
    question that fails is reported and dropped, and the conversation continues.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` a history and line editing)
    print(_HELP, file=sys.stderr)
    messages = _make_system(system)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        command, _, argument = line.partition(" ")
        if command == "/quit":
            return
        try:
            if command == "/reset":
                messages, parts = _make_system(system), []
            elif command.removeprefix("/") in flags.MEDIA_FLAGS and command.startswith("/"):
                parts.append(_make_part(command[1:], argument.strip()))
            elif command.startswith("/"):
                print(_HELP, file=sys.stderr)
            elif line:
                question, parts = _make_question(parts, line), []
                reply = answer([*messages, question])
                messages += [question, {"role": "assistant", "content": reply}]
        except (RequestError, CapacityError) as error:
            print(f"sensorium: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(interrupted)", file=sys.stderr)


def _make_part(modality: str, source: str) -> Part:
    return {"type": modality, modality: flags.read_media(source)}


def _make_question(parts: list[Part], text: str) -> Part:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _make_system(text: str | None) -> list[Part]:
    return [] if text is None else [{"role": "system", "content": text}]


def _answer(
    arguments: argparse.Namespace, llm: LLM, params: SamplingParams, messages: list[Part]
) -> str:
    """Print the model's answer while it is generated, and return its whole text."""
    start = time.perf_counter()
    first_s = None
    output: RequestOutput | None = None
    with closing(
        llm.stream_chat(messages, params, chat_template=arguments.chat_template)
    ) as deltas:
        for entry in deltas:
            first_s = first_s or time.perf_counter() - start
            for delta in entry.deltas:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
            output = entry.final
    print(flush=True)
    if output is None:
        return ""
    if arguments.verbose:
        for line in _describe(output, first_s=first_s or 0.0, total_s=time.perf_counter() - start):
            print(line, file=sys.stderr)
    return output.outputs[0].text


def _describe(output: RequestOutput, *, first_s: float, total_s: float) -> Iterator[str]:
    """Yield lines for `--verbose`: cache hits of each media item, token counts and times."""
    counts: Counter[str] = Counter()
    for item in output.mm_items:
        processor = "processor cache hit" if item.is_processor_hit else "processed"
        label = f"{item.modality} {counts[item.modality]}"
        yield f"{label}: {processor}, {_TRANSFERS[item.transfer]} ({item.mm_hash[:12]})"
        counts[item.modality] += 1
    if counts:
        yield (
            f"{output.num_encoder_hits} media item(s) from the encoder cache (within the cached "
            "prefix none is needed)"
        )
    yield (
        f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them from "
        f"the prefix cache; {len(output.outputs[0].token_ids)} new tokens; "
        f"{output.outputs[0].finish_reason}"
    )
    yield f"first token after {first_s:.3f} s, all after {total_s:.3f} s"


def _generate(arguments: argparse.Namespace) -> None:
    arguments.model, texts = flags.split_prompts(arguments.words, arguments.named_model)
    if not texts:
        arguments.refuse("there is no prompt: give at least one")
    params = flags.make_sampling_params(arguments)
    given = [modality for modality in flags.MEDIA_FLAGS if getattr(arguments, modality)]
    if given and len(texts) > 1:
        raise RequestError(f"--{given[0]} goes with one prompt only, but there are {len(texts)}")
    media = {
        modality: [flags.read_media(source) for source in getattr(arguments, modality)]
        for modality in given
    }
    prompts: list[TextPrompt] = [{"prompt": text, "multi_modal_data": media} for text in texts]
    with flags.load_llm(arguments) as llm:
        for output in llm.generate(prompts, params, use_tqdm=len(prompts) > 1):
            for completion in output.outputs:
                print(completion.text)
