"""Reproductions: portable, complete, and really runnable, against a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from reports import records as r
from reports import reproduce
from reports.evidence import EvidenceWriter, load_run
from reports.history import History
from reports.repro_shell import Paths, here_document, quote
from suite.selftest.report_samples import Code, Out, observation, private_run, stack_up, verdict

pytestmark = pytest.mark.selftest

SERVER = """
import http.server, json, os, sys, threading
threading.Timer(60, os._exit, [1]).start()
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def answer(self, data):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(data).encode())
    def do_GET(self): self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        print(json.dumps({"path": self.path, "body": body, "note": os.environ.get("NOTE")}), flush=True)
        tokens = [7, 8] if body.get("cache_salt") else [9]
        self.answer({"choices": [{"token_ids": tokens}], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}})
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
"""Stands in for vLLM, which takes half a minute to start: what is tested here is the script, not the engine."""


def case_history(up: r.StackUp, *records: r.Record) -> History:
    started = r.CaseStarted(case_id="D.x.a", gate="D.x", gate_version=1, claim="c", stack_id="s1", t_s=1.0)
    return History([up, started, *records, r.CaseFinished(case_id="D.x.a", t_s=99.0)]).for_case("D.x.a")


def failed(**fields: str) -> r.Verdict:
    fields = {"got": '500 `x` $HOME "q"', "wanted": "200", "production": "invisible"} | fields
    return verdict("D.x.a", Out.FAIL, Code.FAILED_REQUEST, **fields)


def fault(name: str, t_s: float, action: str = "inject", target: str = "e0") -> r.FaultRecord:
    return r.FaultRecord(fault_id=name, fault=name, target=target, action=action, landed=True, t_s=t_s)  # type: ignore[arg-type]


