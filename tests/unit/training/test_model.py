"""The forward pass of training, its positions and its conversations equal the stock model's."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from sensorium.models import ensure_torchvision
from training.architecture import make_config, make_processor
from training.conversations import IGNORED, Layout, Writer, pad
from training.model import Thinker
from training.optimizer import orthogonalize
from training.positions import make_positions
from training.samples import Canvas, Sample, Sprite, Turn
from training.scoring import count_word_errors, interval, is_right
from training.tokenizer import train_tokenizer
from training.weights import initialize, make_stock

QUESTION = "What color is the circle?"
TEXTS = [f"{QUESTION} A red circle. Top left. Yes."] * 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = train_tokenizer(TEXTS)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return tokenizer, folder


@pytest.fixture(scope="module")
def models(tokenizer: Any) -> tuple[Thinker, Any]:
    """The same small weights in the trainer's model and in the stock one."""
    ensure_torchvision()
    config = make_config(tokenizer[0])
    vision, text, audio = config.vision_config, config.text_config, config.audio_config
    vision.depth, vision.hidden_size, vision.intermediate_size = 2, 64, 96
    vision.num_heads, vision.out_hidden_size = 2, 64
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 64, 96, 2
    text.num_attention_heads, text.num_key_value_heads = 2, 1
    text.layer_types = text.layer_types[:2]
    text.rope_parameters["mrope_section"] = [1] * 16
    audio.d_model, audio.encoder_layers, audio.encoder_ffn_dim = 32, 1, 64
    audio.encoder_attention_heads, audio.output_dim = 2, 64
    model = Thinker(config)
    initialize(model, 0, 0)
    with torch.no_grad():  # not zero, as at the beginning
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval(), make_stock(model, config)


@pytest.mark.parametrize("is_text_first", [False, True])
def test_logits_are_those_of_the_stock_model(
    tokenizer: Any, models: tuple[Thinker, Any], is_text_first: bool
) -> None:
    model, stock = models
    processor = make_processor(tokenizer[0])
    random = np.random.default_rng(0)
    media = {
        "images": [random.integers(0, 255, (168, 224, 3), dtype=np.uint8)],
        "audio": [random.normal(size=16_000).astype(np.float32) * 0.1],
        "videos": [random.integers(0, 255, (4, 100, 130, 3), dtype=np.uint8)],
    }
    parts = [{"type": kind} for kind in ("image", "audio", "video")]
    words = {"type": "text", "text": QUESTION}
    content = [words, *parts] if is_text_first else [*parts, words]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(text=text, return_tensors="pt", **media)
    tokens = inputs["input_ids"]
    frames = int(inputs["feature_attention_mask"].sum())
    picture, video = inputs["image_grid_thw"][0].tolist(), inputs["video_grid_thw"][0].tolist()
    with torch.no_grad():
        expected = stock(**inputs).logits[0]
        seen = model.model.visual(inputs["pixel_values"][None], *picture[1:])
        steps = inputs["pixel_values_videos"].view(video[0], -1, 1176)
        watched = model.model.visual(steps, *video[1:])
        audio = model.model.audio_tower(inputs["input_features"][:, :, :frames])
        features = {"<|IMAGE|>": seen, "<|VIDEO|>": watched, "<|AUDIO|>": audio}
        places = [
            (torch.nonzero(tokens.flatten() == tokenizer[0].convert_tokens_to_ids(name))[:, 0], x)
            for name, x in features.items()
        ]
        segments = _find_segments(tokens[0].tolist(), tokenizer[0], picture, video)
        positions = torch.from_numpy(make_positions(segments, tokens.shape[1]))[:, None]
        logits = model.logits(model(tokens, positions, places)[0])
    assert torch.allclose(logits, expected, atol=2e-4 * float(expected.abs().max()))
    wrong = positions.clone()
    wrong[2] = wrong[1]  # the columns where the rows are: a comparison that sees this sees anything
    with torch.no_grad():
        others = model.logits(model(tokens, wrong, places)[0])
    assert not torch.allclose(others, expected, atol=1e-2)


def _find_segments(
    tokens: list[int], tokenizer: Any, picture: list[int], video: list[int]
) -> list[Any]:
    grids = {
        tokenizer.convert_tokens_to_ids(name): (grid[0], grid[1] // 2, grid[2] // 2)
        for name, grid in (("<|IMAGE|>", picture), ("<|VIDEO|>", video))
    }
    segments: list[Any] = []
    at = 0
    while at < len(tokens):
        grid = grids.get(tokens[at])
        segments.append(1 if grid is None else grid)
        at += 1 if grid is None else grid[0] * grid[1] * grid[2]
    return segments


def test_a_conversation_is_the_chat_templates(tokenizer: Any) -> None:
    writer = Writer(tokenizer[1])
    turns = [Turn(QUESTION, "Red."), Turn("Where is it?", "Top left.")]
    circle = Sprite("shape", 0, 30.0, 60.0, 20.0, 20.0)
    sample = Sample("x", turns, picture=Canvas(sprites=[circle]))
    random = Random(1)  # neither a system prompt nor the question first
    encoded = writer.write(sample, Layout(picture=(1, 2, 3)), random)
    processor = make_processor(tokenizer[0])
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "Top left."},
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    text = text.replace("<|IMAGE|>", "<|IMAGE|>" * 6).removesuffix("\n")
    assert encoded.tokens == tokenizer[0](text).input_ids
    answers = [token for token in encoded.labels if token != IGNORED]
    assert tokenizer[0].decode(answers) == "Red.<|im_end|>Top left.<|im_end|>"
    batch = pad([encoded], writer)
    flat = batch["tokens"].reshape(-1)
    assert (flat[batch["answer_at"] + 1] == batch["labels"]).all()
    assert batch["turns"].tolist() == sorted(batch["turns"].tolist())
    assert len(batch["rows"]) == 2
    assert len(batch["picture_at"]) == 6
    assert tokenizer[0].decode(flat[batch["mention_at"]]) == " circle"
    assert batch["mentioned"].tolist() == [[2, 1]]


@pytest.mark.parametrize("text", ["hello", "HELLO", "4071", "$12.50"])
def test_text_to_be_read_is_tokenised_by_character(tokenizer: Any, text: str) -> None:
    assert len(tokenizer[0](text).input_ids) == len(text)


def test_words_of_questions_are_single_tokens(tokenizer: Any) -> None:
    assert tokenizer[0].tokenize(QUESTION) == ["What", "Ġcolor", "Ġis", "Ġthe", "Ġcircle", "?"]


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    for some in (matrices, matrices.transpose(1, 2)):
        values = torch.linalg.svdvals(orthogonalize(some))
        assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_answers_are_scored() -> None:
    assert is_right(" top  left", "Top left.")
    assert not is_right("hello", "HELLO", is_text=True)
    assert count_word_errors("go forward ten ten", "go forward ten meters") == (1, 4)
    assert count_word_errors("", "one two") == (2, 2)
    low, high = interval(95, 100)
    assert 0.88 < low < 0.95 < high < 0.98


def test_the_checkpoint_is_a_stock_one(
    tokenizer: Any, models: tuple[Thinker, Any], tmp_path: Path
) -> None:
    from training.architecture import save_stock

    save_stock(tmp_path, models[1], tokenizer[0])
    loaded = tf.AutoModelForMultimodalLM.from_pretrained(tmp_path)
    assert type(loaded) is tf.Qwen2_5OmniThinkerForConditionalGeneration
    assert loaded.generation_config.eos_token_id == tokenizer[0].eos_token_id
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
