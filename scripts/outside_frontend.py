"""A frontend of another make: it runs the Hugging Face processor itself and sends what that gave.

It uses nothing of Sensorium but its wire. For models with one run of placeholder tokens per image
(Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni). Posts tokens and tensors to `/inference/v1/generate`, asks the
same as a conversation, and tells whether that was served from the cache.

    python scripts/outside_frontend.py --url http://127.0.0.1:8000 --model PATH --image cat.png
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from PIL import Image

_MSGPACK = "application/x-msgpack"
_COUNTERS = ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total")
_TIMEOUT_S = 120.0
_kept: list[Any] = []  # declarations live as long as the object that made them
# What a processor gives of the text, not of the image.
_TEXT_NAMES = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


def load_processor(model: str) -> Any:
    """With a CPU build of torch, torchvision may need two operators declared to be imported."""
    import torch

    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library: Any = torch.library
        library = library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(model)


def make_features(processor: Any, image: Image.Image, prompt: str, mm_hash: str) -> dict[str, Any]:
    """Expanded tokens, and the image's tensors with the place of its tokens."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    token_ids = [int(token_id) for token_id in inputs["input_ids"][0]]
    image_token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    places = [index for index, token_id in enumerate(token_ids) if token_id == image_token_id]
    offset, length = places[0], len(places)
    if places != list(range(offset, offset + length)):
        raise SystemExit("the image's tokens are not one run: this script is not for this model")
    tensors = {name: value for name, value in inputs.items() if name not in _TEXT_NAMES}
    layout = {
        "text": processor.image_token * length,
        "token_id": image_token_id,
        "num_embeds": length,
    }
    return {
        "token_ids": token_ids,
        "features": {
            "mm_hashes": {"image": [mm_hash]},
            "mm_placeholders": {"image": [{"offset": offset, "length": length, "is_embed": None}]},
            "kwargs_data": {"image": [pack_item(tensors, layout)]},
        },
    }


def pack_item(tensors: dict[str, Any], layout: dict[str, Any]) -> bytes:
    packed = {}
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor.numpy())
        packed[name] = {
            "dtype": str(values.dtype),
            "shape": values.shape,
            "data": values.tobytes(),
        }
    return msgspec.msgpack.encode({"tensors": packed, "layout": layout})


def make_chat(picture: bytes, prompt: str, max_tokens: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": prompt}]
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }


def ask_for_hash(client: httpx.Client, chat: dict[str, Any]) -> str:
    """What the server itself calls the image: it renders the conversation, without its pixels."""
    answer = _post(client, "/v1/chat/completions/render", {**chat, "return_kwargs": False})
    return str(answer["features"]["mm_hashes"]["image"][0])


def read_counters(client: httpx.Client) -> list[float]:
    """Queries and hits of the processor cache, over all that the server has."""
    text = client.get("/metrics").text
    found = [re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.M) for name in _COUNTERS]
    return [sum(map(float, values)) for values in found]


def _post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    if response.status_code != httpx.codes.OK:
        raise SystemExit(f"{path}: {response.status_code} {response.text}")
    return response.json()


def run(options: argparse.Namespace) -> dict[str, Any]:
    picture = Path(options.image).read_bytes()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with httpx.Client(base_url=options.url, headers=headers, timeout=_TIMEOUT_S) as client:
        chat = make_chat(picture, options.prompt, options.max_tokens)
        mm_hash = options.hash or ask_for_hash(client, chat)
        processor = load_processor(options.model)
        body = make_features(processor, image, options.prompt, mm_hash)
        body["sampling_params"] = {"temperature": 0.0, "max_tokens": options.max_tokens}
        generated = client.post(
            "/inference/v1/generate",
            content=msgspec.msgpack.encode(body),
            headers={"content-type": _MSGPACK, "accept": _MSGPACK},
        )
        if generated.status_code != httpx.codes.OK:
            raise SystemExit(f"generate: {generated.status_code} {generated.text}")
        before = read_counters(client)
        chosen = _post(client, "/v1/chat/completions", chat)["choices"][0]
        queries, hits = (
            now - then for now, then in zip(read_counters(client), before, strict=True)
        )
    return {
        "hash": mm_hash,
        "generated": msgspec.msgpack.decode(generated.content)["choices"][0]["token_ids"],
        "chat": chosen["token_ids"],
        "chat_queries": queries,
        "chat_hits": hits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", required=True, help="whose processor to run: a path or hub id")
    parser.add_argument("--image", required=True, help="a file")
    parser.add_argument("--prompt", default="What is this?")
    parser.add_argument("--hash", help="the image's name; without it the server is asked")
    parser.add_argument("--max-tokens", type=int, default=10)
    parser.add_argument("--api-key")
    print(json.dumps(run(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
