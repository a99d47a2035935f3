"""A minimal reproduction of a failed case that needs vLLM, Mooncake and a file of prompts, and nothing of this project.

``repro/<case>/`` in the run holds ``README.md``, ``run.sh`` and ``prompts.json``. All of it follows from the case's
history: the stack's command lines as the kernel showed them, the requests in the order in which they were sent, and
what was done to the stack in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from reports import records as r
from reports.evidence import LoadedRun
from reports.history import History
from reports.redact import Redactor, one_line
from reports.repro_script import Script
from reports.scoreboard import Scoreboard

REQUESTS = 60
"""Most requests a reproduction replays. Beyond it, only those that share blocks with a request that a finding names."""

_UNSENT = ("stream", "stream_options", "prompt", "cache_salt")


def write(run_dir: Path, history: History, verdict: r.Verdict, redactor: Redactor | None = None) -> str:
    """Write the reproduction of one case. Returns its folder relative to the run. Raises OSError.

    history: the view of the case (``History.for_case``).
    """
    redactor = redactor or Redactor.of([History(history.before[:1])], str(run_dir))
    relative = Path("repro") / folder_name(verdict.case_id)
    folder = run_dir / relative
    folder.mkdir(parents=True, exist_ok=True)
    chosen = selected(history, verdict)
    requests = [_request(number, o, history, redactor) for number, o in enumerate(chosen)]
    script = Script(history, chosen, run_dir, redactor)
    (folder / "prompts.json").write_bytes(
        msgspec.json.format(msgspec.json.encode({"case": verdict.case_id, "requests": requests}), indent=0) + b"\n"
    )
    (folder / "run.sh").write_text(script.text(verdict), encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    omitted = len(history.observations()) - len(chosen)
    (folder / "README.md").write_text(_readme(history, verdict, script, omitted, redactor), encoding="utf-8")
    return str(relative)


def write_missing(board: Scoreboard, run: LoadedRun, run_dir: Path) -> Scoreboard:
    """Write the reproduction of every FAIL that has none yet; the scoreboard with their paths. Raises OSError."""
    redactor = Redactor.of(run.histories.values(), str(run_dir))
    where: dict[str, History] = {case: h for h in run.histories.values() for case in h.case_ids()}
    rows = []
    for row in board.rows:
        v = row.verdict
        there = bool(v.reproduction) and (run_dir / v.reproduction / "run.sh").is_file()
        if v.outcome is r.Outcome.FAIL and v.case_id in where and not there:
            path = write(run_dir, where[v.case_id].for_case(v.case_id), v, redactor)
            v = msgspec.structs.replace(v, reproduction=path)
        rows.append(msgspec.structs.replace(row, verdict=v))
    return msgspec.structs.replace(board, rows=tuple(rows))


def folder_name(case_id: str) -> str:
    """A case id as the name of a folder; different ids give different names."""
    return re.sub(r"[^\w.+-]", lambda m: f"%{ord(m.group()):02x}", case_id).replace("..", "%2e%2e")


def selected(history: History, verdict: r.Verdict) -> list[r.Observation]:
    """The requests to replay, in the order in which they were sent."""
    every = sorted(history.observations(), key=lambda o: o.sent_s)
    if len(every) <= REQUESTS:
        return every
    named = _strings([f.evidence for f in verdict.findings])
    wanted = [o for o in every if o.request_id in named] or [o for o in every if not o.ok][:1] or every[-1:]
    first = {_first_block(o, history) for o in wanted[:REQUESTS]}
    return [o for o in every if _first_block(o, history) in first][:REQUESTS]


def _first_block(o: r.Observation, history: History) -> tuple[Any, ...]:
    stack = history.stack
    size = min((e.block_tokens for e in stack.engines), default=16) if stack else 16
    return (o.cache_salt, *o.prompt_token_ids[:size])


def _strings(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*(_strings(v) for v in value)) if value else set()
    return set()


def _request(number: int, o: r.Observation, history: History, redactor: Redactor) -> dict[str, Any]:
    served = {e.name: e.served_model for e in history.stack.engines} if history.stack else {}
    body: dict[str, Any] = {"model": served.get(o.engine, ""), **o.sampling}
    body = {k: v for k, v in redactor.data(body).items() if k not in _UNSENT}
    chat = "messages" in body
    if not chat:
        body["prompt"] = o.prompt_token_ids
    body |= {"return_token_ids": True, "stream": False}
    if o.cache_salt is not None:
        body["cache_salt"] = o.cache_salt
    return {
        "number": number,
        "request_id": o.request_id,
        "engine": o.engine,
        "role": o.role,
        "phase": o.phase,
        "path": "/v1/chat/completions" if chat else "/v1/completions",
        "body": body,
        "recorded": {
            "http_status": o.http_status,
            "output_token_ids": o.output_token_ids,
            "cached_tokens": o.cached_tokens,
            "ttft_s": None if o.ttft_s is None else round(o.ttft_s, 4),
            "duration_s": round(o.duration_s, 4),
            "timed_out": o.timed_out,
            "cancelled": o.cancelled,
            "error": redactor.text(o.error),
        },
    }


def _readme(history: History, v: r.Verdict, script: Script, omitted: int, redactor: Redactor) -> str:
    versions = {k: ver for e in (history.stack.engines if history.stack else ()) for k, ver in e.versions.items()}
    lines = [
        f"# {v.case_id}",
        "",
        f"- Claim: {v.claim}",
        f"- Got: {v.got}",
        f"- Wanted: {v.wanted}",
        *(f"- Finding: `{f.code}`: {f.message}" for f in v.findings),
        f"- Likely cause: {v.cause or 'not known'}",
        f"- Visible in production? {v.production or 'not known'}",
        "",
        "## What it needs",
        "",
        "bash, curl, setsid (util-linux), and a Python with vLLM and Mooncake installed"
        + (f" (recorded with {', '.join(f'{k} {ver}' for k, ver in sorted(versions.items()))})" if versions else "")
        + ".",
        "",
    ]
    lines += [f"- `{name}`: {what}" for name, what in script.variables()]
    lines += ["", "## Run it", "", "```sh", script.usage(), "```", ""]
    lines += [
        "It starts the stack, sends the requests of `prompts.json`, prints each answer beside the recorded one, and"
    ]
    lines += [
        "stops everything. Answers and logs stay in the folder it names. Ports are those of the recorded run.",
        "",
    ]
    lines += ["## What it does", "", *script.steps()]
    if omitted:
        lines.append(f"- Left out: {omitted} other requests of the case; none shares a first block with those above.")
    lines += [f"- Not replayed: {note}" for note in script.notes]
    return "\n".join(redactor.text(one_line(line)) if not line.startswith("```") else line for line in lines) + "\n"
