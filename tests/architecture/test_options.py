"""Options are declared once, and what is made of them is up to date."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sensorium import cli
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.multimodal.media import MediaLimits
from sensorium.server.options import ServeOptions
from sensorium.types.options import Option, list_options

ROOT = Path(__file__).parent.parent.parent
GROUPS = (LoadingOptions, EngineOptions, MediaOptions, MediaLimits, ServeOptions)
ALL = [each for group in GROUPS for each in list_options(group)]


def test_the_page_of_options_is_what_the_script_makes() -> None:
    script = ROOT / "scripts" / "make_options_doc.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_every_option_is_explained_in_sentences(each: Option) -> None:
    assert each.help[0].isupper()
    assert each.help.endswith(".")
    assert each.describe_default()


def test_every_flag_is_one_option() -> None:
    flags = [each.flag for each in ALL if each.flag]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("command", ["serve", "render", "chat", "generate", "transcribe"])
def test_a_command_has_the_flags_of_its_options_and_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", command, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    shown = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    expected = {each.flag for each in ALL if command in each.commands}
    own = {"--seed", "--chat-template", "--api-key"}  # flags with another meaning in some commands
    others = {each.flag for each in ALL if each.flag} - expected - own
    assert expected <= shown
    assert not others & shown


def test_the_list_of_models_is_printed_without_torch() -> None:
    script = (
        "import sys; from sensorium import cli; sys.argv = ['sensorium', 'models']; cli.main(); "
        "print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    assert result.stdout.startswith("family ")
    assert result.stdout.endswith("\n\n")


def test_the_signature_of_llm_shows_every_option() -> None:
    from sensorium import LLM

    parameters = inspect.signature(LLM).parameters
    names = [each.name for group in GROUPS[:3] for each in list_options(group)]
    assert next(iter(parameters)) == "model"
    assert set(names) | {"model", "media_limits"} == set(parameters)
    assert parameters["block_size"].default == 16
    assert "block_size: The number of tokens" in (LLM.__init__.__doc__ or "")


def test_an_unknown_option_of_llm_is_refused_with_the_nearest() -> None:
    from sensorium import LLM

    with pytest.raises(TypeError, match=r"no option 'max_model_length'; .* 'max_model_len'"):
        LLM("/nowhere", max_model_length=7)
