"""Makes bad requests for generation out of a good one, systematically and at random.

Every mutation is wrong by construction, with one exception: a changed byte in an item's frame may
leave the item as it was (`is_same_item`).
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

Body = dict[str, Any]
_WRONG_TYPES: tuple[Any, ...] = (None, 1, 1.5, "x", True, [], {})
_DTYPES = ("float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64", "")
_SIZES = {"float32": 4, "int64": 8, "int32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A bad request and its name."""

    name: str
    content: bytes  # the body as it is sent
    is_msgpack: bool
    item: bytes | None = None  # the changed item, if nothing else was changed


def set_at(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with another value at the path. All other values are shared."""
    if not path:
        return value
    changed = copy.copy(body)
    changed[path[0]] = set_at(body[path[0]], path[1:], value)
    return changed


def encode(body: Any, *, is_msgpack: bool) -> bytes:
    """Return the encoded body. In JSON, bytes become base64, as msgspec writes them."""
    return (msgspec.msgpack if is_msgpack else msgspec.json).encode(body)


# ---- the metadata


def mutate_metadata(body: Body) -> Iterator[tuple[str, Body]]:
    """Change the metadata of a body with items of several modalities, all cached by the server."""
    features = body["features"]
    for name in ("mm_hashes", "mm_placeholders"):
        for value in _WRONG_TYPES:
            yield f"{name} is {value!r}", set_at(body, ("features", name), value)
        for modality, entries in features[name].items():
            yield from _mutate_list(body, ("features", name, modality), entries)
    for value in (1, "x", [], True, {}):
        if value != {}:
            yield f"kwargs_data is {value!r}", set_at(body, ("features", "kwargs_data"), value)
        yield f"features are {value!r}", set_at(body, ("features",), value)
    yield from _mutate_kwargs(body)
    yield from _mutate_hashes(body)
    for modality, places in features["mm_placeholders"].items():
        for index, place in enumerate(places):
            path = ("features", "mm_placeholders", modality, index)
            yield from _mutate_place(body, path, place)
    yield from _mutate_order(body)
    yield from _mutate_tokens(body)


def _mutate_hashes(body: Body) -> Iterator[tuple[str, Body]]:
    for modality, hashes in body["features"]["mm_hashes"].items():
        for index in range(len(hashes)):
            for value in (None, 1, 1.5, True, [], {}, "", "a" * 129, ["a"]):
                path = ("features", "mm_hashes", modality, index)
                yield f"hash {modality} {index} is {value!r}", set_at(body, path, value)


def _mutate_list(
    body: Body, path: tuple[Any, ...], entries: list[Any]
) -> Iterator[tuple[str, Body]]:
    for value in (*_WRONG_TYPES, [None] * len(entries), entries[1:], [*entries, entries[-1]]):
        yield f"{path} is {value!r}", set_at(body, path, value)
    own = dict(body["features"][path[1]])
    del own[path[2]]
    yield f"{path} is not there", set_at(body, path[:2], own)
    for other in ("smell", "", path[2].upper()):
        yield f"{path} is called {other!r}", set_at(body, path[:2], {**own, other: entries})
    yield f"{path} has a stranger", set_at(body, path[:2], {**own, path[2]: entries, "x": entries})


def _mutate_kwargs(body: Body) -> Iterator[tuple[str, Body]]:
    path = ("features", "kwargs_data")
    hashes = body["features"]["mm_hashes"]
    nothing = {modality: [None] * len(entries) for modality, entries in hashes.items()}
    for modality, entries in nothing.items():
        wrong: tuple[Any, ...] = (1, "x", {}, [], True, [*entries, None], entries[1:])
        for value in wrong:
            yield (
                f"kwargs of {modality}: {value!r}",
                set_at(body, path, {**nothing, modality: value}),
            )
        rest = {name: value for name, value in nothing.items() if name != modality}
        yield f"no kwargs of {modality}", set_at(body, path, rest)
        yield f"kwargs next to {modality}", set_at(body, path, {**nothing, "smell": entries})
        for value in (1, 1.5, True, [], {}, "*", "AAA", "", "gA==", "wA==", "kA==", b"", b"\x81"):
            changed = {**nothing, modality: [value, *entries[1:]]}
            yield f"an item of {modality}: {value!r}", set_at(body, path, changed)


def _mutate_place(
    body: Body, path: tuple[Any, ...], place: dict[str, Any]
) -> Iterator[tuple[str, Body]]:
    offset, length = place["offset"], place["length"]
    values = {
        "offset": (
            *(None, -1, 0.5, "0", True, [], {}, 2**63, -(2**63), 2**62, 10**9),
            *(offset + 1, offset - 1, offset + length, 0),
        ),
        "length": (
            *(None, -1, 0.5, "8", True, [], {}, 2**63, 2**62, 10**12),
            *(length + 1, length - 1, 0, length * 2),
        ),
        "is_embed": (
            *("TTT", 5, {}, True, [], [0], [length], [0, length - 1], [0, length + 1]),
            *([length, 0], [-1, length + 1], [0.5, length], ["0", length], [None, length]),
            *([True, length - 1], [0, length, 1], [1, length - 1], [[0], [length]]),
            *([0] * (2 * length + 2), [0, length, 2**62, -(2**62)], [0, 2**62], [0, 1, length - 1]),
        ),
    }
    for name, wrong in values.items():
        for value in wrong:
            yield f"{path} {name} is {value!r:.60}", set_at(body, (*path, name), value)
    for value in (None, 1, "x", [], {}, True, [offset, length]):
        yield f"{path} is {value!r}", set_at(body, path, value)


def _mutate_order(body: Body) -> Iterator[tuple[str, Body]]:
    places = body["features"]["mm_placeholders"]
    for modality, entries in places.items():
        path = ("features", "mm_placeholders", modality)
        if len(entries) > 1:
            yield f"{modality} in another order", set_at(body, path, entries[::-1])
            for index in range(1, len(entries)):
                for ahead in (0, 1, entries[0]["length"] - 1):
                    offset = entries[0]["offset"] + ahead
                    value = set_at(entries, (index, "offset"), offset)
                    yield f"{modality} {index} overlaps by {ahead}", set_at(body, path, value)
        for other, others in places.items():
            if other != modality:
                value = set_at(entries, (0,), others[0])
                yield f"{modality} is where {other} is", set_at(body, path, value)


def _mutate_tokens(body: Body) -> Iterator[tuple[str, Body]]:
    token_ids = body["token_ids"]
    for modality, places in body["features"]["mm_placeholders"].items():
        for index, place in enumerate(places):
            offset = place["offset"]
            for where in (offset, offset + place["length"] - 1, offset + place["length"] // 2):
                before, own, after = token_ids[:where], token_ids[where], token_ids[where + 1 :]
                for name, value in {
                    "less": [*before, *after],
                    "more": [*before, own, own, *after],
                    "of text": [*before, 200, *after],
                    "of the vocabulary's end": [*before, 10**6, *after],
                }.items():
                    yield f"{modality} {index} {name} at {where}", {**body, "token_ids": value}
    for wrong in (None, 1, "x", {}, [], [None], ["1"], [1.5], [-1], [[1]], [2**63]):
        yield f"token_ids are {wrong!r}", {**body, "token_ids": wrong}


# ---- the items


def mutate_tensors(item: bytes) -> Iterator[tuple[str, bytes]]:
    """Change names, dtypes, shapes and values of an item's tensors, and its layout."""
    whole = msgspec.msgpack.decode(item)
    for name, tensor in whole["tensors"].items():
        for key, value in _mutate_tensor(tensor):
            yield f"{name}: {key}", _pack(set_at(whole, ("tensors", name), value))
        rest = {other: value for other, value in whole["tensors"].items() if other != name}
        for other in ("", "x", name.upper(), f"{name}s"):
            yield f"{name} is {other!r}", _pack({**whole, "tensors": {**rest, other: tensor}})
        yield f"no {name}", _pack({**whole, "tensors": rest})
        yield (
            f"next to {name}",
            _pack(set_at(whole, ("tensors",), {**whole["tensors"], "x": tensor})),
        )
    for value in (None, 1, "x", [], {}):
        yield f"tensors are {value!r}", _pack({**whole, "tensors": value})
    layout = whole["layout"]
    for key, wrong in {
        "text": (None, 1, "", "x", layout["text"] * 2, layout["text"][:-1], [], b"x"),
        "token_id": (None, -1, 0, "x", 2**40, layout["token_id"] + 1, 1.5, True),
        "num_embeds": (None, -1, 0, "x", 2**40, layout["num_embeds"] + 1, 1.5, True),
    }.items():
        for value in wrong:
            yield f"layout {key} is {value!r:.40}", _pack(set_at(whole, ("layout", key), value))
    for value in (1, "x", [], {}, {"text": "x"}):
        yield f"layout is {value!r}", _pack({**whole, "layout": value})


def _mutate_tensor(tensor: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    dtype, shape, data = tensor["dtype"], tensor["shape"], tensor["data"]
    for other in (*_DTYPES, "float32" if dtype != "float32" else "int8", None, 1, [], "object"):
        if other != dtype:
            yield f"dtype {other!r}", {**tensor, "dtype": other}
    for value in _get_other_shapes(shape):
        yield f"shape {value!r}", {**tensor, "shape": value}
    size = _SIZES[dtype]
    for changed in (data[:-1], data[:-size], b"", data + data[:size], data[: len(data) // 2]):
        yield f"{len(changed)} bytes", {**tensor, "data": changed}
    for value in (None, 1, "x", []):
        yield f"data {value!r}", {**tensor, "data": value}
    more = [shape[0] + 1, *shape[1:]]
    row = data[: len(data) // shape[0]]
    yield "a row more", {**tensor, "shape": more, "data": data + row}
    yield (
        "another last size",
        {
            **tensor,
            "shape": [*shape[:-1], 2 * shape[-1]],
            "data": data + data,
        },
    )
    if len(shape) > 1:
        yield "as one row", {**tensor, "shape": [len(data) // size]}
    yield from _mutate_values(tensor)


def _get_other_shapes(shape: list[int]) -> list[Any]:
    return [
        *(None, 1, "x", {}, [], [0], [-1], [2**62], [2**62, 2**62], [0, 2**62], [1.5], ["1"]),
        *([*shape, 1], [1, *shape], [*shape[:-1], shape[-1] + 1], [-shape[0], *shape[1:]]),
        *([2**31, *shape[1:]], [1] * 9, [0, *shape[1:]], shape[:-1]),
    ]


def _mutate_values(tensor: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    values = np.frombuffer(tensor["data"], dtype=tensor["dtype"]).copy()
    is_real = tensor["dtype"] == "float32"
    wrong = (np.nan, np.inf, -np.inf) if is_real else (-1, 2, 10**6, -(2**31), 2**31 - 1)
    for value in wrong:
        for index in {0, values.size // 2, values.size - 1}:
            if values[index] != value:
                changed = values.copy()
                changed[index] = value
                yield f"{value} at {index}", {**tensor, "data": changed.tobytes()}


def truncate(item: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    for end in sorted(rng.sample(range(len(item)), count)):
        yield f"the first {end} bytes", item[:end]


def flip_frame(item: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Change bits of an item, but not of its numbers: with other numbers it would be valid."""
    whole = msgspec.msgpack.decode(item)
    own = bytearray(item)
    places = set(range(len(item)))
    for tensor in whole["tensors"].values():
        start = item.index(tensor["data"])
        places -= set(range(start, start + len(tensor["data"])))
    for place in rng.choices(sorted(places), k=count):
        changed = bytearray(own)
        changed[place] ^= 1 << rng.randrange(8)
        yield f"byte {place} is {changed[place]:#x}", bytes(changed)


class _Item(msgspec.Struct):
    """An item as the server reads it: unknown keys are ignored."""

    tensors: dict[str, Any]
    layout: Any = None


def is_same_item(item: bytes, other: bytes) -> bool:
    """Return whether both items have the same tensors, and the other the same layout or none."""
    try:
        ours, theirs = (msgspec.msgpack.decode(entry, type=_Item) for entry in (item, other))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return ours.tensors == theirs.tensors and theirs.layout in (None, ours.layout)


def mutate_base64(item: bytes, rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    text = base64.b64encode(item).decode()
    for _ in range(count):
        place = rng.randrange(len(text))
        wrong = rng.choice("*!-_ \n=%\u00e4")
        yield f"{wrong!r} at {place}", text[:place] + wrong + text[place + 1 :]
        yield f"{place} of base64", text[: place - place % 4 + 1]


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)
