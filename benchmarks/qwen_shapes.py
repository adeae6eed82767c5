"""Random Qwen2.5-VL models of the shapes of the 3B and the 7B one, as directories to be served.

The processor has the limits of the real ones: a picture of 1024 × 1024 is 1,369 tokens. Weights are
scaled so that answers depend on the picture. The tokenizer is learned from Python's own sources,
and tokens that it doesn't have are never the likeliest.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 151652, 151653, 151655, 151656
# Pixels of a picture, at least and at most: 4 and 16,384 tokens of 28 × 28 pixels each.
PICTURE_SIZES = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16_384 * 28 * 28}
NUM_TOKENS = 8192  # of the tokenizer
_CORPUS_CHARACTERS = 12_000_000
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder; the vision tower is the same but for its output."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    is_tied: bool
    depth: int = 32  # layers of the tower
    tower_size: int = 1280
    tower_heads: int = 16


SHAPES = {
    "3b": Shape(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        is_tied=True,
    ),
    "7b": Shape(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        is_tied=False,
    ),
    "tiny": Shape(  # to try a benchmark without a GPU
        vocab_size=151936,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        is_tied=True,
        depth=2,
        tower_size=160,
        tower_heads=2,
    ),
}


def make_config(name: str) -> Any:
    shape = SHAPES[name]
    text = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": shape.is_tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    vision = {
        "depth": shape.depth,
        "hidden_size": shape.tower_size,
        "intermediate_size": 3420 if shape.tower_size == 1280 else 2 * shape.tower_size,
        "num_heads": shape.tower_heads,
        "out_hidden_size": shape.hidden_size,
        "fullatt_block_indexes": [i for i in range(shape.depth) if i % 8 == 7] or [1],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=shape.is_tied,
    )


def make_directory(directory: Path, name: str) -> None:
    """Write a model with its tokenizer and its processor, unless it is there."""
    if (directory / "config.json").exists():
        return
    processor = make_processor()
    tokenizer = processor.tokenizer
    config = make_config(name)
    ids = tokenizer.convert_tokens_to_ids
    config.image_token_id, config.video_token_id = ids(["<|image_pad|>", "<|video_pad|>"])
    config.vision_start_token_id = ids("<|vision_start|>")
    config.vision_end_token_id = ids("<|vision_end|>")
    config.text_config.bos_token_id = ids("<|endoftext|>")
    config.text_config.eos_token_id = ids("<|im_end|>")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16
        )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                is_embedding = "embed_tokens" in parameter_name
                parameter.normal_(0, 1.0 if is_embedding else parameter[0].numel() ** -0.5)
        model.get_output_embeddings().weight[len(tokenizer) :] = 0
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = ids("<|im_end|>")
    model.generation_config.pad_token_id = ids("<|endoftext|>")
    processor.save_pretrained(directory)
    model.cpu().save_pretrained(directory, max_shard_size="4GB")


def make_processor() -> Any:
    sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
    from sensorium.models import ensure_torchvision

    ensure_torchvision()  # before the modules that look for it
    from tiny_models.building import chatml

    media = [f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")]
    return transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(size=PICTURE_SIZES),
        make_tokenizer(),
        transformers.Qwen2VLVideoProcessor(),
        chat_template=_SYSTEM + chatml(*media),
    )


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_read_sources(), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def _read_sources() -> Iterator[str]:
    num_characters = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "-packages" in str(path) or num_characters > _CORPUS_CHARACTERS:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # tests of Python itself have such files
            continue
        num_characters += len(text)
        yield text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path, help="where to put it, unless it is there")
    arguments = parser.parse_args()
    make_directory(arguments.directory, arguments.shape)


if __name__ == "__main__":
    main()
