"""Engines with a remote encoder that is late, gone, hung, full or of the wrong kind."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sensorium import LLM, SamplingParams
from sensorium.engine.encoding.client import SocketEncoder
from sensorium.engine.encoding.listener import EncoderListener
from sensorium.engine.encoding.wire import PROTOCOL, Encoded, Hello, encode_message
from sensorium.multimodal.item_codec import as_buffers, encode_header
from sensorium.multimodal.media import MediaBytes, MediaLimits
from sensorium.multimodal.pool.channel import Channel, ChannelError
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.types.errors import CapacityError, EncoderLostError, ModelError, RequestError
from sensorium.types.multimodal import ENCODED, ItemLayout, ProcessedItem
from tests.integration.media_steps import (
    CACHE_TYPES,
    OPTIONS,
    assert_idle,
    forget_outputs,
    make_new_image,
    make_new_png,
    make_prompt,
)
from tests.integration.test_recovery import reset_core, reset_frontend, restart
from tests.support.encoder import EncoderHere, encoding_at, encoding_here
from tests.support.engine import make_llm
from tests.support.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llava(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("llava")


@pytest.fixture(scope="module")
def encoder(llava: str) -> Iterator[EncoderHere]:
    with encoding_here(llava) as running:
        yield running


@pytest.fixture(scope="module")
def plain(llava: str) -> Iterator[LLM]:
    """Give an engine that encodes everything itself."""
    with make_llm(llava) as llm:
        yield llm


def run(llm: LLM, prompt: Any) -> tuple[int, ...]:
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def count(llm: LLM) -> dict[str, int]:
    """Return what became of items that were meant for the encoder, without zeros."""
    assert llm.media_parts.remote_encoder is not None
    return {name: n for name, n in llm.media_parts.remote_encoder.backend.get_counts().items() if n}


# ---- an encoder that works


@pytest.mark.parametrize("lose", [restart, reset_core, reset_frontend])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_an_item_that_the_core_has_lost_is_sent_again(
    cache_type: str, lose: Callable[[LLM], None], llava: str, encoder: EncoderHere, plain: LLM
) -> None:
    prompt = make_prompt(make_new_png())
    expected = run(plain, prompt)
    with make_llm(llava, encoder=encoder.address, **OPTIONS[cache_type]) as llm:
        for _ in range(2):
            assert run(llm, prompt) == expected
            forget_outputs(llm)
            lose(llm)
        assert llm.core.runner.encoder_runner.num_encoded == 0
        assert_idle(llm)


def test_an_item_is_encoded_once_for_engines_that_ask_together(
    llava: str, encoder: EncoderHere, plain: LLM
) -> None:
    prompt = make_prompt(make_new_png())
    before = encoder.get_counts()
    with (
        make_llm(llava, encoder=encoder.address) as first,
        make_llm(llava, encoder=encoder.address) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        answers = list(threads.map(lambda llm: run(llm, prompt), (first, second)))
    assert answers == [run(plain, prompt)] * 2
    after = encoder.get_counts()
    assert after.num_asked - before.num_asked == 2
    assert after.num_processed - before.num_processed == 1
    assert after.num_encoded - before.num_encoded == 1


@pytest.mark.parametrize("content", [b"", b"no image", make_new_png()[:200]])
def test_a_bad_item_gets_the_same_error_as_without_a_remote_encoder(
    content: bytes, llava: str, encoder: EncoderHere, plain: LLM
) -> None:
    errors = []
    with make_llm(llava, encoder=encoder.address) as llm:
        for engine in (plain, llm):
            with pytest.raises(RequestError) as caught:
                run(engine, make_prompt(content))
            errors.append((type(caught.value), str(caught.value), caught.value.path))
        is_asked = bool(content)  # an empty one is refused before
        assert count(llm) == ({"refused": 1} if is_asked else {})
        assert run(llm, make_prompt(make_new_png()))
    assert errors[0] == errors[1]


def test_media_that_is_only_rendered_keeps_its_own_tensors(
    llava: str, encoder: EncoderHere
) -> None:
    with make_llm(llava, encoder=encoder.address) as llm:
        prompt = make_prompt(make_new_png())
        run(llm, prompt)
        processed = llm.input_processor.process("test", prompt, GREEDY, skip_mm_cache=True)
        (item,) = processed.items
        assert item.handle.kwargs is not None
        assert item.handle.kwargs.keys() == {"pixel_values"}
        llm.media_parts.readonly.release(processed.items)


def test_an_encoder_with_a_disk_cache_encodes_nothing_after_a_restart(
    llava: str, tmp_path: Path
) -> None:
    prompt, found = make_prompt(make_new_png()), []
    for _ in range(2):
        with (
            encoding_here(llava, mm_disk_cache=str(tmp_path)) as encoder,
            make_llm(llava, encoder=encoder.address) as llm,
        ):
            found.append(run(llm, prompt))
            counts = encoder.get_counts()
    assert found[0] == found[1]
    assert (counts.num_asked, counts.num_processed, counts.num_encoded) == (1, 0, 0)


def test_no_descriptor_is_left_open(llava: str, encoder: EncoderHere) -> None:
    def list_open() -> list[str]:
        with os.scandir("/proc/self/fd") as entries:
            links = [os.readlink(entry.path) for entry in entries]
        return sorted(link.split(":")[0] for link in links)

    with make_llm(llava, encoder=encoder.address) as llm:
        run(llm, make_prompt(make_new_image()))
    del llm
    wait_until(lambda: not encoder.listener._open)
    before = list_open()
    for _ in range(2):
        with make_llm(llava, encoder=encoder.address) as llm:
            run(llm, make_prompt(*(make_new_image() for _ in range(3))))
        del llm
        wait_until(lambda: not encoder.listener._open)
    wait_until(lambda: list_open() == before)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("encoder")]


# ---- an encoder that can't be had


def test_an_encoder_may_start_late_stop_and_start_again(
    llava: str, plain: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "encoder.sock")
    expected: dict[str, int] = {}

    def run_new(llm: LLM, outcome: str) -> None:
        """Run new media until the engine has noticed what became of its encoder."""

        def is_outcome() -> bool:
            before, prompt = count(llm).get(outcome, 0), make_prompt(make_new_png())
            assert run(llm, prompt) == run(plain, prompt)
            return count(llm).get(outcome, 0) > before

        wait_until(is_outcome)

    with make_llm(llava, encoder=f"unix:{path}") as llm:
        run_new(llm, "fallback")
        for _ in range(2):
            with encoding_at(path, llava):
                run_new(llm, "encoded")
            assert not Path(path).exists()
            run_new(llm, "fallback")
        expected = count(llm)
        assert set(expected) == {"encoded", "fallback"}
        assert_idle(llm)
    warnings = [r for r in caplog.records if "can't be used" in r.getMessage()]
    assert 2 <= len(warnings) <= 3, "each time that it was lost is logged once"


def test_without_a_fallback_requests_fail_so_that_they_may_be_sent_again(
    llava: str, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path / 'none'}"
    with make_llm(llava, encoder=address, encoder_fallback=False) as llm:
        (output,) = llm.generate(
            make_prompt(make_new_png()), GREEDY, use_tqdm=False, return_errors=True
        )
        assert "can't be" in str(output.error)
        assert count(llm) == {"failed": 1}
        assert isinstance(EncoderLostError(""), CapacityError)
        assert run(llm, "text needs no encoder")
        assert_idle(llm)


def test_an_encoder_without_room_leaves_items_to_the_engine(llava: str, plain: LLM) -> None:
    with (
        encoding_here(llava, max_items=1) as encoder,
        make_llm(llava, encoder=encoder.address) as llm,
        ThreadPoolExecutor(1) as threads,
        make_llm(llava, encoder=encoder.address) as other,
    ):
        may_go_on, hf_model = threading.Event(), encoder.encoder.hf_model
        encode = hf_model.encode

        def encode_late(*given: Any) -> list[torch.Tensor]:
            may_go_on.wait(60)
            return encode(*given)

        hf_model.encode = encode_late  # type: ignore[method-assign]
        first = threads.submit(run, llm, make_prompt(make_new_png()))
        wait_until(lambda: encoder.encoder.service._num_items == 1)
        prompt = make_prompt(make_new_png())
        assert run(other, prompt) == run(plain, prompt)
        assert count(other) == {"fallback": 1}
        may_go_on.set()
        assert first.result(60)
        assert count(llm) == {"encoded": 1}


@contextmanager
def standing_in(path: Path, hello: bytes, answer: Callable[[Channel], None]) -> Iterator[None]:
    """Listen at a path as an encoder that introduces itself and then answers as given."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                channel = Channel(connection)
                try:
                    channel.send(hello)
                    while True:
                        channel.receive()
                        answer(channel)
                except (ChannelError, OSError):
                    channel.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def introduce(encoder: EncoderHere) -> bytes:
    """Return the first message of an encoder."""
    return encode_message(Hello(PROTOCOL, encoder.encoder.identity))


