"""What SmolLM2 is asked, and what Transformers' `generate` says to it. No engine here."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from sensorium.models import ensure_torchvision

ensure_torchvision()

import transformers as tf  # noqa: E402  (after the shim)

MAX_TOKENS = 24
# Questions, and a word of the answer if even so small a model has to answer it.
QUESTIONS: dict[str, str | None] = {
    "What is the capital of France?": "Paris",
    "What is 2+2?": "4",
    "What is the opposite of hot?": "cold",
    "Write a short poem about the sea.": None,
    "Explain in one sentence why the sky is blue.": None,
    "Translate to German: Good morning, my friend!": None,
    "Give me a Python function that adds two numbers.": "def ",
    "¿Qué hora es? 🕐 Answer in Spanish.": None,
}
CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "is_in_europe": {"type": "boolean"},
    },
    "required": ["city", "country", "is_in_europe"],
    "additionalProperties": False,
}
CITY_QUESTION = (
    "Paris is the capital of France, in Europe. Write this as JSON with the keys city, country "
    "and is_in_europe."
)


def ask(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def make_long_question() -> str:
    """More than 2,000 tokens. So small a model finds only what stands near the end."""
    lines = [f"Locker {number} holds {number * 37 % 91} marbles." for number in range(1, 181)]
    return " ".join([*lines, "The secret word is pineapple.", "What is the secret word?"])


class Oracle:
    """The same checkpoint in plain Transformers."""

    def __init__(self, directory: str) -> None:
        self.tokenizer = tf.AutoTokenizer.from_pretrained(directory)
        self.model = tf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def render(self, question: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            ask(question), add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    @torch.inference_mode()
    def answer(self, question: str, max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
        """Greedy, alone; the end of the answer is part of it."""
        ids = torch.tensor([self.render(question)])
        found = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
        return tuple(found[0, ids.shape[1] :].tolist())

    def read(self, token_ids: tuple[int, ...]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


@cache
def get_oracle(directory: str) -> Oracle:
    return Oracle(directory)
