"""JSON, Markdown, HTML and JUnit: complete, readable again, self-contained, and without anything that must not leave."""

from __future__ import annotations

import json as stdlib_json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from reports import records as r
from reports.__main__ import main
from reports.evidence import load_run
from reports.redact import Redactor, secrets_out
from reports.render import html, json, junit, markdown, terminal
from reports.render.files import write_all
from reports.render.svg import ttft_plot
from reports.runinfo import TTFT_POINTS, run_info
from reports.scoreboard import SCHEMA_VERSION, Scoreboard, build, decode
from suite.selftest.report_samples import (
    PRIVATE_PARTS,
    SECRET_PARTS,
    SECRETS,
    Code,
    Out,
    board,
    observation,
    private_run,
    verdict,
    verdicts,
)

pytestmark = pytest.mark.selftest

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Every tag is closed in order; remembers attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# JSON ---------------------------------------------------------------------------------------------------------------
def test_json_is_read_back_equal(tmp_path: Path) -> None:
    written = board()
    (tmp_path / "verdicts.json").write_text(json.render(written))
    assert json.load(tmp_path / "verdicts.json") == written


def test_json_has_the_stable_fields() -> None:
    data = stdlib_json.loads(json.render(board()))
    assert list(data)[:2] == ["schema", "version"]
    assert (data["schema"], data["version"]) == ("kvgates.verdicts", 1)
    assert data["counts"]["FAIL"] == 2
    assert data["rows"][0]["verdict"]["case_id"] == "H.parity.same"
    assert {"mark", "expected", "reason", "link", "evidence", "verdict"} == set(data["rows"][0])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f'{{"schema": "kvgates.verdicts", "version": {SCHEMA_VERSION + 1}}}', "newer than this version reads"),
        ('{"schema": "other", "version": 1}', "schema 'other'"),
        ("[]", "not a kvgates.verdicts file"),
        ("nonsense", "not a kvgates.verdicts file"),
        ('{"schema": "kvgates.verdicts", "version": 1, "rows": 3}', r"\$.rows"),
    ],
)
def test_json_of_another_format_is_one_clear_error(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        decode(text)
    assert "\n" not in str(caught.value)


def test_json_ignores_fields_of_newer_writers() -> None:
    data = stdlib_json.loads(json.render(board())) | {"added-later": 1}
    assert decode(stdlib_json.dumps(data)) == board()


# Markdown -----------------------------------------------------------------------------------------------------------
def test_markdown_shows_each_failure_in_full_and_in_order() -> None:
    text = markdown.render(board())
    section = text[text.index("### FAIL D.owner-killed.default") :].partition("\n### ")[0]
    bold = re.findall(r"\*\*(.+?):\*\*", section)
    assert bold == ["Claim", "Got", "Wanted", "Finding", "Finding", "Likely cause", "In production", "Next", "Numbers"]
    assert '{"request_id":"r1"}' in section
    for v in verdicts():
        assert (f"### {v.outcome} {v.case_id}" in text) == (v.outcome not in (Out.PASS, Out.UNTESTABLE))


def test_markdown_tables_cannot_be_broken_by_what_they_hold() -> None:
    text = markdown.render(build([verdict("a.b", Out.FAIL, Code.HANG, got="x | y\n<b>`z` @someone #12")]))
    row = next(line for line in text.splitlines() if line.startswith("| a"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 8
    assert "@someone" not in text  # would notify a person of that name
    assert "<b>" not in re.sub(r"\\<", "", text)


def test_markdown_fences_hold_fences() -> None:
    assert markdown.fenced("a\n````\nb", "sh")[0] == "`````sh"


# HTML ---------------------------------------------------------------------------------------------------------------
def test_html_is_well_formed_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    private_run(tmp_path)
    info = run_info(load_run(tmp_path).histories.values())
    full = board(run=msgspec.structs.replace(info, ttft_s={"cold": (0.2, 0.3), "native": (0.01,)}))
    text = html.render(full)
    page = Page(text)
    tags = {tag for tag, _, _ in page.attributes}
    assert not tags & {"script", "link", "img", "iframe", "base", "object", "image", "use"}
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "data", "action", "xlink:href"), (tag, name)
        if name == "href":
            assert value.startswith("#")
        assert "://" not in value
    assert not re.search(r"@import|url\(", text)
    assert text.count("<circle") == 3


def test_html_links_of_like_named_cases_differ() -> None:
    page = Page(html.render(board()))
    anchors = [value for _, name, value in page.attributes if name == "id"]
    targets = [value for _, name, value in page.attributes if name == "href"]
    assert len(set(anchors)) == len(anchors) == 4
    assert sorted(targets) == sorted("#" + a for a in anchors)


def test_html_shows_markup_as_text() -> None:
    wild = "<script>alert(1)</script> & \"'"
    page = Page(html.render(build([verdict("a.b", Out.FAIL, Code.HANG, got=wild)])))
    assert "".join(page.text).count(wild) >= 2


def test_the_plot_survives_any_values() -> None:
    assert ttft_plot({}) == ""
    assert ttft_plot({"cold": [0.0, -1.0]}) == ""
    assert ttft_plot({"<cold>": [1.0, 1.0]}).count("<circle") == 2
    assert "&lt;cold&gt;" in ttft_plot({"<cold>": [1.0]})


def test_the_run_keeps_a_bounded_number_of_points(tmp_path: Path) -> None:
    from reports.history import History

    info = run_info([History(observation(i, "a.b", role=f"cold/{i}") for i in range(3 * TTFT_POINTS))])
    assert set(info.ttft_s) == {"cold"}
    assert len(info.ttft_s["cold"]) == TTFT_POINTS
    assert info.requests == 3 * TTFT_POINTS


# JUnit --------------------------------------------------------------------------------------------------------------
def test_junit_properties_are_named_and_never_empty() -> None:
    row = next(row for row in board().rows if row.mark == "expected")
    pairs = dict(junit.properties(row))
    assert pairs["kvgates.verdict"] == "FAIL"
    assert pairs["kvgates.finding"] == "failed-request"
    assert pairs["kvgates.mark"] == "expected"
    assert all(pairs.values())


# What must not leave ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS.keys())
def test_a_secret_of_each_form_is_found(text: str) -> None:
    assert not any(part in secrets_out(f"before {text} after") for part in SECRET_PARTS)
    assert secrets_out(f"before {text} after").endswith("after")


def test_what_is_no_secret_stays() -> None:
    text = "max_tokens=8 token: 17, last token 5; 1984 tokens; key=model@tp_rank:0; monkey: 3; secretary said: x"
    assert secrets_out(text) == text


def test_values_of_the_own_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPLOAD_SECRET", "plainlooking")
    monkeypatch.setenv("UPLOAD_SECRET_LEVEL", "everywhere")
    assert secrets_out("a plainlooking b everywhere") == "a [secret] b everywhere"
    redactor = Redactor()
    for text in ("a plainlooking b everywhere", "a plainlooking b everywhere", "x" * 300 + " plainlooking"):
        assert redactor.text(text) == text.replace("plainlooking", "[secret]")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("see /home/joe/x/model.bin now", "see .../model.bin now"),
        ("File /a/b/site-packages/vllm/engine.py", "File .../site-packages/vllm/engine.py"),
        ("File /a/b/fixtures/stack.py", "File .../fixtures/stack.py"),
        ("RUN/stacks/e0/log.txt", "RUN/stacks/e0/log.txt"),
        ("/runs/r1/stacks/e0/log.txt and /runs/r1", "stacks/e0/log.txt and ."),
        ("/proc/17/stat /dev/shm/x /v1/completions", "/proc/17/stat /dev/shm/x /v1/completions"),
        ("http://127.0.0.1:8000/v1/completions", "http://127.0.0.1:8000/v1/completions"),
        ("at 10.1.2.3 and 8.8.8.8:53, cudnn 9.10.2.21", "at [address] and [address]:53, cudnn 9.10.2.21"),
        ("on box-1 and box-11 and box-1.example.org", "on [host] and box-11 and [host].example.org"),
        ("LIBS=/home/joe/lib:/home/joe/lib64", "LIBS=.../lib:.../lib64"),
        ("file:///home/joe/x/y and gcc -I/home/joe/include", "file://.../y and gcc -I.../include"),
        ("see https://x.org/leaks.html/home/joe/.venv/lib/a.py:3", "see https://x.org/leaks.html.../a.py:3"),
        ("https://x.org/home/joe/page.html", "https://x.org/home/joe/page.html"),
        ("2 blocks/s, 1/2, and/or/not", "2 blocks/s, 1/2, and/or/not"),
    ],
)
def test_private_names_are_taken_out_and_others_stay(text: str, clean: str) -> None:
    assert Redactor(["/runs/r1"], ["box-1"]).text(text) == clean


