"""A look at a model's files refuses what can't be run, and nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from make_tiny_models import FAMILIES
from sensorium.checkpoints.first_look import find_context, find_directory, look_at, look_into
from sensorium.embedded.cache import PACKED_MODEL
from sensorium.types.errors import ModelError

TinyModel = Callable[[str], str]
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def write(directory: Path, config: object = LLAMA, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name in names:
        (directory / name).write_text("{}")
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes(tiny_model: TinyModel, family: str) -> None:
    assert look_at(tiny_model(family), needs_weights=True, max_model_len=2) is not None


def test_the_model_in_the_package_passes_as_it_is_packed() -> None:
    look_into(PACKED_MODEL, max_model_len=2048)
    with pytest.raises(ModelError, match="more than the model's context of"):
        look_into(PACKED_MODEL, max_model_len=10**9)


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "Qwen/Qwen2.5-VL-3B-Instruct", "a_b/c.d"])
def test_a_hub_id_may_not_be_here_yet(name: str) -> None:
    assert find_directory(name) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the name of the model is empty"),
        ("/nowhere", "there is no directory '/nowhere'"),
        ("./nowhere", "there is no directory"),
        ("a/b/c", "there is no directory 'a/b/c'"),
        ("owner/na me", "neither a directory nor a hub id"),
        ("owner--name", "neither a directory nor a hub id"),
        ("https://example.com", "there is no directory|neither"),
        ("owner/name.git", "neither a directory nor a hub id"),
        ("what?", "neither a directory nor a hub id"),
        ("n" * 5000, "can't be the name of a model|neither"),
        ("~nobody-of-this-name/x", "can't be the name of a model|there is no directory"),
        ("model-Q4.gguf", "is a GGUF file"),
    ],
)
def test_a_name_that_can_not_be_a_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_directory(name)


@pytest.mark.parametrize(
    "names",
    [
        ("tokenizer.json",),
        ("tokenizer.model",),
        ("vocab.json", "merges.txt"),
        ("vocab.txt",),
        ("spiece.model",),
        ("tekken.json",),
        ("tokenizer.model.v3",),
        ("qwen.tiktoken",),
    ],
)
def test_a_vocabulary_has_many_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    look_into(write(tmp_path, LLAMA, *names))


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path: Path) -> None:
    directory = write(tmp_path, LLAMA, "tokenizer_config.json")
    with pytest.raises(ModelError, match="has no tokenizer"):
        look_into(directory)
    for settings in ({"tokenizer_class": "ByT5Tokenizer"}, {"auto_map": {"AutoTokenizer": "a.B"}}):
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        look_into(directory)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 7}, 7),
        ({"max_target_positions": 5, "max_position_embeddings": 7}, 5),
        ({"max_position_embeddings": 7, "text_config": {"max_position_embeddings": 9}}, 9),
        ({"max_position_embeddings": 7, "text_config": {}}, None),
        ({"thinker_config": {"text_config": {"max_position_embeddings": 9}}}, 9),
        ({"decoder": {"max_position_embeddings": 3}, "text_config": {}}, None),
        ({"encoder_config": {"max_position_embeddings": 3}}, None),
        *(({"max_position_embeddings": odd}, None) for odd in (0, -5, True, "7", 7.5, None)),
        ({}, None),
    ],
)
def test_the_context_is_that_of_the_part_that_writes_text(
    config: dict[str, Any], context: int | None
) -> None:
    assert find_context(config) == context


@pytest.mark.parametrize("part", [None, "text_config"])
def test_quantized_weights_are_named_by_their_kind(tmp_path: Path, part: str | None) -> None:
    kind = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    directory = write(tmp_path, LLAMA | (kind if part is None else {part: kind}), "vocab.txt")
    with pytest.raises(ModelError, match=r"quantized \(gptq\), which is not supported"):
        look_into(directory)
    look_into(write(tmp_path, LLAMA | {"quantization_config": None}, "vocab.txt"))


@given(
    st.dictionaries(
        st.sampled_from(
            (
                *LLAMA,
                "auto_map",
                "quantization_config",
                "text_config",
                "thinker_config",
                "decoder",
                "max_position_embeddings",
                "image_token_id",
            )
        ),
        st.none()
        | st.integers()
        | st.text(max_size=3)
        | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.sampled_from(["max_position_embeddings", "quant_method"]), st.none()),
    )
)
def test_odd_values_in_a_config_raise_no_other_error(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(ModelError):
        look_into(write(Path(folder), LLAMA | changes, "vocab.txt"), max_model_len=5)


def test_code_of_the_checkpoint_may_make_up_for_what_the_config_lacks(tmp_path: Path) -> None:
    look_into(write(tmp_path, {"auto_map": {"AutoConfig": "own.Config"}}, "vocab.txt"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "adapter_config.json"])
@pytest.mark.parametrize("part", ["[", '{"a":'])
def test_deeply_nested_json_is_refused(tmp_path: Path, name: str, part: str) -> None:
    (write(tmp_path) / name).write_text(part * 100_000)
    with pytest.raises(ModelError, match=f"{name} is not JSON: its values are nested too deeply"):
        look_into(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[" * 100_000, "is not JSON: its values are nested too deeply"),
        ("[]", "is not a JSON object"),
        ("{}", "its weight_map names no files"),
        ('{"weight_map": {}}', "its weight_map names no files"),
        ('{"weight_map": ["x.safetensors"]}', "its weight_map names no files"),
    ],
)
def test_a_file_that_is_no_index_of_weights_is_refused(
    tmp_path: Path, index: str, message: str
) -> None:
    directory = write(tmp_path, LLAMA, "vocab.txt")
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=rf"model\.safetensors\.index\.json .*{message}"):
        look_at(str(directory), needs_weights=True)


@pytest.mark.parametrize(
    "name",
    [
        *(5, None, True, ["x.safetensors"], "", ".", "pytorch_model.bin", ".safetensors"),
        *("../x.safetensors", "a/../../x.safetensors", "/x.safetensors", "a\0.safetensors"),
        *("\ud800.safetensors", "\x1b[31m.safetensors", f"{'x' * 5000}.safetensors"),
    ],
    ids=lambda name: repr(name)[:30],
)
def test_an_index_names_no_files_but_weights_in_its_directory(tmp_path: Path, name: object) -> None:
    directory = write(tmp_path / "model", LLAMA, "vocab.txt")
    (tmp_path / "x.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    index = {"weight_map": {"a": "x.safetensors", "b": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="is not the name of a safetensors file in the same dir"):
        look_at(str(directory), needs_weights=True)
