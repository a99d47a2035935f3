"""``run.sh`` of a reproduction: start the stack, replay requests and faults in their order, compare, stop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports import records as r
from reports.history import History
from reports.redact import Redactor, one_line
from reports.repro_shell import Paths, admin_url, here_document, quote, roots, start_function, variable

PAUSE_S = 1.0
"""A gap with nothing in flight that is longer than this is part of the case (a lease, a TTL) and is kept."""

_SIGNALS = {
    ("kill", "inject"): "KILL",
    ("freeze", "inject"): "STOP",
    ("freeze", "heal"): "CONT",
    ("stop", "inject"): "TERM",
}

_HEAD = """#!/usr/bin/env bash
# {title}
# got:    {got}
# wanted: {wanted}
# README.md beside this file says what it needs.
set -euo pipefail
HERE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
PYTHON=${{PYTHON:-python3}}
WORK=${{WORK:-$(mktemp -d)}}
SHORT=$(mktemp -d /tmp/rXXXXXX)
"""

_FUNCTIONS = Path(__file__).with_name("repro_functions.sh")


@dataclass(frozen=True)
class Step:
    """One thing that happened: at ``t_s``, as shell and as a sentence.

    ends_s: when a request ended (others may go on beside it). until_s: when a step ended that holds everything up.
    """

    t_s: float
    shell: str
    words: str
    ends_s: float | None = None
    until_s: float | None = None


class Script:
    """The script of one case. ``notes`` says what of the case it leaves out."""

    def __init__(self, history: History, requests: list[r.Observation], run_dir: Path, redactor: Redactor) -> None:
        self._stack = _first_stack(history)
        self._history = history
        self._requests = requests
        self._redactor = redactor
        self.notes: list[str] = []
        stack = self._stack
        processes = list(stack.processes) if stack else []
        known = {p.name for p in processes}
        for snapshot in history.of(r.ProcessSnapshot):
            processes += [p for p in snapshot.processes if p.name not in known]
            known |= {p.name for p in snapshot.processes}
        self._roots = roots(processes)
        models = [e.model for e in stack.engines] if stack else []
        self._paths = Paths([str(run_dir), str(run_dir.resolve())], models, redactor.names_out)
        self._admin = admin_url(self._roots)
        self._starts = [line for root in self._roots for line in start_function(root, self._paths)]
        self._files = self._config_files(run_dir)
        self._steps = self._sequence()

    # What a reader is told -------------------------------------------------------------------------------------------
    def variables(self) -> list[tuple[str, str]]:
        """Name and meaning of every variable that the reader may or must set."""
        found = [
            ("PYTHON", "the Python with vLLM and Mooncake (default: python3)"),
            ("WORK", "where answers and logs go"),
        ]
        for model, name in self._paths.models.items():
            last = Path(model).name
            found.append(
                (
                    name,
                    f"directory of the model `{last}`; a generated one (random weights) must be copied from the run's host",
                )
            )
        found += [(name, f"what was `.../{Path(path).name}`") for path, name in self._paths.others.items()]
        return found

    def usage(self) -> str:
        """The command to type."""
        needed = [*self._paths.models.values(), *self._paths.others.values()]
        return " ".join([*(f"{name}=..." for name in needed), "./run.sh"])

    def steps(self) -> list[str]:
        """The sequence as Markdown list items."""
        begun = self._steps[0].t_s if self._steps else 0.0
        units = ", ".join(root.name for root in self._roots)
        lines = [f"- start {units}"] if units else ["- no stack came up in this case: there is nothing to start"]
        return lines + [f"- {step.t_s - begun:.2f} s: {step.words}" for step in self._steps]

    # The script ------------------------------------------------------------------------------------------------------
    def text(self, verdict: r.Verdict) -> str:
        """The whole of ``run.sh``."""
        words = {"title": f"{verdict.case_id}: {verdict.claim}", "got": verdict.got, "wanted": verdict.wanted}
        clean = {name: one_line(self._redactor.text(text)) for name, text in words.items()}
        needed = {**self._paths.models, **self._paths.others}
        lines = [_HEAD.format(**clean).rstrip()]
        lines += [f': "${{{name}:?directory or file that was .../{Path(path).name}}}"' for path, name in needed.items()]
        lines.append('SITE=$("$PYTHON" -c \'import sysconfig; print(sysconfig.get_paths()["platlib"])\')')
        lines += self._urls()
        lines += [f"mkdir -p {quote(directory)}" for directory in self._paths.directories]
        lines += [
            *self._files,
            _FUNCTIONS.read_text(encoding="utf-8").partition("SHORT.\n")[2].strip("\n"),
            *self._starts,
            "",
        ]
        lines += self._bring_up()
        lines += self._play()
        lines += [
            "finished",
            f"echo {quote('got then: ' + clean['got'])}",
            f"echo {quote('wanted:   ' + clean['wanted'])}",
        ]
        return "\n".join(lines) + "\n"

    def _bring_up(self) -> list[str]:
        """Servers of the pool first; engines together, or one after the other where they would measure one GPU at once."""
        starts: list[str] = []
        waits: list[str] = []
        together = self._stack is not None and self._stack.spec.get("platform") == "cpu"
        for root in self._roots:
            name = variable(root.name)
            url = self._url(root.name)
            if url and together:
                starts.append(f"start_{name}")
                waits.append(f'ready {name} "{url}/health"')
            elif url:
                starts += [f"start_{name}", f'ready {name} "{url}/health"']
            else:
                admin = self._admin if root.name.startswith("master") else ""
                starts += [f"start_{name}", *([f"ready {name} {quote(admin + '/health')}"] if admin else [])]
        engines = self._stack.engines if self._stack else ()
        return [*starts, *waits, *(f'warm_up "{self._url(e.name)}" {quote(e.served_model)}' for e in engines)]

    def _config_files(self, run_dir: Path) -> list[str]:
        """Configuration files of the units (they lie inside the run), written out again as here-documents."""
        lines: list[str] = []
        for root in self._roots:
            for value in root.env.values():
                if Path(value).suffix not in (".json", ".toml", ".yaml"):
                    continue
                marked = self._paths.portable(value)
                at = marked.find("/stacks/")
                if at < 0:
                    continue
                source = run_dir / marked[at + 1 :]
                if not source.is_file():
                    self.notes.append(
                        f"{source.name} of {root.name} is not in the run; write it to {source.name} below WORK"
                    )
                    continue
                # Unquoted delimiter: paths in the file follow the variables too.
                body = here_document(self._paths.portable(source.read_text(encoding="utf-8").strip()))
                lines += [f"cat >{quote(marked)} <<CONFIG", body, "CONFIG"]
        return lines

    def _play(self) -> list[str]:
        lines: list[str] = []
        free_s: float | None = None  # when the last request in flight ended
        last_s: float | None = None
        open_until: list[float] = []
        for step in self._steps:
            if open_until and step.t_s >= max(open_until):
                lines.append("finished")
                free_s, open_until = max(open_until), []
            idle_from = free_s if free_s is not None else last_s
            if not open_until and idle_from is not None and step.t_s - idle_from > PAUSE_S:
                lines.append(f"sleep {step.t_s - idle_from:.1f} # as long as the recorded run waited here")
            lines.append(step.shell)
            free_s, last_s = None, step.until_s or step.t_s
            if step.ends_s is not None:
                open_until.append(step.ends_s)
        return lines

    def _sequence(self) -> list[Step]:
        steps = [self._request_step(number, o) for number, o in enumerate(self._requests)]
        visible = {w.what.removeprefix("visible:"): w for w in self._history.of(r.WaitRecord)}
        for o in self._requests:
            if o.request_id in visible and self._admin:
                words, wait = f"wait for the save of {o.request_id}", visible[o.request_id]
                until_s = wait.t_s + wait.elapsed_s
                steps.append(Step(o.done_s, f"saved {quote(self._admin)}", words, until_s=until_s))
        steps += [self._fault_step(fault) for fault in self._history.faults()]
        for fact in self._history.facts("reset-local"):
            url = self._url(str(fact.value.get("engine", "")) if isinstance(fact.value, dict) else "")
            if url:
                shell = f"curl -s --noproxy '*' -X POST \"{url}/reset_prefix_cache\" >/dev/null"
                steps.append(Step(fact.t_s, shell, f"empty the prefix cache of {fact.value['engine']}"))
        for attempt in self._history.of(r.StartAttempt):
            self.notes.append(
                f"start of {attempt.unit}: {attempt.result} after {attempt.elapsed_s:.0f} s (bound {attempt.bound_s:.0f} s)"
            )
        return sorted(steps, key=lambda step: step.t_s)

    def _url(self, engine: str) -> str:
        """The engine's address as a shell word to be put into double quotes, or ""."""
        known = {e.name for e in self._stack.engines} if self._stack else set()
        return f"$URL_{variable(engine)}" if engine in known else ""

    def _urls(self) -> list[str]:
        """Addresses of engines: those on loopback as recorded, others are for the reader to fill in."""
        lines = []
        for engine in self._stack.engines if self._stack else ():
            name = f"URL_{variable(engine.name)}"
            local = re.match(r"https?://(127\.|localhost\b|\[::1\])", engine.url)
            lines.append(
                f"{name}=${{{name}:-{engine.url}}}" if local else f': "${{{name}:?address of engine {engine.name}}}"'
            )
        return lines

    def _request_step(self, number: int, o: r.Observation) -> Step:
        words = f"request {number} ({o.role or o.phase}) to {o.engine}, {len(o.prompt_token_ids)} tokens"
        url = self._url(o.engine)
        if not url:
            self.notes.append(f"request {number}: the address of {o.engine} is not recorded")
            return Step(o.sent_s, f"echo {quote(f'skipped: request {number}')}", words)
        path = "/v1/chat/completions" if "messages" in o.sampling else "/v1/completions"
        limit_s = max(1, round(o.deadline_s))
        return Step(o.sent_s, f'ask {number} "{url}{path}" {limit_s} &\nASKED+=($!)', words, ends_s=o.done_s)

    def _fault_step(self, fault: r.FaultRecord) -> Step:
        words = f"{fault.fault} {fault.target} ({fault.action})"
        name = _SIGNALS.get((fault.fault, fault.action))
        unit = variable(fault.target)
        if name and any(root.name == fault.target for root in self._roots):
            return Step(fault.t_s, f"signal_unit {name} {unit}", words)
        if fault.fault == "restart" and any(root.name == fault.target for root in self._roots):
            return Step(fault.t_s, f"signal_unit KILL {unit}\nstart_{unit}", words)
        self.notes.append(f"{words}: do it by hand where the script says so; recorded proof: {_short(fault.proof)}")
        return Step(fault.t_s, f"read -r -p {quote('now do by hand: ' + words + ', then press Enter ')} || true", words)


def _short(value: Any) -> str:
    text = one_line(str(value))
    return text if len(text) <= 300 else text[:297] + "..."


def _first_stack(history: History) -> r.StackUp | None:
    """The stack on which the case began; the first one brought up inside it where it began on none."""
    wanted = history.case.stack_id
    before = [rec for rec in history.before if isinstance(rec, r.StackUp) and (not wanted or rec.stack_id == wanted)]
    if before:
        return before[-1]
    inside = history.of(r.StackUp)
    return inside[0] if inside else None
