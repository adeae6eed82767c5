"""Forms with a file are read the same however they are cut, within limits."""

from __future__ import annotations

import errno
import io
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.server.http.bodies import multipart
from sensorium.server.http.bodies.multipart import (
    MAX_PARTS,
    MAX_TEXT_BYTES,
    MultipartForm,
    get_boundary,
)
from sensorium.server.http.errors import ApiError
from sensorium.types.errors import RequestError

BOUNDARY = b"edge"


def make_part(name: str, content: bytes, *, rest: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{rest}\r\n\r\n'
    return b"--" + BOUNDARY + b"\r\n" + head.encode() + content + b"\r\n"


def make_body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + BOUNDARY + b"--\r\n"


def read(pieces: Sequence[bytes]) -> tuple[list[tuple[str, str]], bytes]:
    """Return the fields of a form and the content of its file."""
    form = MultipartForm(BOUNDARY, file_field="file")
    try:
        for piece in pieces:
            form.feed(piece)
        form.finish()
        return form.fields, form.read_file()
    finally:
        form.close()


def cut(body: bytes, places: set[int]) -> list[bytes]:
    edges = [0, *sorted(place for place in places if place < len(body)), len(body)]
    return [body[start:end] for start, end in pairwise(edges)]


# Contents that look like boundaries and their beginnings.
FRAGMENTS = (
    b"\r",
    b"\n",
    b"\r\n",
    b"--",
    b"-",
    b"edge",
    b"\r\n--edg",
    b"\r\n--edgex",
    b"ab",
    b"\0",
)
NEAR_BOUNDARIES = st.lists(st.sampled_from(FRAGMENTS), max_size=20).map(b"".join)
CONTENTS = NEAR_BOUNDARIES.filter(lambda content: b"\r\n--edge" not in b"\r\n" + content)
NEAR_MISSES = st.lists(
    st.sampled_from(
        (b"\r\n--edgex", b"\r\n--edg", b"\r\n--edge-x", b"\r\n--edge\rx", b"\r\n", b"-")
    ),
    max_size=8,
).map(lambda pieces: b"".join(pieces) + b"end")


@given(
    texts=st.lists(st.text(max_size=20), max_size=3),
    content=CONTENTS | NEAR_MISSES,
    places=st.sets(st.integers(1, 400), max_size=30),
)
def test_the_form_is_the_same_however_its_bytes_are_split(
    texts: list[str], content: bytes, places: set[int]
) -> None:
    texts = [text for text in texts if "--edge" not in text]
    parts = [make_part(f"t{index}", text.encode()) for index, text in enumerate(texts)]
    body = make_body(*parts, make_part("file", content, rest='; filename="a.wav"'))
    expected = [(f"t{index}", text) for index, text in enumerate(texts)] + [("file", "a.wav")]
    assert read(cut(body, places)) == (expected, content)


def test_a_form_may_come_byte_by_byte() -> None:
    content = bytes(range(256)) + b"\r\n--edg\r\n--edgy"
    body = make_body(make_part("file", content), make_part("model", "tüny".encode()))
    assert read([bytes([byte]) for byte in body]) == ([("file", ""), ("model", "tüny")], content)


@pytest.mark.parametrize(
    ("rest", "name"),
    [
        ("; filename*=UTF-8''%e2%82%ac%20a.wav", "€ a.wav"),
        ("; FileName* = utf-8'en'a.wav", "a.wav"),
        ("; filename*=ISO-8859-1''%a3.wav", "£.wav"),
        ("; filename*=UTF-8''%ff.wav", "\ufffd.wav"),
        ("; filename=\"b.wav\"; filename*=UTF-8''a.wav", "b.wav"),
        ("; filename*=UTF-8''", ""),
        ("; filename*=base64''YQ==", ""),
        ("; filename*=a.wav", ""),
        ("; other=\"; filename*=UTF-8''a.wav\"", ""),
    ],
)
def test_a_file_name_given_only_with_its_encoding_counts(rest: str, name: str) -> None:
    body = make_body(make_part("file", b"content", rest=rest))
    assert read([body]) == ([("file", name)], b"content")


def test_another_field_with_such_a_name_is_a_file() -> None:
    body = make_body(make_part("other", b"a", rest="; filename*=UTF-8''a.wav"))
    with pytest.raises(RequestError, match="only the field file"):
        read([body])


@given(body=st.binary(max_size=200), places=st.sets(st.integers(1, 200), max_size=10))
def test_any_other_body_is_refused_and_not_a_failure(body: bytes, places: set[int]) -> None:
    with pytest.raises((ApiError, RequestError)):
        read(cut(b"--edge\r\n" + body, places))


@pytest.mark.parametrize("length", range(0, 140, 7))
def test_a_form_that_ends_early_is_refused(length: int) -> None:
    body = make_body(make_part("file", b"x" * 80))
    with pytest.raises(ApiError, match="ends before the last boundary"):
        read([body[:length]])


@pytest.mark.parametrize(
    ("parts", "path", "words"),
    [
        ([make_part("file", b"a"), make_part("file", b"b")], "file", "is given twice"),
        ([make_part("other", b"a", rest='; filename="b"')], "other", "only the field file"),
        ([make_part("prompt", b"a" * (MAX_TEXT_BYTES + 1))], "prompt", "longer than"),
        ([make_part("prompt", b"a\xffb")], "prompt", "UTF-8: byte 1 is 0xff"),
        ([make_part("model", b"a")], "file", "is missing"),
        (
            [make_part("file", b"YQ==", rest="\r\nContent-Transfer-Encoding: base64")],
            "file",
            "without a transfer encoding",
        ),
    ],
)
def test_a_part_that_is_not_allowed_is_named(parts: list[bytes], path: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        read([make_body(*parts)])
    assert caught.value.path == (path,)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (make_body(*[make_part("a", b"")] * (MAX_PARTS + 1)), "more than 64 parts"),
        (b"--edge\r\nContent-Type: text/plain\r\n\r\na\r\n--edge--\r\n", "part 1 .* needs"),
        (make_body(make_part("", b"a")), "needs the header"),
        (b"--edge\r\n" + b"a: b\r\n" * 20, "header count"),
        (b"--edge\r\na: " + b"b" * 5000, "header size"),
        (b"something else", "not valid multipart/form-data"),
    ],
)
def test_a_body_that_is_no_form_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        read([body])
    assert (caught.value.status, caught.value.code) == (400, "invalid_multipart")


