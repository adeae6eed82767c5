"""Operators are declared only if torchvision is installed and can't be imported otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PACKAGES = {
    "absent": "raise ImportError('no torchvision')",
    "intact": "",
    # What the real package does: it describes an operator that its library failed to bring.
    "broken": "import torch\n@torch.library.register_fake('torchvision::nms')\ndef nms(*_): ...",
}


def run(directory: Path, script: str) -> list[str]:
    """Run a script in a fresh interpreter that imports torchvision from this directory."""
    for name, source in PACKAGES.items():
        package = directory / name / "torchvision"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(source)
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_a_torchvision_that_works_or_is_absent_is_unchanged(tmp_path: Path) -> None:
    script = """
import sys
sys.path.insert(0, "absent")
from sensorium import models
print("torchvision" in sys.modules, models._library)
sys.path.insert(0, "intact")
models.ensure_torchvision()
print("torchvision" in sys.modules, models._library)
"""
    assert run(tmp_path, script) == ["False", "None", "True", "None"]


def test_a_broken_one_can_be_imported_as_soon_as_models_are(tmp_path: Path) -> None:
    script = """
import sys
sys.path.insert(0, "broken")
try:
    import torchvision
except RuntimeError as error:
    print("nms" in str(error))
import sensorium.models
import torchvision
print(torchvision.nms is not None, sensorium.models._library is not None)
"""
    assert run(tmp_path, script) == ["True", "True", "True"]
