"""How people ask: many wordings of one question, in both spellings, typed carefully or not."""

from __future__ import annotations

import random as randomness

_POLITE_STARTS = (
    "Please tell me: ",
    "Can you tell me: ",
    "Hey, ",
    "Quick question: ",
    "Please, ",
    "Tell me, ",
)
_POLITE_ENDS = (" Please.", " Thanks.", " Please answer.", " Be brief.")
_SPELLINGS = (("color", "colour"), ("center", "centre"), ("gray", "grey"))


class Phrases:
    """The wordings of one kind of question, with fields to be filled in."""

    def __init__(self, *templates: str) -> None:
        self.templates = templates

    def ask(self, random: randomness.Random, **fields: str) -> str:
        """One of them, as somebody would type it."""
        template = self.templates[int(random.random() * len(self.templates))]
        text = template.format(**fields) if fields else template
        return vary(random, text)


def vary(random: randomness.Random, text: str) -> str:
    """Now and then in lower case, British, polite, or without its last mark."""
    for american, british in _SPELLINGS:
        if american in text and random.random() < 0.4:
            text = text.replace(american, british)
    chance = random.random()
    if chance < 0.6:
        return text
    if chance < 0.72:
        return text[0].lower() + text[1:]
    if chance < 0.8:
        return text.rstrip("?.")
    if chance < 0.9:
        return text[0].lower() + text[1:].rstrip("?.")
    if chance < 0.96:
        start = _POLITE_STARTS[int(random.random() * len(_POLITE_STARTS))]
        return start + text[0].lower() + text[1:]
    return text + _POLITE_ENDS[int(random.random() * len(_POLITE_ENDS))]