@pytest.mark.parametrize(
    ("content_type", "code"),
    [
        (None, "unsupported_content_type"),
        ("application/json", "unsupported_content_type"),
        ("multipart/mixed; boundary=a", "unsupported_content_type"),
        ("multipart/form-data", "invalid_multipart"),
        ("multipart/form-data; boundary=", "invalid_multipart"),
        ("multipart/form-data; boundary=" + "a" * 71, "invalid_multipart"),
    ],
)
def test_another_content_type_is_refused(content_type: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        get_boundary(content_type)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_the_boundary_may_be_quoted() -> None:
    assert get_boundary('Multipart/Form-Data; charset=utf-8; boundary="a b"') == b"a b"


def test_the_file_has_no_name_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart.tempfile, "tempdir", str(tmp_path))
    form = MultipartForm(BOUNDARY, file_field="file")
    form.feed(make_part("file", b"a" * 100_000))
    assert list(tmp_path.iterdir()) == []
    form.close()
    form.close()


class FullDisk(io.BytesIO):
    """A file that takes nothing, as on a disk without room."""

    def write(self, _: Any) -> int:
        raise OSError(self.number, "no room")

    number = errno.ENOSPC


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_507(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullDisk, "number", number)
    monkeypatch.setattr(multipart.tempfile, "TemporaryFile", FullDisk)
    with pytest.raises(ApiError, match="no room for the file") as caught:
        read([make_body(make_part("file", b"a"))])
    assert (caught.value.status, caught.value.code) == (507, "no_disk_space")


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_disk_that_is_full_when_its_buffer_is_written_is_a_507(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device always has no room. A small file is written by `finish` only."""
    monkeypatch.setattr(multipart.tempfile, "TemporaryFile", partial(open, "/dev/full", "w+b"))
    with pytest.raises(ApiError) as caught:
        read([make_body(make_part("file", b"a" * size))])
    assert caught.value.status == 507


def test_another_failure_of_the_disk_is_not_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FullDisk, "number", errno.EIO)
    monkeypatch.setattr(multipart.tempfile, "TemporaryFile", FullDisk)
    with pytest.raises(OSError, match="no room"):
        read([make_body(make_part("file", b"a"))])
