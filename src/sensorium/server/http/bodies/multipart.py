"""Reads a multipart/form-data body piece by piece: texts into memory, and its file onto a disk.

python-multipart splits the body; this module decides what a form may have. It does no network I/O,
but its calls may write to a disk, so they belong in a thread.

Invariants:
  1. Memory is bounded: texts and headers have limits, and the file is never held whole before
     `read_file`.
  2. The file has no name in any folder, so it is gone when it is closed or the process ends.
  3. The result does not depend on how the body was cut into pieces.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sensorium.server.http.errors import ApiError
from sensorium.types.errors import RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 64
MAX_TEXT_BYTES = 2**16  # of one text field
_MAX_HEADERS = 16  # of one part
_MAX_HEADER_BYTES = 2**12  # of one header; file names are the long ones
_MAX_BOUNDARY_BYTES = 70  # by RFC 2046
_PLAIN_ENCODINGS = (b"", b"7bit", b"8bit", b"binary")
# The name of a file with its encoding, by RFC 8187, in a header without its quoted texts.
_EXTENDED_NAME = re.compile(rb";\s*filename\*\s*=\s*(utf-8|iso-8859-1)'[^';]*'([^\s;]+)", re.I)
_QUOTED = re.compile(rb'"(?:\\.|[^"\\])*"')
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FORM_TYPE = "multipart/form-data"

# python-multipart logs a warning for each mistake of a client, but clients get error responses.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


def get_boundary(content_type: str | None) -> bytes:
    """Return the boundary of a form from the header `content-type`, or raise an `ApiError`."""
    kind, options = parse_options_header((content_type or "").encode("latin-1", "replace"))
    if kind.decode("latin-1") != FORM_TYPE:
        name = kind.decode("latin-1")[:100]
        raise ApiError(
            f"the content type must be {FORM_TYPE}, not {name!r}", code="unsupported_content_type"
        )
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY_BYTES or b"\r" in boundary or b"\n" in boundary:
        raise _make_form_error(
            f"the content type {FORM_TYPE} needs a boundary of 1 to {_MAX_BOUNDARY_BYTES} bytes"
        )
    return boundary


class MultipartForm:
    """A form that is being received: its text fields so far, and its file on a disk.

    Only the part named `file_field` may be a file. This part is also in `fields`, with the file's
    name as text.
    """

    def __init__(self, boundary: bytes, *, file_field: str) -> None:
        self.fields: list[tuple[str, str]] = []  # names and texts, in the order of the body
        self.num_file_bytes = 0
        self._file_field = file_field
        self._file: IO[bytes] | None = None
        self._num_parts = 0
        self._is_ended = False
        # Of the part that is being read: its headers, its name and its text.
        self._headers: dict[bytes, bytes] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._name = ""
        self._is_file = False
        self._text = bytearray()
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_content,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        self._parser = MultipartParser(
            boundary, callbacks, max_header_count=_MAX_HEADERS, max_header_size=_MAX_HEADER_BYTES
        )

    def feed(self, piece: bytes) -> None:
        """Read the next piece of the body.

        Raise an `ApiError` if it is no form or the disk is full, and a `RequestError` with the path
        of the field if a part is not allowed.
        """
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _make_form_error(f"the body is not valid {FORM_TYPE}: {error}") from error
        except OSError as error:
            raise _explain(error) from error

    def finish(self) -> None:
        """Raise an `ApiError` unless the form is complete, at the end of the body."""
        if not self._is_ended:
            raise _make_form_error("the body ends before the last boundary of its form")
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                raise _explain(error) from error

    def read_file(self) -> bytes:
        """Return the content of the file, or raise a `RequestError` if the form has none."""
        if self._file is None:
            raise RequestError("is missing", path=(self._file_field,))
        self._file.seek(0, os.SEEK_SET)
        return self._file.read()

    def close(self) -> None:
        """Remove the file from the disk. Closing twice does nothing."""
        if self._file is not None:
            # What the disk had no room for is written again here, and fails again.
            with suppress(OSError):
                self._file.close()

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _make_form_error(f"the form has more than {MAX_PARTS} parts, which is the limit")
        self._headers.clear()
        self._text.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"")
        kind, options = parse_options_header(disposition)
        if b"filename" not in options and (name := _find_extended_name(disposition)):
            options[b"filename"] = name
        if kind != b"form-data" or not options.get(b"name"):
            raise _make_form_error(
                f"part {self._num_parts} of the form needs the header "
                '`Content-Disposition: form-data; name="…"`'
            )
        self._name = options[b"name"].decode("utf-8", "replace")
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise RequestError("must be sent without a transfer encoding", path=(self._name,))
        self._is_file = self._name == self._file_field
        if self._is_file:
            if self._file is not None:
                raise RequestError("is given twice, but only one is taken", path=(self._name,))
            self._text += options.get(b"filename", b"")
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `close` ends it
        elif b"filename" in options:
            raise RequestError(
                f"is a file, but only the field {self._file_field} may be one", path=(self._name,)
            )

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._is_file and self._file is not None:
            self._file.write(memoryview(data)[start:end])
            self.num_file_bytes += end - start
            return
        self._text += memoryview(data)[start:end]
        if len(self._text) > MAX_TEXT_BYTES:
            raise RequestError(
                f"is longer than {MAX_TEXT_BYTES} bytes, which is the limit", path=(self._name,)
            )

    def _end_part(self) -> None:
        try:
            text = self._text.decode("utf-8", "replace" if self._is_file else "strict")
        except UnicodeDecodeError as error:
            message = f"is not valid UTF-8: byte {error.start} is {self._text[error.start]:#04x}"
            raise RequestError(message, path=(self._name,)) from error
        self.fields.append((self._name, text))

    def _end(self) -> None:
        self._is_ended = True


def _find_extended_name(disposition: bytes) -> bytes:
    """Return the file name from the parameter `filename*`, or empty bytes if there is none.

    RFC 7578 forbids it in forms, but some clients send only this parameter for names beyond ASCII.
    """
    found = _EXTENDED_NAME.search(_QUOTED.sub(b'""', disposition))
    if found is None:
        return b""
    encoding, name = found.groups()
    return unquote_to_bytes(name).decode(encoding.decode(), "replace").encode()


def _make_form_error(message: str) -> ApiError:
    return ApiError(message, code="invalid_multipart")


def _explain(error: OSError) -> Exception:
    """Return the error to raise for a failed write: an `ApiError` if the disk is full."""
    if error.errno not in _NO_SPACE:
        return error
    return ApiError(
        "The disk of this server has no room for the file. Send a smaller one, or retry later.",
        status=507,
        code="no_disk_space",
        reason="capacity",
    )
