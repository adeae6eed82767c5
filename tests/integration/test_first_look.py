"""Commands say what is wrong with a model before they import torch, each in the same sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sensorium import LLM, ModelError
from sensorium.embedded.samples import MEDIA_FOLDER

TinyModel = Callable[[str], str]
Damage = Callable[[Path], None]
# Any import of these raises, so that a sentence that is printed was found without them.
_SCRIPT = """
import json, sys
from importlib.abc import MetaPathFinder

class Refusal(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "ray", "huggingface_hub"):
            raise ImportError("imported " + name)

sys.meta_path.insert(0, Refusal())
from sensorium import cli
for argv in json.loads(sys.argv[1]):
    sys.argv = ["sensorium", *argv]
    try:
        cli.main()
        result = "it ended"
    except SystemExit as error:
        result = str(error.code)
    except ImportError as error:
        result = str(error)
    print(json.dumps(result))
"""
LOADERS = ("serve", "deploy", "encode", "chat", "generate", "transcribe")
COMMANDS = (*LOADERS, "render", "models")
_HAVE_CONTEXT = ("serve", "deploy", "chat", "generate", "transcribe", "render")
_SOUND = MEDIA_FOLDER / "speech.flac"


def make_command(command: str, model: str, *flags: str) -> list[str]:
    more = {
        "encode": ["--socket", "/nowhere.sock"],
        "chat": ["what?"],
        "generate": ["what?"],
        "transcribe": [str(_SOUND)],
    }
    name = ["--model", model] if command == "transcribe" else [model]
    return [command, *name, *more.get(command, ()), *flags]


def run(*commands: list[str]) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def drop(*names: str) -> Damage:
    def damage(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return damage


def change(**values: object) -> Damage:
    def damage(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


def make_adapter(directory: Path) -> None:
    drop("config.json", "model.safetensors")(directory)
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/base"})
    (directory / "adapter_config.json").write_text(text)
    (directory / "adapter_model.safetensors").touch()


def make_gguf(directory: Path) -> None:
    drop("config.json", "model.safetensors")(directory)
    (directory / "model-Q4_K_M.gguf").touch()


def cut_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def put_below(directory: Path) -> None:
    (directory / "inner").mkdir()
    shutil.move(directory / "config.json", directory / "inner" / "config.json")


@pytest.mark.parametrize(
    ("family", "damage", "commands", "words"),
    [
        pytest.param("llama", make_adapter, COMMANDS, "is a LoRA adapter .* owner/base", id="lora"),
        pytest.param("llama", make_gguf, COMMANDS, "GGUF file model-Q4_K_M.gguf", id="gguf"),
        pytest.param("llama", drop("config.json"), COMMANDS, "no config.json in", id="no-config"),
        pytest.param("llama", put_below, COMMANDS, r"did you mean '.*inner'\?", id="inner"),
        pytest.param("llama", change(model_type=None), COMMANDS, "has no model_type", id="type"),
        pytest.param(
            "llama", change(architectures=[]), COMMANDS, "names no architectures", id="class"
        ),
        pytest.param(
            "llama", drop("tokenizer.json"), COMMANDS, "has no tokenizer .*copy", id="tokenizer"
        ),
        pytest.param(
            "llava", drop("processor_config.json"), COMMANDS, "has no processor", id="processor"
        ),
        pytest.param(
            "wav2vec2", drop("preprocessor_config.json"), COMMANDS, "no processor", id="ctc"
        ),
        pytest.param(
            "llama",
            change(quantization_config={"quant_method": "awq"}),
            COMMANDS,
            r"quantized \(awq\), which is not supported: give",
            id="quantized",
        ),
        pytest.param("llama", drop("model.safetensors"), LOADERS, "no weights in", id="weights"),
        pytest.param("llama", cut_short, LOADERS, "is cut short", id="cut-short"),
    ],
)
def test_each_command_names_the_fault_without_torch(
    tiny_model: TinyModel,
    tmp_path: Path,
    family: str,
    damage: Damage,
    commands: tuple[str, ...],
    words: str,
) -> None:
    directory = shutil.copytree(tiny_model(family), tmp_path / "model")
    damage(directory)
    results = run(*(make_command(command, str(directory)) for command in commands))
    assert len(results) == len(commands)
    for result in results:
        assert result.startswith("sensorium: ")
        assert "\n" not in result
    with pytest.raises(ModelError, match=words):  # `match` shows what was said instead
        raise ModelError(results[0])
    assert len(set(results)) == 1


@pytest.mark.parametrize("name", ["/nowhere", "no id", "owner--name", "a/b/c", "model.gguf"])
def test_each_command_refuses_an_impossible_model_name(name: str) -> None:
    results = run(*(make_command(command, name) for command in COMMANDS))
    assert all(result.startswith("sensorium: ") for result in results), results
    (said,) = {result.partition(". A single word")[0] for result in results}
    assert repr(name) in said


def test_each_command_refuses_a_context_beyond_the_models(tiny_model: TinyModel) -> None:
    flags = ("--max-model-len", "8193")
    results = run(
        *(make_command(each, tiny_model("llava"), *flags) for each in _HAVE_CONTEXT),
        make_command("serve", "sensorium-mini", "--max-model-len", "999999"),
    )
    assert all("more than the model's context of" in result for result in results), results


def test_a_model_that_does_not_translate_is_named(tiny_model: TinyModel) -> None:
    models = ("sensorium-mini", tiny_model("qwen3_asr"), tiny_model("qwen2_audio"))
    flags = ("--task", "translate")
    *refusals, other = run(*(make_command("transcribe", model, *flags) for model in models))
    assert refusals == [
        f"sensorium: {model} can't be used: this model does not translate what is said. Name "
        "another with --model, such as openai/whisper-small."
        for model in models[:2]
    ]
    assert other.startswith("imported ")


def test_each_command_continues_with_a_model_that_has_no_fault(tiny_model: TinyModel) -> None:
    """The control of the tests above: without a fault, heavy imports are what comes next."""
    commands = ("deploy", "chat", "generate", "transcribe", "models")  # others start processes
    results = run(*(make_command(command, tiny_model("llava")) for command in commands))
    others = [result for result in results if not result.startswith("imported ")]
    assert all("needs Ray" in result for result in others), results


def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    change(intermediate_size=72)(directory)
    with pytest.raises(
        ModelError,
        match=r"the tensor model.layers.0.mlp.down_proj.weight has the shape \[64, 128\] where the "
        r"config asks for \[64, 72\] \(9 tensors differ\)",
    ):
        LLM(directory, max_model_len=64)


@pytest.mark.parametrize(("family", "part"), [("llama", "up_proj"), ("llava", "vision_tower")])
def test_a_tensor_with_nan_values_is_named(
    tiny_model: TinyModel, tmp_path: Path, family: str, part: str
) -> None:
    directory = shutil.copytree(tiny_model(family), tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if part in name)
    tensors[name].view(-1)[-1] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"\(NaN\) in the tensor \S*{part}\S*\. Download"):
        LLM(directory, max_model_len=64)
