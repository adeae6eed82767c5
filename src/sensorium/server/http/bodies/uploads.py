"""Receives a form with a file, which is written to a disk, and read into memory when complete.

The limits of `bodies.intake` hold. The form is split and written in threads of this module, because
a slow disk must not delay other work. A request is admitted when its form is complete, and its file
is read into memory only then, and only if its fields are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from sensorium.server.http.bodies.intake import BodyIntake
from sensorium.server.http.bodies.multipart import MultipartForm, get_boundary
from sensorium.server.http.connections import run_in_thread
from sensorium.types.errors import RequestError

_BATCH_BYTES = 2**18  # small pieces are joined, because each change of threads takes time
_threads = ThreadPoolExecutor(2, "upload")
_Parsed = TypeVar("_Parsed")
FormFields = Sequence[tuple[str, str]]


async def read_form(
    request: Request,
    parse: Callable[[FormFields], _Parsed],
    *,
    intake: BodyIntake,
    file_field: str,
) -> tuple[_Parsed, bytes]:
    """Receive the form of a request, and return the result of `parse` and the content of its file.

    `parse` gets the names and texts of all fields, in their order, and may raise. Raise an
    `ApiError` or a `RequestError` if the form is not valid.
    """
    form = MultipartForm(get_boundary(request.headers.get("content-type")), file_field=file_field)
    intake.check_length(request.headers.get("content-length"))
    try:
        await _receive(request, form, intake)
        request.state.admit()
        if form.num_file_bytes and (file_field, "") in form.fields:
            reason = f"has no file name, so it is text (with curl: -F {file_field}=@NAME)"
            raise RequestError(reason, path=(file_field,))
        parsed = parse(form.fields)
        if not form.num_file_bytes:
            raise RequestError("is empty", path=(file_field,))
        return parsed, await run_in_thread(form.read_file, _threads)
    finally:
        _threads.submit(form.close)  # to free the blocks of a large file takes time


async def _receive(request: Request, form: MultipartForm, intake: BodyIntake) -> None:
    batch = bytearray()

    async def keep(piece: bytes) -> None:
        batch.extend(piece)
        if len(batch) >= _BATCH_BYTES:
            await flush()

    async def flush() -> None:
        pieces = bytes(batch)
        batch.clear()
        await run_in_thread(lambda: form.feed(pieces), _threads)

    await intake.receive_into(request.receive, keep)
    await flush()
    await run_in_thread(form.finish, _threads)