def say_nothing(_channel: Channel) -> None:
    """Keep the engine waiting."""


def say_nonsense(channel: Channel) -> None:
    channel.send(b"nonsense")


def say_no_text(channel: Channel) -> None:
    answer = msgspec.msgpack.encode(["Failed", {"kind": "", "message": "text"}])
    channel.send(answer.replace(b"text", bytes([255] * 4)))


def send_too_few(channel: Channel) -> None:
    tensors = {ENCODED: torch.zeros(2, 8)}
    layout = ItemLayout(text="<image>", token_id=1, num_embeds=3)
    channel.send(encode_message(Encoded(layout, encode_header(tensors), {})), as_buffers(tensors))


def send_half(channel: Channel) -> None:
    channel.connection.sendall(b"\x01")
    channel.close()


ODD_ANSWERS = (say_nothing, say_nonsense, say_no_text, send_too_few, send_half)


@pytest.mark.parametrize("answer", ODD_ANSWERS)
def test_an_encoder_that_hangs_or_fails_is_given_up(
    answer: Callable[[Channel], None], llava: str, encoder: EncoderHere, plain: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "encoder.sock"
    with (
        standing_in(path, introduce(encoder), answer),
        make_llm(llava, encoder=f"unix:{path}", encoder_timeout=0.5) as llm,
    ):
        prompt = make_prompt(make_new_png())
        assert run(llm, prompt) == run(plain, prompt)
        assert count(llm) == {"fallback": 1}
        assert_idle(llm)


def test_a_hung_encoder_leaves_time_for_the_engine(
    llava: str, encoder: EncoderHere, plain: LLM, tmp_path: Path
) -> None:
    """The time that an item may take in the engine does not run while the encoder is waited for."""
    path = tmp_path / "encoder.sock"
    limits = MediaLimits(process_wait_s=0.2, process_deadline_s=0.5)
    assert limits.flight_timeout_s < 1.6
    with (
        standing_in(path, introduce(encoder), say_nothing),
        make_llm(llava, encoder=f"unix:{path}", encoder_timeout=1.6, media_limits=limits) as llm,
    ):
        prompt = make_prompt(make_new_png())
        assert run(llm, prompt) == run(plain, prompt)
        assert count(llm) == {"fallback": 1}


# ---- an encoder that must not be used


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, r"weights are torch.float32, not torch.bfloat16 \(--dtype\)"),
        ({"media_limits": MediaLimits(max_pixels=1000)}, "max_pixels=100000000 instead of .*1000"),
        ({"mm_processor_kwargs": {"do_rescale": False}}, "other options of media"),
    ],
)
def test_an_encoder_with_other_options_is_refused_at_the_start(
    options: dict[str, Any], reason: str, llava: str, encoder: EncoderHere
) -> None:
    with pytest.raises(ModelError, match=reason):
        make_llm(llava, encoder=encoder.address, **options)


