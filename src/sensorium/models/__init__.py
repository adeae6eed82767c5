"""Runs the models of Transformers: loading, the generic `HfModel`, and code for single families.

No model is reimplemented here. Importing this package makes `import torchvision` work with a CPU
build of torch. Transformers' processors need that, so import it before them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # the declarations live as long as this object


def ensure_torchvision() -> None:
    """Import torchvision, and declare two of its operators first if the import fails without them.

    The wheels on the package index link their compiled operators against CUDA. Without CUDA these
    don't load, and the import fails with "operator torchvision::nms does not exist". Transformers'
    processors need only `transforms.v2`, which is pure torch. Remove this when every platform has a
    CPU wheel. If torchvision is not installed, nothing happens: not every model needs it.
    """
    global _library
    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")
        for schema in _TORCHVISION_SCHEMAS:
            _library.define(schema)
        import torchvision  # noqa: F401


def list_models_once() -> None:
    """Patch Transformers so that it reads the source files of all models only once.

    `transformers` and `transformers.models` both read some 1,600 files, which takes a tenth of a
    process's start. The list is cached by path, but the first one passes the folder, and the second
    one the `__init__.py` in it. Here both pass the folder. Remove this when Transformers does so.
    """
    from transformers.utils import import_utils  # after torchvision was made importable

    create_list = getattr(import_utils, "create_import_structure_from_path", None)
    if create_list is None:  # in another version of Transformers
        return

    def create_list_of_folder(path: str | os.PathLike[str]) -> Any:
        return create_list(Path(path).parent if os.path.isfile(path) else path)

    import_utils.create_import_structure_from_path = create_list_of_folder


ensure_torchvision()  # before anything imports Transformers' processors
list_models_once()  # before anything imports `transformers.models`
