"""Runs the models of Transformers: loading, the generic adapter, and code for single families.

No model is reimplemented here. Importing this package makes `import torchvision` work beside a CPU
build of torch, which Transformers' processors need. So it has to be imported before them.
"""

from __future__ import annotations

import sys

import torch

_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # the declarations live as long as this object


def ensure_torchvision() -> None:
    """Import torchvision, and declare its operators if the import fails without them.

    The wheels on the package index link their compiled operators against CUDA. Without CUDA these
    don't load, and the import fails with "operator torchvision::nms does not exist". The processors
    need only `transforms.v2`, which is pure torch. If the schemas of two operators are declared
    first, the import succeeds. This can be removed when there is a CPU wheel for every platform.
    torchvision need not be installed: not every model needs it.
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


ensure_torchvision()
