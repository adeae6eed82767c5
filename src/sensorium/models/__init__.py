"""Runs the models of Transformers: loading, the generic adapter, and code for single families.

No model is reimplemented here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sensorium.models.torchvision_shim import ensure_torchvision

ensure_torchvision()  # before anything imports Transformers' processors


def list_models_once() -> None:
    """Keep Transformers from reading the files of all models twice.

    `transformers` and `transformers.models` both list the classes of all models, by reading some
    1,600 files. That takes a tenth of the time in which a process starts. The list is cached by
    path, but the first asks for the folder, and the second for the `__init__.py` in it. Here both
    ask for the folder. This can be removed when Transformers does the same.
    """
    from transformers.utils import import_utils  # after torchvision was made importable

    create_list = import_utils.create_import_structure_from_path

    def create_list_of_folder(path: str | os.PathLike[str]) -> Any:
        return create_list(Path(path).parent if os.path.isfile(path) else path)

    import_utils.create_import_structure_from_path = create_list_of_folder


list_models_once()  # before anything imports `transformers.models`
