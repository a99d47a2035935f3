"""Envelopes: what is drawn of a fault, and its row in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from reports import records as r
from reports.render import envelope, files, html, markdown
from reports.scoreboard import build

pytestmark = pytest.mark.selftest

SVG = "{http://www.w3.org/2000/svg}"


def point(at_s: float, took_s: float, fate: str = "good", role: str = "victim", **changes: Any) -> dict[str, Any]:
    return {
        "role": role,
        "engine": "e1",
        "at_s": at_s,
        "took_s": took_s,
        "limit_s": 1.2,
        "fate": fate,
        "after": at_s >= 0,
        **changes,
    }


def verdict(*points: dict[str, Any], healed_s: float | None = 5.0, **changes: Any) -> r.Verdict:
    fields: dict[str, Any] = {
        "case_id": "D.master.kill.busy",
        "gate": "D.master",
        "outcome": r.Outcome.FAIL,
        "claim": "c",
        "findings": (r.Finding(code=r.FindingCode.HANG, message="m <b>"),),
        "numbers": {
            "token_seconds_lost": 9000,
            "good_requests": 1,
            "hang_requests": 1,
            "worst_ttft_s": 15.0,
            "good_again_s": 6.5,
            "envelope": {"fault": "master kill", "healed_s": healed_s, "requests": list(points)},
        },
    }
    return r.Verdict(**(fields | changes))


def drawn(v: r.Verdict) -> ElementTree.Element:
    return ElementTree.fromstring(envelope.render(v))  # it is well-formed, or this raises


POINTS = (
    point(-2.0, 0.2, role="baseline"),
    point(0.5, 15.0, "hang"),
    point(6.0, 0.3),
    point(1.0, 0.1, role="bystander"),
)


def test_every_request_is_one_mark_in_its_place() -> None:
    root = drawn(verdict(*POINTS))
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert len(titles) == len(POINTS)
    assert "victim on e1, sent at 0.5 s: hang, 15 s" in titles
    marks = {(m.find(f"{SVG}title").text or ""): m for m in root.iter() if m.find(f"{SVG}title") is not None}  # type: ignore[union-attr]
    hang, good = (m for t, m in marks.items() if t.startswith("victim"))
    assert float(hang.attrib["cx"]) < float(good.attrib["cx"])  # sent earlier
    assert float(hang.attrib["cy"]) < float(good.attrib["cy"])  # took longer: higher up
    assert hang.attrib["fill"] != good.attrib["fill"]


def test_the_fault_is_shaded_until_its_heal_or_the_end() -> None:
    def width(v: r.Verdict) -> float:
        return next(float(e.attrib["width"]) for e in drawn(v).iter(f"{SVG}rect") if e.attrib["fill"] == "#fdecea")

    assert (
        width(verdict(*POINTS, healed_s=2.0))
        < width(verdict(*POINTS, healed_s=4.0))
        < width(verdict(*POINTS, healed_s=None))
    )


def test_texts_are_escaped_and_nothing_is_loaded() -> None:
    text = envelope.render(verdict(point(0, 1, role="<b>"), case_id="D.<x>"))
    assert "<b>" not in text
    assert "href" not in text
    assert "url(" not in text


@pytest.mark.parametrize("took_s", [0.0, 1e-6, 1e6])
def test_any_time_can_be_drawn(took_s: float) -> None:
    drawn(verdict(point(0.0, took_s)))


def test_a_verdict_without_requests_has_no_envelope() -> None:
    empty: list[dict[str, Any]] = [{}, {"envelope": {}}, {"envelope": {"requests": []}}]
    for numbers in empty:
        assert envelope.render(verdict(numbers=numbers)) == ""


def test_files_and_rows(tmp_path: Path) -> None:
    board = build([verdict(*POINTS), verdict(case_id="P.x", gate="P", numbers={})])
    written = files.write_all(board, tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in written if p.suffix == ".svg"] == [
        "envelopes/D.master.kill.busy.svg"
    ]
    (row,) = envelope.rows(board)
    assert len(row) == len(envelope.HEADS)
    assert row[0] == "D.master.kill.busy"
    assert "15 s" in row
    assert "not seen" in row  # hits were not
    assert "What faults cost" in markdown.render(board)
    assert "What faults cost" not in markdown.render(build([verdict(numbers={})]))
    page = html.render(board)
    assert page.count('class="envelope"') == 1
    assert "What faults cost" in page
    assert "What faults cost" not in html.render(build([verdict(numbers={})]))


def test_a_case_id_cannot_leave_the_folder() -> None:
    assert "/" not in envelope.file_name("../../D.x/y")