def test_nothing_private_leaves_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte that ``render`` writes or prints: no secret anywhere; no private name in what is passed on."""
    private_run(tmp_path)
    assert main(["render", str(tmp_path), "--width", "200"], gates={}) == 0
    files = {p.relative_to(tmp_path): p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".jsonl"}
    assert {str(name) for name in files} == {
        "verdicts.json",
        "report.md",
        "report.html",
        "repro/D.x.a/README.md",
        "repro/D.x.a/run.sh",
        "repro/D.x.a/prompts.json",
    }
    for name, path in files.items():
        text = path.read_text()
        for part in (*SECRET_PARTS, *PRIVATE_PARTS, str(tmp_path)):
            assert part not in text, (name, part)
    row = json.load(tmp_path / "verdicts.json").rows[0]
    printed = capsys.readouterr().out + terminal.failure_message(row.verdict, "x") + str(junit.properties(row))
    history = load_run(tmp_path).history
    raw = history.of(r.Verdict)[0]
    printed += terminal.failure_message(raw, "x") + terminal.render(build([raw]), width=160)
    assert not any(part in printed for part in SECRET_PARTS)


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    write_all(board(), tmp_path)
    paths = write_all(build([]), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)
    assert isinstance(json.load(tmp_path / "verdicts.json"), Scoreboard)
    assert "D.owner-killed" not in (tmp_path / "report.html").read_text()
