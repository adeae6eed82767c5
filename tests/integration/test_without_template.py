"""A server of a model that has no chat template: what it says to its clients and in its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.server import serve


def test_conversations_are_refused_clearly_and_the_log_has_no_traceback(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    for path in Path(tiny_model("llava")).iterdir():
        if "chat_template" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with serve(str(tmp_path)) as server:
        answer = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
        )
        assert answer.status_code == 400
        assert "has no chat template, so it takes prompts" in answer.json()["error"]["message"]
        prompt = {"prompt": "hi", "max_tokens": 1}
        assert server.post("/v1/completions", prompt).status_code == 200
    assert "so conversations may be refused: this model has no chat template" in server.output
    assert "Traceback" not in server.output
