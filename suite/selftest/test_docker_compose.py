"""Compose files and the health check they use: nothing beyond loopback, nobody privileged, and health is a real completion."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from containers import health
from fixtures.errors import Untestable

pytestmark = pytest.mark.selftest

FOLDER = Path(__file__).resolve().parents[2] / "containers"
FILES = sorted(FOLDER.glob("compose*.yaml"))
STACKS = [
    pytest.param(("compose.yaml",), marks=pytest.mark.slow),  # half a second of compose each
    pytest.param(("compose.cpu.yaml",), marks=pytest.mark.slow),
    pytest.param(("compose.yaml", "compose.rdma.yaml"), marks=pytest.mark.slow),
    ("compose.cpu.yaml", "compose.ha.yaml"),
]


def complaints(text: str) -> list[str]:
    """What a compose file may not say."""
    text = re.sub(r"(?m)^ *#.*$", "", text)
    found = [word for word in ("privileged", "cap_add", "PASSWORD", "TOKEN", "/var/run/docker.sock") if word in text]
    for ports in re.findall(r"^\s*ports: *(.*)$", text, re.MULTILINE):
        published = re.findall(r'"([^"]+)"', ports)
        found += [f"ports: {one}" for one in published or [ports] if not one.startswith("127.0.0.1:")]
    for word in ("cap_drop: [ALL]", "no-new-privileges:true"):
        if text.count("image:") > text.count(word):
            found.append(f"an image without {word}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_compose_file_opens_nothing_and_asks_for_no_right(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert complaints(text) == []
    for name in re.findall(r"\./(mooncake[\w.]*json)", text):
        config = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        assert config["metadata_server"] == "P2PHANDSHAKE"
        assert config["protocol"] == ("rdma" if ".rdma." in name else "tcp")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("privileged: true", ["privileged"]),
        ('ports: ["8000:8000"]', ["ports: 8000:8000"]),
        ("ports:\n - 8000:8000", ["ports: "]),
        ("image: x\ncap_drop: [ALL]", ["an image without no-new-privileges:true"]),
    ],
)
def test_what_a_compose_file_may_not_say_is_seen(text: str, wanted: list[str]) -> None:
    assert complaints(text) == wanted


@pytest.fixture(scope="module")
def compose() -> list[str]:
    """The words that start compose here."""
    program = next((p for p in (["docker", "compose"], ["docker-compose"]) if _works(p)), None)
    if program is None:
        raise Untestable("docker-compose", "neither docker compose nor docker-compose runs", "install docker-compose")
    return program


def config(compose: list[str], *files: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = [word for name in files for word in ("-f", str(FOLDER / name))]
    whole = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "RDMA_HOST_IP": "10.0.0.1", **env}
    return subprocess.run([*compose, *given, "config"], capture_output=True, text=True, check=False, env=whole)


@pytest.mark.parametrize("files", STACKS, ids=lambda files: "+".join(files))
def test_compose_understands_them(files: tuple[str, ...], compose: list[str]) -> None:
    done = config(compose, *files, MODEL_DIR="/tmp")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_model_has_to_be_named(compose: list[str]) -> None:
    refused = config(compose, "compose.cpu.yaml")
    assert refused.returncode != 0
    assert "MODEL_DIR has to name the folder of the model" in refused.stderr


def _works(program: list[str]) -> bool:
    if shutil.which(program[0]) is None:
        return False
    if len(program) == 1:
        return True  # a program of its own, and a dear one to ask
    return subprocess.run([*program, "version"], capture_output=True, check=False).returncode == 0


# Health -------------------------------------------------------------------------------------------------------------
class Server(ThreadingHTTPServer):
    """An engine or a master, as far as its health check asks: what it answers, and what it was asked."""

    answers: dict[str, Any]
    asked: list[Any]


class Answer(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.server.asked.append(json.loads(self.rfile.read(size)) if size else self.path)
        found = self.server.answers.get(self.path)
        self.send_response(200 if found is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    do_GET = do_POST = _answer  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Answer)
    made.asked = []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def well(kind: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("sys.argv", ["health.py", kind, f"http://127.0.0.1:{server.server_port}"])
    return health.main() == 0


MODELS = {"data": [{"id": "model"}]}


@pytest.mark.parametrize(
    ("completions", "wanted"),
    [
        ({"usage": {"completion_tokens": 1}}, True),
        ({"usage": {"completion_tokens": 0}}, False),
        ({}, False),
        (None, False),
    ],
)
def test_an_engine_is_well_when_it_completes(
    completions: Any, wanted: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = {"/v1/models": MODELS, "/v1/completions": completions, "/health": {}}
    assert well("engine", server, monkeypatch) is wanted
    assert server.asked[-1] == {"model": "model", "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        ({"role": "leader", "service_ready": True}, True),
        ({"role": "leader", "service_ready": False}, False),
        ({"role": "standby", "service_ready": False}, True),
        ({}, False),
        ("serving", False),
        (None, False),
    ],
)
def test_a_master_is_well_when_it_serves_or_stands_by(
    status: Any, wanted: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = {"/health": status}
    assert well("master", server, monkeypatch) is wanted
