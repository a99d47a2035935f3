"""The measurement of load clients: finds out what they cost, and is not fooled by one that does less than it was told."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.errors import HarnessError, Untestable
from fixtures.pytest_support.skips import skip_untestable
from suite.bench.client_ceiling import main, measure
from suite.bench.load_clients import CLIENTS, OURS, Job, LoadClient

pytestmark = [pytest.mark.selftest, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(60)]

_ASK = """
import json, sys, threading, time, urllib.request
url, requests, tokens, burn_s, late_s, start_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:])
def ask():
    body = json.dumps({"prompt": [1], "max_tokens": tokens, "stream": True}).encode()
    for line in urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body)):
        end = time.thread_time() + burn_s
        while line.strip() and time.thread_time() < end:
            pass
while time.process_time() < start_s:
    pass
threads = [threading.Thread(target=ask) for _ in range(requests)]
[t.start() for t in threads]
[t.join() for t in threads]
time.sleep(late_s * (tokens > 2))  # why: this client is late on purpose
"""
"""A client that takes a known processor time to start and for each line, and a known time to end."""


def client(burn_s: float = 0.0, late_s: float = 0.0, start_s: float = 0.0, tokens: int | None = None) -> LoadClient:
    def command(job: Job) -> list[str]:
        words = job.url, job.requests, job.output_tokens if tokens is None else tokens, burn_s, late_s, start_s
        return ["-c", _ASK, *map(str, words)]

    return LoadClient(command, ("pytest",), "")


def test_the_cost_of_a_token_is_found() -> None:
    found = measure({"slow": client(0.005, start_s=0.3)}, [80], streams=4, seconds=1)
    (rung,) = found.rungs
    assert rung.tokens == 80
    assert 4_000 < rung.cost_us < 8_000  # the system counts in ticks of 10 ms
    assert rung.busy == pytest.approx(rung.cost_us * 80 / 1e6)
    assert rung.ceiling_tokens_per_s == pytest.approx(1e6 / rung.cost_us)
    assert rung.streams == 4
    assert rung.kept_up


@pytest.mark.parametrize(("planted", "why"), [(client(0.015), "busy"), (client(0.004, 1.1), "behind_s")])
def test_a_client_that_does_not_keep_up_is_found_out(planted: LoadClient, why: str) -> None:
    found = measure({"planted": planted}, [80, 160], streams=4, seconds=0.5)
    assert len(found.rungs) == 1, "it is taken no further"
    assert not found.rungs[0].kept_up
    assert getattr(found.rungs[0], why) > 0.9


def test_a_client_that_does_less_than_it_was_told_is_not_measured() -> None:
    found = measure({"lazy": client(tokens=3)}, [80], streams=4, seconds=0.2)
    assert found.rungs == ()
    assert "it was to take 16 tokens and took 12" in found.missing["lazy"]


def test_a_cost_that_is_lost_in_the_start_up_is_not_told() -> None:
    found = measure({"cheap": client(start_s=0.5)}, [80], streams=4, seconds=0.2)
    assert found.rungs == ()
    assert "too little to tell one from the other, give more --seconds" in found.missing["cheap"]


def test_a_client_that_fails_or_is_not_there_is_named() -> None:
    broken = LoadClient(lambda job: ["-c", "raise SystemExit('no luck')"], ("pytest",), "")
    absent = LoadClient(lambda job: [], ("no-such-distribution",), "install it")
    found = measure({"broken": broken, "absent": absent}, [80], streams=1, seconds=1)
    assert found.missing == {
        "broken": "at 80 tokens/s: ended with 1: no luck",
        "absent": "at 80 tokens/s: not installed; install it",
    }
    with pytest.raises(HarnessError, match="/no/python: No such file"):
        replace(absent, python="/no/python").version()


def test_our_client_is_measured_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("httptools") is None:
        skip_untestable(str(Untestable("httptools", "the package cannot be imported", "install the extra bench")))
    file = tmp_path / "ceiling.json"
    assert main(["--clients", OURS, "--streams", "100", "--rates", "8000", "--seconds", "1", "--json", str(file)]) == 0
    assert f"{OURS} " in capsys.readouterr().out
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["rungs"][0]["tokens"] == 8000
    assert written["rungs"][0]["kept_up"]
    assert written["python"] == sys.version.split()[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--clients", "wget"], "--clients wget: there are kvgates"),
        (["--rates", "fast"], "--rates fast: give numbers"),
        (["--streams", "0"], "0 is below 1"),
    ],
)
def test_bad_usage_ends_with_4_and_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 4
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_every_client_is_told_the_same(tmp_path: Path) -> None:
    from fixtures.models import ensure_model

    job = Job("http://127.0.0.1:9", ensure_model("tiny-base"), 7, 11, tmp_path)
    for name, known in CLIENTS.items():
        words = " ".join(known.command(job))
        assert "http://127.0.0.1:9" in words, name
        assert "7" in words, name
    trace = (tmp_path / "trace-7.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(trace) == 7
    assert {json.loads(line)["output_length"] for line in trace} == {11}