def script_of(tmp_path: Path, history: History, **fields: str) -> str:
    folder = tmp_path / reproduce.write(tmp_path, history, failed(**fields))
    done = subprocess.run(["bash", "-n", str(folder / "run.sh")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return (folder / "run.sh").read_text()


def test_command_lines_are_portable(tmp_path: Path) -> None:
    config = tmp_path / "stacks" / "s1" / "e0" / "mooncake.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"master_server_address": "127.0.0.1:19000", "path": "/home/joe/x"}')
    text = script_of(tmp_path, case_history(stack_up(tmp_path), observation(2, "D.x.a")))
    assert '"$PYTHON" -m vllm.entrypoints.openai.api_server --model "${MODEL_0}"' in text
    assert '"${SITE}/mooncake/mooncake_master" --rpc_port=19000' in text
    assert 'MOONCAKE_CONFIG_PATH="${WORK}/stacks/s1/e0/mooncake.json"' in text
    assert 'TMPDIR="${SHORT}/kv-e0"' in text
    assert '{"master_server_address": "127.0.0.1:19000", "path": "${OTHER_' in text
    assert '\\"path\\": \\"${OTHER_' in text
    assert ': "${MODEL_0:?' in text
    assert text.index("start_master\n") < text.index("start_e0\n")
    assert "PATH=" not in text.replace("MOONCAKE_CONFIG_PATH=", "")
    assert not re.search(r"/home|Tr0ub4dor", text)
    assert "kvgates" not in text + (tmp_path / "repro" / "D.x.a" / "README.md").read_text()


def test_requests_and_faults_keep_their_order(tmp_path: Path) -> None:
    records = [
        observation(2, "D.x.a", role="save"),
        observation(20, "D.x.a", role="later", sent_s=20.0, done_s=20.5),
        observation(10, "D.x.a", role="victim", sent_s=10.0, done_s=14.0),
        observation(11, "D.x.a", role="bystander", sent_s=11.0, done_s=11.5),
        fault("freeze", 9.0),
        fault("freeze", 15.0, "heal"),
        fault("partition", 16.0),
        r.WaitRecord(what="visible:r2", t_s=2.2, elapsed_s=1.0, bound_s=30.0, came_true=True),
        r.Fact(name="reset-local", t_s=8.9, value={"engine": "e0", "http_status": 200}),
    ]
    text = script_of(tmp_path, case_history(stack_up(tmp_path), *records))
    played = [line for line in text[text.index("\nwarm_up ") :].splitlines()[2:] if line]
    assert [re.sub(r' "\$URL.*| #.*', "", line) for line in played[:-2]] == [
        "ask 0",
        "ASKED+=($!)",
        "finished",
        "saved http://127.0.0.1:19001",
        "sleep 5.7",
        "curl -s --noproxy '*' -X POST",
        "signal_unit STOP e0",
        "ask 1",
        "ASKED+=($!)",
        "ask 2",
        "ASKED+=($!)",
        "finished",
        "signal_unit CONT e0",
        'read -r -p "now do by hand: partition e0 (inject), then press Enter " || true',
        "sleep 4.0",
        "ask 3",
        "ASKED+=($!)",
        "finished",
    ]
    readme = (tmp_path / "repro" / "D.x.a" / "README.md").read_text()
    assert "- Visible in production? invisible" in readme
    assert "Not replayed: partition e0 (inject)" in readme


def test_prompts_hold_what_was_sent_and_what_came(tmp_path: Path) -> None:
    o = observation(2, "D.x.a", cache_salt="salt", cached_tokens=32)
    script_of(tmp_path, case_history(stack_up(tmp_path), o))
    [request] = json.loads((tmp_path / "repro" / "D.x.a" / "prompts.json").read_text())["requests"]
    assert request["body"] == {
        "model": "tiny",
        "max_tokens": 2,
        "temperature": 0.0,
        "prompt": [1, 2, 3],
        "return_token_ids": True,
        "stream": False,
        "cache_salt": "salt",
    }
    assert request["recorded"]["output_token_ids"] == [7, 8]
    assert request["recorded"]["cached_tokens"] == 32


def test_a_large_case_keeps_what_shares_blocks_with_the_finding(tmp_path: Path) -> None:
    many = [observation(i, "D.x.a", tuple(range(100 * (i % 40), 100 * (i % 40) + 50))) for i in range(400)]
    history = case_history(stack_up(tmp_path), *many)
    chosen = reproduce.selected(history, failed())  # its finding names r1
    assert [o.request_id for o in chosen] == [f"r{i}" for i in range(1, 400, 40)]
    script_of(tmp_path, history)
    assert "Left out: 390 other requests" in (tmp_path / "repro" / "D.x.a" / "README.md").read_text()


def test_a_case_without_a_stack_still_says_what_is_known(tmp_path: Path) -> None:
    started = r.CaseStarted(case_id="D.x.a", gate="D.x", gate_version=1, claim="c", t_s=1.0)
    attempt = r.StartAttempt(unit="e9", t_s=2.0, elapsed_s=90.0, bound_s=90.0, result="neither")
    script_of(tmp_path, History([started, attempt]).for_case("D.x.a"))
    readme = (tmp_path / "repro" / "D.x.a" / "README.md").read_text()
    assert "start of e9: neither after 90 s (bound 90 s)" in readme
    assert "nothing to start" in readme


def test_addresses_beyond_loopback_are_for_the_reader_to_fill_in(tmp_path: Path) -> None:
    up = stack_up(tmp_path, url="http://build-box-17.example.org:8000")
    text = script_of(tmp_path, case_history(up, observation(2, "D.x.a")))
    assert ': "${URL_e0:?address of engine e0}"' in text
    assert "build-box" not in text


@pytest.mark.parametrize(
    "word", ["/home/joe/a", "x=/home/joe/a", "/usr/lib:/home/joe/a", "file:///home/joe/a", "-I/home/joe/a"]
)
def test_a_path_is_found_wherever_it_stands(word: str) -> None:
    assert quote(Paths([], []).portable(word)) == f'"{word.replace("/home/joe/a", "${OTHER_0}")}"'


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1/completions", "http://box/v1", "a/b/c", "1/2"])
def test_what_is_no_path_stays(url: str) -> None:
    assert quote(Paths([], []).portable(url)) == url


@pytest.mark.parametrize("case_id", ["../../etc/x", "a/b", "a b", "..", "P.boundary.k3+1"])
def test_folder_names_stay_inside_and_differ(case_id: str) -> None:
    name = reproduce.folder_name(case_id)
    assert "/" not in name
    assert name not in (".", "..")
    assert name == case_id or "%" in name


def test_quoting_survives_the_shell() -> None:
    wild = "a \"b\" 'c' `id` $HOME \\ ! * {x}\nnext"
    paths = Paths(["/runs/r1"], ["/models/tiny"])
    word = quote(paths.portable(wild + " /models/tiny"))
    env = {"MODEL_0": "M", "PATH": os.environ["PATH"]}
    out = subprocess.run(
        ["bash", "-c", f"printf %s {word}"], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert out == wild + " M"
    document = f"cat <<X\n{here_document(paths.portable(wild + ' /models/tiny'))}\nX"
    out = subprocess.run(["bash", "-c", document], env=env, capture_output=True, text=True, check=True).stdout
    assert out == wild + " M\n"


def test_only_failures_get_a_reproduction_and_each_only_once(tmp_path: Path) -> None:
    from reports.scoreboard import build

    private_run(tmp_path)
    run = load_run(tmp_path)
    raw = run.history.of(r.Verdict)[0]
    board = reproduce.write_missing(build([raw, verdict("D.x.b", Out.PASS)]), run, tmp_path)
    assert [row.verdict.reproduction for row in board.rows] == ["repro/D.x.a", ""]
    marker = tmp_path / "repro" / "D.x.a" / "README.md"
    marker.write_text("kept")
    assert reproduce.write_missing(board, run, tmp_path) == board
    assert marker.read_text() == "kept"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def test_the_script_runs_and_leaves_nothing(tmp_path: Path) -> None:
    """Starts the unit, sends the requests as recorded, freezes the unit, compares, stops; no process is left."""
    port = free_port()
    run_dir, model = tmp_path / "run", tmp_path / "a model" / "x"
    model.mkdir(parents=True)
    (model / "server.py").write_text(SERVER)
    recorded_model = "/home/joe/secret-project/models/tiny"
    up = stack_up(
        run_dir,
        argv=("/usr/bin/python3", f"{recorded_model}/server.py", "--port", str(port)),
        env={"NOTE": "a 'b' $c", "MOONCAKE_CONFIG_PATH": ""},
        url=f"http://127.0.0.1:{port}",
    )
    records = [
        observation(2, "D.x.a", (5, 6), role="cold"),
        observation(3, "D.x.a", (5, 6), role="external", cache_salt="s", cached_tokens=32),
        fault("freeze", 3.5),
        observation(4, "D.x.a", role="victim", deadline_s=1.0),
    ]
    with EvidenceWriter(run_dir):
        folder = run_dir / reproduce.write(run_dir, case_history(up, *records), failed())
    work = tmp_path / "work"
    work.mkdir()
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "WORK": str(work), "MODEL_0": str(model)}
    done = subprocess.run([str(folder / "run.sh")], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith("request ")]
    assert "tokens [9], recorded [7, 8]" in answers[0]
    assert "request 1 (external, e0): HTTP 200" in answers[1]
    assert "cached 32 (recorded 32); same tokens" in answers[1]
    assert "HTTP 000" in answers[2]
    assert 'got then: 500 `x` $HOME "q"' in done.stdout
    sent = [json.loads(line) for line in (work / "e0.log").read_text().splitlines() if line.startswith("{")]
    assert [s["body"]["prompt"] for s in sent] == [[5, 6, 7], [5, 6], [5, 6]]  # the first one is the warm-up
    assert {(s["path"], s["note"], s["body"]["model"]) for s in sent} == {("/v1/completions", "a 'b' $c", "tiny")}
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0
