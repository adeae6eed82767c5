"""The command `sensorium demo`, which asks about samples twice to show what caches save."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sensorium.cli.flags import MODEL_HELP
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.embedded.samples import DEMO_SAMPLES, DemoSample

if TYPE_CHECKING:
    from sensorium.cli.demo_screen import Screen
    from sensorium.cli.demo_server import Answer, DemoClient

_DESCRIPTION = """Start a server on this machine, ask it about the pictures, sounds and the video
that come with the package, and then ask other questions about the same media: what was perceived
once is not perceived again. Times are those of a client, from a question to the end of its answer.
Ends the server, too."""
_EPILOG = "On a terminal with colors and at least 68 columns, media is drawn. Ctrl-C ends it."
_STAGES = {"decode": "decoded", "process": "processed"}


def add_command(commands: Any) -> None:
    """Add the command `demo`."""
    demo = commands.add_parser(
        "demo",
        help="show what a model sees and hears, and what its caches save",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    demo.add_argument("model", nargs="?", metavar="MODEL", default=EMBEDDED_MODEL, help=MODEL_HELP)
    demo.add_argument(
        "--no-color", action="store_true", help="Write plain text, and draw no media."
    )
    demo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Start a server, ask it about the samples, and end it."""
    from sensorium.cli.demo_screen import Screen
    from sensorium.cli.demo_server import DemoClient, DemoServer

    screen = Screen(has_color=not arguments.no_color)
    screen.say(f"Starting a server with {arguments.model} ...")
    start = time.perf_counter()
    with DemoServer(arguments.model) as server:
        url = server.wait_until_ready()
        screen.say(f"{url} is ready after {time.perf_counter() - start:.1f} s.")
        with DemoClient(url) as client:
            client.connect()
            show_samples(screen, client)


def show_samples(screen: Screen, client: DemoClient) -> None:
    """Ask twice about each sample that the model takes, and show the times."""
    screen.say()
    screen.say("First: nothing of this was seen or heard before.", "bold")
    first = _ask_all(screen, client, DEMO_SAMPLES, 0)
    screen.say()
    screen.say("Again: the same media, other questions.", "bold")
    again = _ask_all(screen, client, first, 1)
    screen.say()
    screen.show_times([(sample.title, first[sample], again[sample]) for sample in again])


def _ask_all(
    screen: Screen, client: DemoClient, samples: Iterable[DemoSample], number: int
) -> dict[DemoSample, Answer]:
    """Ask about samples, and return the answers.

    A sample that is refused is reported and left out. Raises an error if all of them are.
    """
    from sensorium.cli.demo_server import DemoRefusedError

    answers: dict[DemoSample, Answer] = {}
    refused: DemoRefusedError | None = None
    for sample in samples:
        try:
            answers[sample] = _ask(screen, client, sample, number)
        except DemoRefusedError as error:
            screen.say(f"  left out: {error}", "yellow")
            refused = error
    if refused is not None and not answers:
        raise refused
    return answers


def _ask(screen: Screen, client: DemoClient, sample: DemoSample, number: int) -> Answer:
    screen.say()
    screen.say(f"{sample.title} ({', '.join(sample.files)})", "cyan")
    if number == 0:
        for item in sample.media:
            screen.show_media(item)
    screen.say(f"> {sample.questions[number] or '(what is said)'}", "green")
    answer = client.ask(sample.media, sample.questions[number], on_text=screen.write)
    screen.say()
    screen.say(f"  {answer.seconds:.3f} s: {describe_trace(answer.trace)}", "dim")
    return answer


def describe_trace(trace: dict[str, Any]) -> str:
    """Return what was done for the media of a request, and what caches had, in words."""
    parts = [f"{item['modality']} {_describe_item(item)}" for item in trace["items"]]
    if "encode" in trace["ms"]:
        parts.append(f"encoding took {trace['ms']['encode']:.0f} ms")
    num_tokens, num_cached = trace["num_prompt_tokens"], trace["num_cached_tokens"]
    parts.append(f"{num_cached} of {num_tokens} prompt tokens from the prefix cache")
    return "; ".join(parts)


def _describe_item(item: dict[str, Any]) -> str:
    words = {"hit": "embeddings from the encoder cache", "miss": "encoded"}
    encoder = words.get(item["encoder"], "no encoding needed")
    if item["processor"] == "hit":
        return f"from the processor cache, {encoder}"
    times = [
        f"{word} in {item['ms'][stage]:.0f} ms"
        for stage, word in _STAGES.items()
        if stage in item["ms"]
    ]
    return ", ".join([*times, encoder])
