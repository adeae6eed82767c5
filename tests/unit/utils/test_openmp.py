from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sensorium.utils.openmp import get_wait_variables


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_variables_that_are_set_stay(name: str) -> None:
    assert get_wait_variables({name: "1"}) == {}
    assert get_wait_variables({"OMP_NUM_THREADS": "1"}) == {"GOMP_SPINCOUNT": "3000"}


def test_commands_set_it_before_pytorch_is_imported() -> None:
    code = (
        "import os, sys; from sensorium.cli import main\n"
        "sys.argv[1:] = ['transcribe', 'none.wav']\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["3000"], done.stderr
