"""Health check of a container: an engine has to complete a request, a master has to serve. A port that is open proves nothing.

``python kvgates-health.py engine URL`` or ``master URL``; exit status 0 when it is well, else 1 and one line.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

DEADLINE_S = 15.0
"""An engine that is well answers in a fraction of a second; one that compiles its first kernels is not healthy yet."""

PROMPT = [1, 2, 3]
"""Token ids: a model without a tokenizer can complete them too."""


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """Ask for JSON (POST where there is a body)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.loads(answer.read())


def engine(url: str) -> str:
    """Complete one token. Returns a complaint, or ""."""
    model = ask(f"{url}/v1/models")["data"][0]["id"]
    answer = ask(f"{url}/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0})
    return "" if answer["usage"]["completion_tokens"] == 1 else f"no token came: {answer}"


def master(url: str) -> str:
    """Serve, or stand by for the one that does. Returns a complaint, or ""."""
    said = ask(f"{url}/health")
    return "" if said["service_ready"] is True or said["role"] == "standby" else f"it says {said}"


def main() -> int:
    kind, url = sys.argv[1:]
    try:
        complaint = {"engine": engine, "master": master}[kind](url)
    except (urllib.error.URLError, OSError, ValueError, KeyError, IndexError, TypeError) as exc:
        complaint = f"{type(exc).__name__}: {exc}"
    if complaint:
        sys.stderr.write(f"{kind} {url}: {complaint}\n")
    return 1 if complaint else 0


if __name__ == "__main__":
    sys.exit(main())
