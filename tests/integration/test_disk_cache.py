"""The disk cache of a real engine and of real servers: restarts, neighbours, damage, salts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium import LLM, SamplingParams
from sensorium.models.checkpoint import get_weights_identity
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.tiers.disk import DiskStore
from sensorium.multimodal.tiers.tiers import MediaTiers, _encode, _name
from sensorium.types.errors import ModelError, RequestError
from tests.integration.media_steps import forget_outputs, make_new_png, make_prompt
from tests.integration.rendering import render
from tests.parity.cases import make_image
from tests.support.clients import ask, chat, make_image_part
from tests.support.engine import make_llm
from tests.support.media import make_pixels, write_image
from tests.support.server import ServerProcess, serve
from tests.support.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NAMED = ("--served-model-name", "tiny")


def run(llm: LLM, prompt: Any) -> tuple[tuple[int, ...], int, int]:
    """Return an answer, and how many items the engine has encoded and loaded so far."""
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    runner = llm.core.runner.encoder_runner
    assert output.error is None
    return output.outputs[0].token_ids, runner.num_encoded, runner.num_loaded


@pytest.fixture
def llava(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("llava")


def test_another_salt_finds_nothing(llava: str, tmp_path: Path) -> None:
    data = make_new_png()
    salted = make_prompt(data) | {"cache_salt": "mine"}
    for prompt in (make_prompt(data), salted):
        with make_llm(llava, mm_disk_cache=tmp_path) as llm:
            assert run(llm, prompt)[1:] == (1, 0)
    with make_llm(llava, mm_disk_cache=tmp_path) as llm:
        assert run(llm, salted)[1:] == (0, 1)
        assert run(llm, make_prompt(data) | {"cache_salt": "yours"})[1:] == (1, 1)


def test_other_weights_or_another_type_encode_anew(llava: str, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(llava, copy)
    cache, prompt = tmp_path / "cache", make_prompt(make_new_png())
    with make_llm(str(copy), mm_disk_cache=cache) as llm:
        assert run(llm, prompt)[1:] == (1, 0)
    with make_llm(str(copy), mm_disk_cache=cache, dtype="bfloat16") as llm:
        assert run(llm, prompt)[1:] == (1, 0)
    (weights,) = copy.glob("*.safetensors")
    os.utime(weights, (1, 1))  # as if other weights of the same shape were written
    with make_llm(str(copy), mm_disk_cache=cache) as llm:
        assert run(llm, prompt)[1:] == (1, 0)


def test_weights_are_recognised_by_their_files(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--something" / "snapshots" / ("ab" * 20)
    own = tmp_path / "snapshots" / "best"
    for directory in (snapshot, own):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(bytes(100_000))
        os.utime(directory / "model.safetensors", (1, 1))
    assert get_weights_identity(snapshot) == "ab" * 20
    before = get_weights_identity(own)
    (own / "model.safetensors").write_bytes(bytes(50_000) + b"x" * 5000 + bytes(45_000))
    os.utime(own / "model.safetensors", (1, 1))  # as in images that are built reproducibly
    assert get_weights_identity(own) != before


def test_a_stricter_limit_also_holds_for_cached_media(llava: str, tmp_path: Path) -> None:
    prompt = make_prompt(make_new_png())
    with make_llm(llava, mm_disk_cache=tmp_path) as llm:
        run(llm, prompt)
    limits = MediaLimits(max_pixels=1000)
    with (
        make_llm(llava, mm_disk_cache=tmp_path, media_limits=limits) as llm,
        pytest.raises(RequestError, match="pixels"),
    ):
        run(llm, prompt)


def test_tensors_under_a_hash_that_a_caller_made_up_are_not_kept(
    llava: str, tmp_path: Path
) -> None:
    """Another run of the caller may send other tensors under the same hash."""
    found = []
    for seed in (1, 2):
        with make_llm(llava, mm_disk_cache=tmp_path) as llm:
            rendered = render(llm, make_prompt(make_image(60, 60, seed=seed)))
            prompt = rendered.make_prompt("ab" * 32)
            found.append(run(llm, prompt))
        with make_llm(llava) as llm:
            assert run(llm, prompt) == found[-1]
    assert [counts for _, *counts in found] == [[1, 0], [1, 0]]
    assert not list(tmp_path.glob("*/*encoded*"))


def test_an_output_that_the_encoder_cache_lost_is_loaded(llava: str, tmp_path: Path) -> None:
    """The frontend still has the pixels, so that the core itself has to look on the disk."""
    with make_llm(llava, mm_disk_cache=tmp_path) as llm:
        prompt = make_prompt(make_new_png())
        expected, *_ = run(llm, prompt)
        assert llm.media_parts.tiers is not None
        assert llm.media_parts.tiers.writer.wait(30)
        forget_outputs(llm)
        assert run(llm, prompt) == (expected, 1, 1)


@pytest.mark.parametrize("part", ["layout", "tensors", "encoded", ""])
def test_damaged_files_are_processed_again(
    part: str, tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    family = tiny_model("qwen2_5_vl")  # its pixels are an entry of their own
    prompt = {
        "prompt": "<|vision_start|><|image_pad|><|vision_end|>what?",
        "multi_modal_data": {"image": [write_image(make_pixels(300, 300), "PNG")]},
    }
    with make_llm(family, mm_disk_cache=tmp_path) as llm:
        expected, *_ = run(llm, prompt)
    damaged = list(tmp_path.glob(f"*/*.{part}*"))
    assert len(damaged) == (1 if part else 3)
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with make_llm(family, mm_disk_cache=tmp_path) as llm:
        tokens, num_encoded, _ = run(llm, prompt)
        assert tokens == expected
        assert num_encoded == (part in ("encoded", ""))
    with make_llm(family, mm_disk_cache=tmp_path) as llm:
        assert run(llm, prompt) == (expected, 0, 1), "what was damaged was written again"


LARGE = 2**63 - 1
ODD_LAYOUTS: dict[str, dict[str, Any]] = {
    "no embeddings": {"num_embeds": 0},
    "less than none": {"num_embeds": -5},
    "one more": {"num_embeds": 26},
    "very many": {"num_embeds": LARGE},
    "another token": {"token_id": 3},
    "no token": {"token_id": -LARGE},
    "no text": {"text": ""},
    "another text": {"text": "what?"},
}
ODD_GRIDS: dict[str, Any] = {
    "nothing": [[1, 0, 0]],
    "less than nothing": [[1, -10, -10]],
    "more": [[1, 12, 10]],
    "odd": [[1, 5, 20]],
    "very large": [[1, 2**31, 2**31]],
    "overflowing": [[LARGE, LARGE, LARGE]],
    "another shape": [1, 10, 10],
    "nothing at all": [],
    "fractions": [[1.0, 10.0, 10.0]],
}


def rewrite_layout(
    tiers: MediaTiers, mm_hash: str, layout: dict[str, Any], grid: object = None
) -> None:
    """Change what an entry says, so that its checksum holds."""
    (head, tensors) = tiers._load(mm_hash, tiers._layout) or pytest.fail("no entry")
    assert head.layout is not None
    if grid is not None:
        tensors = {**tensors, "image_grid_thw": torch.tensor(grid)}
    content = _encode(
        tensors,
        modality=head.modality,
        layout=replace(head.layout, **layout),
        order=head.order,
    )
    name = _name(mm_hash, tiers._layout)
    tiers._stores[0].remove(name)
    assert tiers._stores[0].put(name, content)


def test_entries_that_make_no_sense_are_processed_again(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """Their checksums hold: another version has written them, or somebody who may write there."""
    prompt = {
        "prompt": "<|vision_start|><|image_pad|><|vision_end|>what?",
        "multi_modal_data": {"image": [write_image(make_pixels(140, 140), "PNG")]},
    }
    options = {"mm_disk_cache": tmp_path, "mm_processor_cache_gb": 0}
    with make_llm(tiny_model("qwen2_5_vl"), **options) as llm:
        tiers = llm.media_parts.tiers
        assert tiers is not None
        expected, num_encoded, num_loaded = run(llm, prompt)
        assert tiers.writer.wait(30)
        (path,) = tmp_path.glob("*/*.layout*")
        mm_hash = path.name.split(".")[0]
        changes = [(layout, None) for layout in ODD_LAYOUTS.values()]
        for layout, grid in [*changes, *(({}, grid) for grid in ODD_GRIDS.values())]:
            for has_output in (True, False):
                rewrite_layout(tiers, mm_hash, layout, grid)
                if not has_output:
                    tiers._stores[0].remove(_name(mm_hash, tiers._encoded))
                forget_outputs(llm)
                num_damaged = tiers.statistics()["disk"].num_damaged
                assert run(llm, prompt)[0] == expected, (layout, grid)
                assert tiers.statistics()["disk"].num_damaged > num_damaged, (layout, grid)
                assert tiers.writer.wait(30)
        forget_outputs(llm)
        _, num_encoded, num_loaded = run(llm, prompt)
        forget_outputs(llm)
        assert run(llm, prompt) == (expected, num_encoded, num_loaded + 1), "it is there again"


def test_a_rendered_prompt_has_pixels_even_if_the_cache_has_encoder_outputs(
    llava: str, tmp_path: Path
) -> None:
    prompt = make_prompt(make_new_png())
    options = {"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 0.02}
    with make_llm(llava, mm_disk_cache=tmp_path, **options) as llm:
        run(llm, prompt)
    with make_llm(llava, mm_disk_cache=tmp_path, **options) as llm:
        assert run(llm, prompt)[1:] == (0, 1)  # shared memory has the encoder's output now
        (kwargs,) = render(llm, prompt).kwargs
        assert kwargs.keys() == {"pixel_values"}


def test_a_directory_that_cannot_be_used_is_refused_at_once(llava: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"disk cache of media, .*file.*can't be used"):
        make_llm(llava, mm_disk_cache=tmp_path / "file")
    with pytest.raises(ModelError, match="mm_disk_cache_gb"):
        make_llm(llava, mm_disk_cache=tmp_path, mm_disk_cache_gb=0)


# ---- servers


def ask_for_trace(server: ServerProcess, seed: int = 1) -> tuple[tuple[int, ...], dict[str, Any]]:
    answer = chat(server.make_client(), ask(make_image_part(seed), "What is it?"), max_tokens=4)
    (item,) = answer.trace["items"]
    return answer.token_ids, item


@pytest.mark.processes
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_server_that_starts_again_decodes_and_encodes_nothing(
    end: str, llava: str, tmp_path: Path
) -> None:
    flags = (*NAMED, "--mm-disk-cache", str(tmp_path))
    with serve(llava, *flags) as server:
        expected, item = ask_for_trace(server)
        assert item["encoder"] == "miss"
        assert {"decode", "process"} <= item["ms"].keys()
        if end == "stop":
            assert server.stop() == 0
        else:  # what is written in the background gets a moment, as on any machine that dies later
            metrics = server.get_metrics()
            while metrics['sensorium:tier_writes_total{level="disk"}'] < 2:
                metrics = server.get_metrics()
            server.kill()
    with serve(llava, *flags) as server:
        tokens, item = ask_for_trace(server)
        assert tokens == expected
        assert (item["processor"], item["encoder"]) == ("miss", "loaded")
        assert "load" in item["ms"]
        assert not item["ms"].keys() & {"decode", "process"}
        metrics = server.get_metrics()
        assert metrics['sensorium:encoder_items_total{how="encoded"}'] == 0
        assert metrics['sensorium:encoder_items_total{how="loaded"}'] == 1
        assert metrics['sensorium:cache_hits_total{level="disk"}'] == 2
        assert metrics['sensorium:cache_bytes{level="disk"}'] == sum(
            path.stat().st_size for path in tmp_path.glob("*/*")
        )
        for level in ("encoder", "prefix"):  # the frontend still has the pixels
            server.post(f"/reset_{level}_cache").raise_for_status()
        tokens, item = ask_for_trace(server)
        assert tokens == expected
        assert (item["processor"], item["encoder"]) == ("hit", "loaded"), "the core has looked"
        (tmp_path / "taken").write_bytes(b"9" * 400)
        assert ask_for_trace(server)[1]["processor"] == "hit"
        assert server.get_metrics()['sensorium:cache_bytes{level="disk"}'] == 0
        ask_for_trace(server, seed=2)
        wait_until(
            lambda: server.get_metrics()['sensorium:cache_bytes{level="disk"}'] > 0,
            "the next entry makes the count anew",
        )


@pytest.mark.processes
def test_two_servers_share_one_directory_within_its_room(llava: str, tmp_path: Path) -> None:
    entry = 2**15  # about what one image takes here
    flags = (*NAMED, "--mm-disk-cache", str(tmp_path), "--mm-disk-cache-gb", str(8 * entry / 2**30))
    with serve(llava, *flags) as first, serve(llava, *flags) as second:
        for seed in range(12):
            expected, _ = ask_for_trace(first, seed)
            tokens, _ = ask_for_trace(second, seed)
            assert tokens == expected
        store = DiskStore(tmp_path, 2**30)
        with store._locked():
            assert sum(num_bytes for _, num_bytes, _ in store._list_files()) <= 8 * entry
        for server in (first, second):
            faults = [
                count
                for name, count in server.get_metrics().items()
                if name.startswith("sensorium:tier_faults_total")
            ]
            assert faults
            assert not any(faults)
        evictions = 'sensorium:cache_evictions_total{level="disk"}'
        assert first.get_metrics()[evictions] + second.get_metrics()[evictions] > 0
