"""How models mark their reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """`is_anywhere`: it may begin in the middle of an answer; else only at its start. `is_assumed`:
    an answer begins with it even where neither prompt nor answer have opened it.
    """

    open: str
    close: str
    is_anywhere: bool = False
    is_assumed: bool = False

    def is_open_after(self, text: str) -> bool:
        """Whether an answer that follows this text begins in the middle of reasoning."""
        text = text.rstrip()
        if self.is_assumed:
            return not text.endswith(self.close)
        return text.endswith(self.open.rstrip())


REASONING = {
    "qwen3": ReasoningTags(open="<think>", close="</think>"),
    "deepseek_r1": ReasoningTags(open="<think>", close="</think>", is_assumed=True),
    "mistral": ReasoningTags(open="[THINK]", close="[/THINK]", is_anywhere=True),
    "gemma4": ReasoningTags(open="<|channel>thought\n", close="<channel|>", is_anywhere=True),
}