def test_an_encoder_with_another_processor_is_refused_at_the_start(
    llava: str, encoder: EncoderHere, tmp_path: Path
) -> None:
    """Its weights and all options are the same, but the checkpoint's own settings are not."""
    changed = shutil.copytree(llava, tmp_path / "changed")  # keeps the times of the weights
    names = [
        n for n in ("processor_config.json", "preprocessor_config.json") if (changed / n).exists()
    ]
    assert names
    for name in names:
        text = (changed / name).read_text()
        (changed / name).write_text(text.replace('"do_normalize": true', '"do_normalize": false'))
    with pytest.raises(ModelError, match="its processor of media has other settings"):
        make_llm(str(changed), encoder=encoder.address)


def test_an_encoder_of_another_version_is_refused_at_the_start(
    llava: str, encoder: EncoderHere, tmp_path: Path
) -> None:
    path, identity = tmp_path / "encoder.sock", encoder.encoder.identity
    for hello in (
        msgspec.msgpack.encode(["Hello", PROTOCOL - 1, {"weights": "of an older version"}]),
        encode_message(Hello(PROTOCOL + 1, identity)),
    ):
        with (
            standing_in(path, hello, say_nothing),
            pytest.raises(ModelError, match="of another version"),
        ):
            make_llm(llava, encoder=f"unix:{path}")
        path.unlink()


