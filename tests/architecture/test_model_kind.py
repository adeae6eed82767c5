"""What a model is, is decided once, in `models.families`, and then asked of its kind.

Code that tests the type of a model, a processor or a runner would have to be found and changed for
each new kind of model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "src" / "sensorium"
# Classes that stand for a kind of model, and functions that decide which one it is.
KINDS = frozenset(
    {"EncoderDecoderModel", "CtcTransducerModel", "StreamingModel"}
    | {"AudioProcessor", "CtcTransducerProcessor", "StreamingAudioProcessor"}
    | {"CtcTransducerRunner", "StreamingRunner", "StreamedModel"}
)
DECISIONS = frozenset({"is_ctc_transducer", "is_encoder_decoder"})
# File -> why it asks for a type. The list may only become shorter.
REASONS = {
    "engine/assembly/builder.py": "chooses the runner of a model",
    "engine/core_process/engine_core.py": "only one runner takes streaming audio",
    "engine/speech/models.py": "reads the speech model of each kind",
    "multimodal/processing/processor.py": "gives `streaming_audio` its type",
    "scale/ingress.py": "chooses how live sessions are transcribed",
    "server/processes/frontend_app.py": "chooses how live sessions are transcribed",
}
DECIDED_IN = {"models/families.py", "models/ctc_transducer.py"}


def find_questions(source: str) -> Iterator[str]:
    """Yield the classes and functions by which code finds out what kind of model it has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in {"isinstance", "issubclass"}:
                names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                yield from names & KINDS
            elif node.func.id in DECISIONS:
                yield node.func.id
        elif isinstance(node, ast.Attribute) and node.attr in DECISIONS:
            yield node.attr


def test_kinds_of_models_are_asked_of_one_value() -> None:
    asking = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(find_questions(path.read_text()))
    }
    # The core's limit of this name goes when layers have kinds of state.
    core = {name for name in asking if name.startswith("core/")}
    assert asking - core - DECIDED_IN == set(REASONS)


def test_questions_are_found() -> None:
    assert list(find_questions("isinstance(model, int | StreamingModel)")) == ["StreamingModel"]
    assert list(find_questions("x = config.is_encoder_decoder")) == ["is_encoder_decoder"]
    assert list(find_questions("is_ctc_transducer(config)")) == ["is_ctc_transducer"]
    assert not list(find_questions("kind.decoder == 'cross' and isinstance(model, HfModel)"))
