"""Makes `import torchvision` work beside a CPU build of torch.

The wheels of the package index link their compiled operators against CUDA. Without it they don't
load, and the import ends with "operator torchvision::nms does not exist". `transforms.v2`, all that
the processors need, is pure torch: with the schemas of the two operators declared, the import
succeeds. Goes when a CPU wheel exists for every platform.
"""

from __future__ import annotations

import sys

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # the declarations live as long as this object


def ensure_torchvision() -> None:
    """Import torchvision, with the operators declared if it fails without. Absent is fine: not
    every model needs it.
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
        for schema in _SCHEMAS:
            _library.define(schema)
        import torchvision  # noqa: F401
