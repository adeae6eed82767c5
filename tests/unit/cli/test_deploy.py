"""The command `deploy` and its config file say the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from sensorium.cli.deploy import Signals, _connect, _make_options, make_config, parse_arguments
from sensorium.scale.options import ScaleOptions
from sensorium.types.errors import ModelError, RequestError

_GIVEN: dict[str, Any] = {
    "model": "org/name",
    "replicas": 3,
    "frontends": 2,
    "max_replicas": 5,
    "encoders": 1,
    "encode_above": 1000,
    "api_key": ["one", "two"],
    "warmup": False,
    "limit_mm_per_prompt": {"image": 2},
    "mm_processor_kwargs": {"size": 5},
    "max_media_mb": 12,
    "port": 0,
}


def test_arguments_of_a_config_file_are_those_of_the_command_line() -> None:
    options, scale = _make_options(parse_arguments(_GIVEN))
    assert options.model == "org/name"
    assert (scale.replicas, scale.max_replicas, scale.frontends, scale.encoders) == (3, 5, 2, 1)
    assert options.api_key == ("one", "two")
    assert options.warmup is False
    assert options.engine.limit_mm_per_prompt == {"image": 2}
    assert options.media.mm_processor_kwargs == {"size": 5}
    assert options.media.media_limits.max_bytes == 12 * 2**20
    assert options.media.encode_above == 1000
    assert options.api_server_count == 1


def test_a_printed_config_file_gives_the_same_options() -> None:
    arguments = parse_arguments(_GIVEN)
    options, scale = _make_options(arguments)
    config = json.loads(make_config(arguments, options))
    (application,) = config["applications"]
    assert application["import_path"] == "sensorium.cli.deploy:build_app"
    again = _make_options(parse_arguments({**application["args"], "port": 0}))
    assert again == (options, scale)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replcas": 2}, "replcas"),
        ({"replicas": 4, "max_replicas": 2}, "max_replicas=2 is less than replicas=4"),
        ({"api_server_count": 2}, "api-server-count"),
        ({"max_model_len": "many"}, "max-model-len"),
    ],
)
def test_wrong_arguments_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        _make_options(parse_arguments(given))


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"cuda_graph_sizes": [1, 2, 4]}, "cuda_graph_sizes", (1, 2, 4)),
        ({"cuda_graph_sizes": "1,2"}, "cuda_graph_sizes", (1, 2)),
        ({"api_key": ["-begins-with-a-dash"]}, "api_key", ["-begins-with-a-dash"]),
        ({"served_model_name": ["a", "b"]}, "served_model_name", ["a", "b"]),
        ({"trust_remote_code": True}, "trust_remote_code", True),
        ({"overlap": False}, "overlap", False),
    ],
)
def test_values_of_every_kind_are_written_as_a_flag_takes_them(
    given: dict[str, Any], name: str, value: object
) -> None:
    assert getattr(parse_arguments(given), name) == value


def test_a_switch_that_is_off_by_default_may_be_set_to_false() -> None:
    assert not hasattr(parse_arguments({"trust_remote_code": False}), "trust_remote_code")


class SlowRay:
    """A Ray on a machine that is too busy. What it raises is what Ray 2.60 raises."""

    def init(self, **_: Any) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen because some of the "
            "raylet failed to startup or the GCS has become overloaded."
        )


def test_a_ray_that_starts_too_slowly_is_reported_with_the_remedy() -> None:
    with pytest.raises(ModelError) as caught:
        _connect(SlowRay(), ScaleOptions())
    words = str(caught.value)
    assert words.startswith("Ray did not start in time, or not at all: The current node timed out")
    assert "--ray-address auto" in words
    assert "less busy" in words
    assert "\n" not in words


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signals = Signals()
    signals.install()
    yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_a_start_even_if_its_exception_is_lost(
    signals: Signals, number: signal.Signals, kind: type[BaseException]
) -> None:
    with pytest.raises(kind):
        os.kill(os.getpid(), number)
    with suppress(BaseException):  # as a finalizer does
        os.kill(os.getpid(), number)
    with pytest.raises(SystemExit) as caught:
        signals.end_start()
    assert caught.value.code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_start_lets_the_application_stop_in_peace(
    signals: Signals, number: signal.Signals
) -> None:
    signals.end_start()
    os.kill(os.getpid(), number)
    signals.wait()
