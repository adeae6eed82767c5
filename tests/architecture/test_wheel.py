"""The wheel has what a page of an index shows, and all files that the server needs."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    find_spec("hatchling") is None or find_spec("hatch_fancy_pypi_readme") is None,
    reason="the environment is older than pyproject.toml: run make setup",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    result = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return zipfile.ZipFile(next(folder.glob("sensorium-*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_the_metadata_names_authors_keywords_classifiers_and_urls(metadata: Message) -> None:
    assert metadata["Author"] == "The Sensorium authors"
    assert "multimodal" in metadata["Keywords"].split(",")
    classifiers = metadata.get_all("Classifier") or []
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers
    urls = metadata.get_all("Project-URL") or []
    assert urls
    assert all(url.partition(", ")[2].startswith("https://") for url in urls)
    assert metadata["License-Expression"] == "Apache-2.0"


def test_models_with_a_tokenizer_of_mistral_take_audio_without_the_tools_of_developers(
    metadata: Message,
) -> None:
    """mistral-common asks for soundfile when it makes a prompt with audio, and only then."""
    needed = [each for each in metadata.get_all("Requires-Dist") or [] if "extra ==" not in each]
    assert any(each.startswith("soundfile") for each in needed)


def test_the_description_is_the_readme_with_no_link_that_leads_nowhere(metadata: Message) -> None:
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "# Sensorium" in description
    assert "docs/media.md" in description
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_wheel_has_the_model_the_samples_and_the_page(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    for part in ("embedded/media/moving.mp4", "embedded/sensorium-mini/", "py.typed", ".html"):
        assert any(part in name for name in names), part
    assert not any(name.startswith(("tests/", "training/", "scripts/")) for name in names)
