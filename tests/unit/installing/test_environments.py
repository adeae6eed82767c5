"""What is said of an environment is read from it, and a wrong answer of a server is an error.

The server is a stand-in here: `make test-install` asks the real one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest

from installing.environments import measure_size, read_versions
from installing.server_check import QUESTIONS, InstallError, check_server
from sensorium.embedded.samples import MEDIA_FOLDER

pytestmark = pytest.mark.processes

# Gives the configured answers in turn, then waits to be stopped.
STAND_IN = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

answers = sys.argv[1:]

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        answer = answers.pop(0)
        status = 400 if answer == "refuse" else 200
        body = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = HTTPServer(("127.0.0.1", 0), Handler)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(f"Sensorium is ready: http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""
RIGHT = [question.answer for question in QUESTIONS]


def check(folder: Path, *answers: str) -> dict[str, str]:
    command = [sys.executable, "-c", STAND_IN, *answers]
    return check_server(command, MEDIA_FOLDER, folder)


def test_right_answers_about_all_kinds_of_media_pass(tmp_path: Path) -> None:
    assert check(tmp_path, *RIGHT).keys() == {"picture", "sound", "video"}


def test_a_wrong_answer_and_a_refusal_are_named(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"the answer about the sound is 'Wrong\.'"):
        check(tmp_path, RIGHT[0], "Wrong.", RIGHT[2])
    with pytest.raises(InstallError, match="the video was answered with 400"):
        check(tmp_path, RIGHT[0], RIGHT[1], "refuse")


def test_a_server_that_does_not_start_is_an_error_with_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no module named so')"]
    with pytest.raises(InstallError, match="no module named so"):
        check_server(command, MEDIA_FOLDER, tmp_path)


def test_versions_are_those_of_the_environment() -> None:
    assert read_versions(Path(sys.executable))["numpy"] == numpy.__version__


def test_a_file_with_two_names_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(1_000_000))
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert 0.0009 < measure_size(tmp_path) < 0.0012
