"""Checkpoints as they come: in shards, damaged, too large, pickled, with code of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from sensorium import LLM, ModelError, SamplingParams, cli

TinyModel = Callable[[str], str]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7, 8]
_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def directory(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


@pytest.fixture
def sharded(directory: Path) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="200KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    return directory


def generate(directory: Path | str, **options: object) -> list[int]:
    llm = LLM(directory, max_model_len=64, **options)  # type: ignore[arg-type]
    return list(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


def change_config(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_shards_are_one_model(sharded: Path, tiny_model: TinyModel) -> None:
    assert generate(sharded) == generate(tiny_model("llama"))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"1 of . files are missing, for example {shard.name}"):
        LLM(sharded)


def test_a_shard_that_is_cut_short_is_named_with_its_sizes(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=rf"{shard.name} is cut short: .* of {len(content)} bytes"):
        LLM(sharded)


def test_pickled_weights_are_refused(directory: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: only safetensors are loaded"):
        LLM(directory)


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(directory: Path) -> None:
    """4 TiB that a sparse file claims; reading them would end this process."""
    num_bytes = 4 * 2**40
    tensor = {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    path = directory / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + num_bytes)
        except OSError:
            pytest.skip("this file system has no sparse files of that size")
    with pytest.raises(ModelError) as caught:
        LLM(directory)
    message = str(caught.value)
    assert "does not fit on cpu: weights 4096.0 GiB + KV cache" in message
    assert "GiB are free. What helps: a smaller model" in message


def test_the_memory_plan_is_a_part_of_the_config(tiny_model: TinyModel) -> None:
    directory = tiny_model("llava")
    llm = LLM(directory, max_model_len=64, kv_cache_memory_bytes=1_000_000)
    memory = llm.config.memory
    tensors = load_file(Path(directory) / "model.safetensors")
    assert memory.weights_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())
    assert 900_000 < memory.kv_cache_bytes <= 1_000_000
    assert memory.encoder_cache_bytes == llm.config.limits.encoder_cache_size * 64 * 4
    assert memory.encoder_peak_bytes > 0
    assert memory.step_bytes > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", torch.float16])
def test_short_dtypes_run_on_a_cpu(tiny_model: TinyModel, dtype: object) -> None:
    assert len(generate(tiny_model("llama"), dtype=dtype)) == 6


def write_code(directory: Path) -> None:
    (directory / "own.py").write_text(_CODE)
    change_config(
        directory,
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    )


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(
    directory: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_code(directory)
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("it asked"))
    with pytest.raises(ModelError, match=r"code of its own: .*trust_remote_code=True \(--trust"):
        LLM(directory)
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(directory / "modules")
    )
    assert generate(directory, trust_remote_code=True) == generate(tiny_model("llama"))


def test_code_for_a_class_that_transformers_lacks_has_to_be_trusted(directory: Path) -> None:
    change_config(
        directory,
        architectures=["OwnForCausalLM"],
        auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"},
    )
    with pytest.raises(ModelError, match=r"code of its own: .*trust_remote_code=True"):
        LLM(directory)


def test_code_that_is_not_needed_is_not_run(directory: Path, tiny_model: TinyModel) -> None:
    change_config(directory, auto_map={"AutoModelForCausalLM": "absent.LlamaForCausalLM"})
    assert generate(directory) == generate(tiny_model("llama"))


def test_the_command_takes_the_same_options(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*flags: str) -> None:
        monkeypatch.setattr("sys.argv", ["sensorium", "generate", str(directory), "hi", *flags])
        cli.main()

    with pytest.raises(SystemExit, match="revision='v1' needs a hub id"):
        run("--revision", "v1")
    with pytest.raises(SystemExit, match="2"):
        run("--gpu-memory-utilization", "7")
    assert (
        "--gpu-memory-utilization: it must be a number above 0 and at most 1, not 7"
        in capsys.readouterr().err
    )
    write_code(directory)
    with pytest.raises(SystemExit, match="--trust-remote-code"):
        run()
    assert capsys.readouterr().out == ""
