"""Loads only the encoders of a model, without the language model that reads their outputs.

The decoder and the output layer are removed before weights are loaded, so their weights are neither
read nor kept in memory. Everything else is the model's own code with its own weights.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from sensorium.types.errors import ModelError


class NoDecoder(torch.nn.Module):
    """A stand-in for the decoder of a model that has only its encoders. It can't be run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Identity()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed_tokens

    def get_decoder(self) -> torch.nn.Module:
        return self


def make_towers_class(model_class: Any) -> Any:
    """Return a class of models like `model_class`, but with encoders only.

    Making such a model raises `ModelError` if the encoders can't be separated from the decoder.
    """

    class Towers(model_class):  # type: ignore[misc]
        def __init__(self, config: PretrainedConfig, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            _drop_decoder(self)

    # Transformers looks up how to read a checkpoint by these names.
    Towers.__name__, Towers.__qualname__ = model_class.__name__, model_class.__qualname__
    Towers.__module__ = model_class.__module__
    return Towers


def _drop_decoder(model: PreTrainedModel) -> None:
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    dropped: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if module is decoder:
            dropped[name] = NoDecoder()
        elif head is not None and module is head:
            dropped[name] = torch.nn.Identity()
    if decoder is model or decoder is model.base_model or "" in dropped:
        raise ModelError(
            f"{type(model).__name__} has no encoders that can be run without its decoder"
        )
    for name, stand_in in dropped.items():
        if not any(name.startswith(f"{outer}.") for outer in dropped):
            model.set_submodule(name, stand_in)
    # The weights of these parts stay in the files, which is no reason for a warning.
    model._keys_to_ignore_on_load_unexpected = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(rf"^{re.escape(name)}\." for name in dropped),
    }
    names = set(model.state_dict())
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if target in names and source in names
    }
