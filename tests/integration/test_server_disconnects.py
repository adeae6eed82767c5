"""Clients leave, don't read, or bring what can't be decoded.

Nothing of them is left, and other clients notice nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from typing import Any

import pytest

from tests.integration.fault_load import (
    Crowd,
    ask,
    ask_all,
    count_open_files,
    count_threads,
    make_body,
    make_image_url,
    open_raw,
    wait_until_files_are,
    wait_until_idle,
)
from tests.integration.media_bombs import make_bmp, make_webp
from tests.integration.media_hosts import MediaServer
from tests.support.server import ServerProcess
from tests.support.waiting import wait_until, wait_until_async

pytestmark = [pytest.mark.xdist_group("server-faults"), pytest.mark.slow]
LONG = 900


async def leave(connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    """Half of them politely, the others with a reset."""
    for index, (_, writer) in enumerate(connections):
        if index % 2:
            writer.transport.abort()
        else:
            writer.close()
    await asyncio.gather(*(w.wait_closed() for _, w in connections), return_exceptions=True)


async def leave_mid_stream(server: ServerProcess, num: int) -> None:
    """Some have had tokens, others still wait for their turn."""
    bodies = [
        make_body(
            f"story {i}", *[make_image_url(i % 40)] * (i % 2), max_tokens=LONG, stream=bool(i % 3)
        )
        for i in range(num)
    ]
    connections = [await open_raw(server, json.dumps(body).encode()) for body in bodies]
    beginnings = [asyncio.create_task(reader.read(1)) for reader, _ in connections]
    await wait_until_async(lambda: sum(task.done() for task in beginnings) >= 8, "some have begun")
    for task in beginnings:
        task.cancel()
    await asyncio.gather(*beginnings, return_exceptions=True)
    await leave(connections)


async def leave_while_fetching(server: ServerProcess, host: MediaServer, num: int) -> None:
    url = f"http://127.0.0.1:{host.port}"
    bodies = [make_body("what is it", f"{url}/{index}.png") for index in range(num)]
    num_before = len(host.visits)
    connections = [await open_raw(server, json.dumps(body).encode()) for body in bodies]
    await wait_until_async(lambda: len(host.visits) >= num_before + 8, "the host is asked")
    await leave(connections)


async def leave_while_sending(server: ServerProcess, num: int) -> None:
    body = json.dumps(make_body("what is it", make_image_url(1))).encode()
    half = body[: len(body) // 2]
    connections = [await open_raw(server, half, announced=len(body)) for _ in range(num)]
    await leave(connections)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    fault_server: ServerProcess, silent_host: MediaServer
) -> None:
    server = fault_server
    frontends = server.find_children("frontend_main")

    async def come_and_go(scale: int) -> None:
        await leave_mid_stream(server, 20 * scale)
        await leave_while_sending(server, 5 * scale)
        await leave_while_fetching(server, silent_host, 10 * scale)

    def settle() -> tuple[list[int], list[int]]:
        # Pictures need the threads that waited for the host, which still says nothing.
        new = [make_body("new", make_image_url(2000 + index)) for index in range(4)]
        assert all(reply.is_good for reply in ask_all(server, new))
        wait_until_idle(server)
        return [*map(count_open_files, frontends)], [*map(count_threads, frontends)]

    asyncio.run(come_and_go(4))
    files, threads = settle()
    asyncio.run(come_and_go(10))
    wait_until_idle(server)
    for pid, num in zip(frontends, files, strict=True):
        wait_until_files_are(pid, num)
    _, threads_after = settle()
    # Threads are kept for later work, up to what the pools of them allow.
    assert all(after <= num + 40 for after, num in zip(threads_after, threads, strict=True))


def test_clients_that_left_hold_no_room_for_media(fault_server: ServerProcess) -> None:
    """Of more images than the cache has room for: those that come later still find some."""
    server = fault_server
    name = "sensorium:cache_oversize_total"

    async def leave_some() -> None:
        for part in range(4):
            bodies = [
                make_body("so", make_image_url(3000 + 20 * part + i, 112), max_tokens=LONG)
                for i in range(20)
            ]
            await leave([await open_raw(server, json.dumps(body).encode()) for body in bodies])

    asyncio.run(leave_some())
    wait_until_idle(server)
    before = server.get_metrics()[name]
    for index in range(20):
        assert ask(server, make_body("so", make_image_url(4000 + index, 112), max_tokens=2)).is_good
    assert server.get_metrics()[name] == before


def test_a_client_that_does_not_read_delays_no_other(fault_server: ServerProcess) -> None:
    server = fault_server
    body = make_body("much", max_tokens=400, stream=True, n=2, logprobs=True, top_logprobs=20)

    async def be_slow() -> bytes:
        connections = []
        for _ in range(3):
            own = socket.socket()
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.setblocking(False)
            address = server.get_url().removeprefix("http://").split(":")
            await asyncio.get_running_loop().sock_connect(own, (address[0], int(address[1])))
            reader, writer = await asyncio.open_connection(sock=own, limit=1024)
            content = json.dumps(body).encode()
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            )
            writer.write(head.encode() + content)
            writer.transport.pause_reading()
            connections.append((reader, writer))
        others = await Crowd(
            server, [make_body("quick", make_image_url(5), max_tokens=200)] * 4
        ).finish()
        assert all(reply.is_good for reply in others)
        (reader, writer), *rest = connections
        await leave(rest)
        writer.transport.resume_reading()
        answer = await reader.read()
        writer.close()
        return answer

    answer = asyncio.run(be_slow())
    assert answer.count(b'"finish_reason":"length"') == 2
    assert b"data: [DONE]" in answer[-100:]
    wait_until_idle(server)


def make_bad_images() -> list[bytes]:
    """Two that claim to be enormous, one that is none, and one that ends too early."""
    whole = base64.b64decode(make_image_url(1).partition(",")[2])
    return [make_bmp(), make_webp(b"VP8X"), b"not an image at all", whole[:60]]


def test_bad_images_do_not_affect_other_clients(fault_server: ServerProcess) -> None:
    server = fault_server
    good = [make_body(f"fine {i}", make_image_url(5000 + i), max_tokens=40) for i in range(8)]
    expected = [reply.text for reply in ask_all(server, good)]
    server.post("/reset_mm_cache")

    def make_bad(content: bytes) -> dict[str, Any]:
        return make_body("bad", "data:image/png;base64," + base64.b64encode(content).decode())

    bad = [make_bad(content) for content in make_bad_images()] * 4
    replies = ask_all(server, [*bad, *good])
    assert {reply.status for reply in replies[: len(bad)]} == {400}
    assert all(reply.error and reply.error["param"] for reply in replies[: len(bad)])
    assert [reply.text for reply in replies[len(bad) :]] == expected
    assert all(reply.is_good for reply in replies[len(bad) :])
    wait_until_idle(server)


def test_the_server_still_answers_afterwards(fault_server: ServerProcess) -> None:
    assert ask(fault_server, make_body("hello", make_image_url(1))).is_good
    wait_until(lambda: fault_server.get("/load").json() == {"server_load": 0}, "no request is left")
