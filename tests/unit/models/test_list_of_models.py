"""Transformers lists its models by reading their files, which is done once in a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import sensorium.models
from transformers.utils import import_utils
assert "transformers.models" not in sys.modules
import_utils.fetch__all__ = None  # what reads a file
import transformers.models
print("CLIPModel" in dir(transformers.models), "clip" in dir(transformers.models))
"""


@pytest.mark.slow  # if it fails, starts take longer, and that is all
@pytest.mark.processes
def test_files_of_models_are_not_read_a_second_time() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert (result.returncode, result.stdout) == (0, "True True\n"), result.stderr
