"""Help for the towers while they are trained: what they see is also asked of each token.

An answer of two words says little about sixty-four tokens. What stands in each of them is known, so
the vision tower is asked for it directly, token by token, and the language model's first layers for
the row and column. Later layers are asked where a thing is that a question names, and by each thing
how many like it there were before. These heads are left out of the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from training.landmarks import MAX_COUNT, NUM_VALUES

MAX_SIDE = 16  # rows or columns of tokens
_NOTHING, _NO_LETTER = 0.1, 0.03  # what an empty place counts for
_FILE = "guides.safetensors"


class Guides(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.landmarks = nn.Linear(size, sum(NUM_VALUES))
        self.places = nn.Linear(size, 2 * MAX_SIDE)
        self.mentions = nn.Linear(size, 2 * MAX_SIDE)
        self.counts = nn.Linear(size, 4 * (1 + MAX_COUNT))
        for head in (self.landmarks, self.places, self.mentions, self.counts):
            nn.init.normal_(head.weight, 0.0, 0.02)
            nn.init.zeros_(head.bias)

    def judge_landmarks(self, seen: Tensor, landmarks: Tensor) -> Tensor:
        """How badly features [B, N, size] tell what stands in each token [B, N, 11]."""
        seen = F.rms_norm(seen.float(), (seen.shape[-1],))
        parts = self.landmarks(seen).float().split(NUM_VALUES, -1)
        things, colours, middles, *letters = parts
        wanted = [landmarks[..., n] for n in range(3)]
        total = _judge(torch.stack(letters, 2), landmarks[..., 3:], _NO_LETTER)
        for part, values in zip((things, colours, middles), wanted, strict=True):
            total = total + _judge(part, values, _NOTHING)
        return total

    def judge_places(self, early: Tensor, grid: tuple[int, int]) -> Tensor:
        """How badly hidden states [B, N, size] tell the row and column of each token."""
        rows, columns = grid
        numbers = torch.arange(rows * columns, device=early.device)
        wanted = torch.stack((numbers // columns, numbers % columns), -1)
        return _ask(self.places, early, wanted.expand(len(early), -1, -1))

    def judge_mentions(self, later: Tensor, mentioned: Tensor) -> Tensor:
        """How badly hidden states [M, size] of names tell the row and column of what they name."""
        return _ask(self.mentions, later, mentioned)

    def judge_counts(self, later: Tensor, counts: Tensor) -> Tensor:
        """How badly hidden states [B, N, size] tell the counts [B, N, 4], where there are any."""
        return _ask(self.counts, later, counts, ignored=0)

    def save(self, folder: Path) -> None:
        state = {name: tensor.half().cpu() for name, tensor in self.state_dict().items()}
        save_file(state, folder / _FILE)

    def restore(self, folder: Path) -> None:
        """Load the heads that were saved next to the weights."""
        self.load_state_dict(load_file(folder / _FILE))


def _ask(head: nn.Linear, hidden: Tensor, wanted: Tensor, *, ignored: int = -100) -> Tensor:
    """Return the mean loss of a head that gives several answers of equal size."""
    found = head(F.rms_norm(hidden.float(), (hidden.shape[-1],))).float()
    found = found.unflatten(-1, (wanted.shape[-1], -1)).flatten(0, -2)
    return F.cross_entropy(found, wanted.flatten(), ignore_index=ignored)


def _judge(found: Tensor, wanted: Tensor, weight_of_nothing: float) -> Tensor:
    losses = F.cross_entropy(found.flatten(0, -2), wanted.flatten(), reduction="none")
    weights = torch.where(wanted.flatten() > 0, 1.0, weight_of_nothing)
    return (losses * weights).sum() / weights.sum()