def test_models_that_can_have_no_remote_encoder_are_refused(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    for family, reason in (("llama", "takes no media"), ("whisper", "can't be remote")):
        path = str(tmp_path / family)
        with pytest.raises(ModelError, match=reason):
            LLM(tiny_model(family), encoder=f"unix:{path}")
        with pytest.raises(ModelError, match=reason), encoding_at(path, tiny_model(family)):
            pass


def test_a_socket_is_private_and_belongs_to_one_encoder(
    encoder: EncoderHere, tmp_path: Path
) -> None:
    path = encoder.address.removeprefix("unix:")
    assert os.stat(path).st_mode & 0o777 == 0o600
    service, identity = encoder.encoder.service, encoder.encoder.identity
    file = tmp_path / "file"
    file.write_text("of the user")
    for place, reason in (
        (path, "another process listens"),
        (str(file), "is no socket"),
        ("/" + "x" * 108, "1 to 107 bytes"),
        (str(file / "below"), "can't listen"),
    ):
        with pytest.raises(ModelError, match=reason):
            EncoderListener(place, service, identity, max_connections=1)
    assert file.read_text() == "of the user"
    stale = tmp_path / "private" / "stale.sock"
    for _ in range(2):
        listener = EncoderListener(str(stale), service, identity, max_connections=1)
        assert stale.parent.stat().st_mode & 0o777 == 0o700
        listener.close(1)
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(stale))  # what an encoder leaves that was killed


def test_more_connections_than_allowed_are_refused(encoder: EncoderHere, tmp_path: Path) -> None:
    path = str(tmp_path / "small.sock")
    service, identity = encoder.encoder.service, encoder.encoder.identity
    listener = EncoderListener(path, service, identity, max_connections=1)
    first, second = (SocketEncoder(f"unix:{path}", identity, None, timeout_s=60) for _ in range(2))
    assert first.get_counts() == service.get_counts()
    with pytest.raises(CapacityError, match="too many connections"):
        second.get_counts()
    first.close()
    wait_until(lambda: not listener._open)
    assert second.get_counts() == service.get_counts()
    second.close()
    job = ItemJob(mm_hash="", modality="image", decode_options=None, processor_kwargs={})
    with pytest.raises(CapacityError, match="closed"):
        second.encode(job, MediaBytes(b"")).result(60)
    listener.close(1)


def test_items_that_wait_for_the_towers_fail_when_these_are_closed(llava: str) -> None:
    with encoding_here(llava) as running:
        towers, hf_model = running.encoder.towers, running.encoder.hf_model
        may_go_on, has_begun, encode = threading.Event(), threading.Event(), hf_model.encode

        def encode_late(*given: Any) -> list[torch.Tensor]:
            has_begun.set()
            may_go_on.wait(60)
            return encode(*given)

        hf_model.encode = encode_late  # type: ignore[method-assign]
        layout = ItemLayout(text="", token_id=0, num_embeds=1)
        item = ProcessedItem(modality="image", mm_hash="", kwargs={}, layout=layout)
        first = towers.submit(item)
        assert has_begun.wait(60)
        second = towers.submit(item)
        with ThreadPoolExecutor(1) as threads:
            closed = threads.submit(towers.close, 60)
            wait_until(lambda: towers._is_closed)
            may_go_on.set()
            closed.result(60)
        assert "could not be encoded" in str(first.exception(60))
        for late in (second, towers.submit(item)):
            assert isinstance(late.exception(60), EncoderLostError)
