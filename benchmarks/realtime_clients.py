"""WebSocket clients for `realtime.py`: a session that grows old, and many that talk at once."""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
from importlib.resources import files
from time import monotonic
from typing import Any

import numpy as np

RATE, CHUNK = 16_000, 1280  # samples
BLOCK_CHUNKS = 25  # two seconds
QUIET_S = 0.25  # without a message, a server has done its work
SPEECH_S = 5.0


def get_address(url: str) -> str:
    return f"{url.rstrip('/').replace('http', 'ws', 1)}/v1/realtime"


def make_append(samples: Any) -> str:
    pcm = np.clip(np.rint(samples * 32767), -32768, 32767).astype("<i2").tobytes()
    audio = base64.b64encode(pcm).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


def make_audio(seconds: float, seed: int = 0) -> Any:
    """Return tones that change every 80 ms."""
    generator, times = np.random.default_rng(seed), np.arange(CHUNK) / RATE
    pitches = generator.uniform(80, 4000, int(seconds * RATE) // CHUNK)
    return np.concatenate([0.2 * np.sin(2 * np.pi * pitch * times) for pitch in pitches])


def open_socket(address: str) -> Any:
    from websockets.asyncio.client import connect  # engines without a server need it not

    return connect(address, compression=None, max_size=None)


async def measure_age(url: str, seconds: float, model: str | None) -> dict[str, list[float]]:
    """Send long audio block by block, and return what each block took in milliseconds."""
    costs: list[float] = []
    async with open_socket(get_address(url)) as socket:
        await socket.recv()
        if model is not None:
            await socket.send(json.dumps({"type": "session.update", "model": model}))
        await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        num_blocks = int(seconds * RATE) // (CHUNK * BLOCK_CHUNKS)
        for block in range(num_blocks):
            audio = make_audio(BLOCK_CHUNKS * CHUNK / RATE, seed=block)
            began = last = monotonic()
            for start in range(0, len(audio), CHUNK):
                await socket.send(make_append(audio[start : start + CHUNK]))
            while True:
                try:
                    await asyncio.wait_for(socket.recv(), QUIET_S)
                except TimeoutError:
                    break
                last = monotonic()
            costs.append(1e3 * (last - began))
            if block % 50 == 49:
                print(f"{(block + 1) * 2} s: {statistics.median(costs[-50:]):.1f} ms", flush=True)
    return {"two seconds of sound over the WebSocket (ms)": costs}


async def talk(socket: Any, audio: Any, until: float) -> list[float]:
    """Send a clip in real time, again and again, and return the lag of each text in seconds.

    Some noise is added each time, because a clip that was received before would come from a cache.
    """
    lags = []
    speech, generator = audio, np.random.default_rng()
    while monotonic() < until:
        audio = speech + generator.normal(0, 1e-3, len(speech))
        began = monotonic()
        for index, start in enumerate(range(0, len(audio), CHUNK)):
            await socket.send(make_append(audio[start : start + CHUNK]))
            due = began + (index + 1) * CHUNK / RATE
            await asyncio.sleep(max(0.0, due - monotonic()))
        committed = monotonic()
        await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        while True:
            message = json.loads(await socket.recv())
            if message["type"].endswith(("transcription.completed", "transcription.failed")):
                break
            if message["type"] == "error":
                raise RuntimeError(message["error"])
        lags.append(monotonic() - committed)
    return lags


async def measure_sessions(
    url: str, num_sessions: int, audio: Any, seconds: float
) -> dict[str, float]:
    settings = {
        "type": "session.update",
        "session": {
            "type": "transcription",
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": RATE},
                    "turn_detection": None,
                }
            },
        },
    }
    sockets = []
    for _ in range(num_sessions):
        address = get_address(url) + "?intent=transcription"
        socket = await open_socket(address)
        await socket.recv()
        await socket.send(json.dumps(settings))
        await socket.recv()
        sockets.append(socket)

    async def begin_later(index: int) -> list[float]:
        await asyncio.sleep(SPEECH_S * index / num_sessions)  # not all at once
        return await talk(sockets[index], audio, monotonic() + seconds)

    try:
        found = await asyncio.gather(*map(begin_later, range(num_sessions)))
    finally:
        await asyncio.gather(*(socket.close() for socket in sockets), return_exceptions=True)
    lags = sorted(lag for each in found for lag in each)
    return {
        "num_texts": len(lags),
        "lag_p50_s": round(statistics.median(lags), 3),
        "lag_p99_s": round(float(np.percentile(lags, 99)), 3),
    }


def load_speech() -> Any:
    """Return five seconds with the speech that comes with the embedded model."""

    import av

    path = files("sensorium.embedded") / "media" / "speech.flac"
    resampler = av.AudioResampler("flt", "mono", RATE)
    frames = [
        each for frame in av.open(str(path)).decode(audio=0) for each in resampler.resample(frame)
    ]
    speech = np.concatenate([frame.to_ndarray()[0] for frame in frames])
    size = int(SPEECH_S * RATE)
    return np.pad(speech, (0, max(0, size - len(speech))))[:size]
