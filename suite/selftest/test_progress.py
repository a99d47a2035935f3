"""Progress: what a person sees on a terminal and in a log, and that capture does not swallow it."""

from __future__ import annotations

import io
import os
import pty
import re

import pytest

from fixtures import capabilities
from fixtures.errors import HarnessError
from fixtures.progress import TerminalProgress, open_progress

pytestmark = pytest.mark.selftest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_quiet_form_tells_of_a_wait_at_most_every_five_seconds() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = TerminalProgress(stream, live=False, prefix="gw1", clock=clock)
    progress.case(3, 14, "P.boundary.k3+1")
    for tenth in range(125):
        clock.now = tenth / 10
        progress.waiting("engine e0 starting", clock.now, 35.0, 240.0)
    progress.done("engine e0 starting", 12.5, True)
    progress.done("a short wait", 0.2, True)
    progress.waiting("hits to return", 0.0, None, 30.0)
    progress.done("hits to return", 30.0, False)
    assert stream.getvalue().splitlines() == [
        "[gw1] gate 3 of 14 P.boundary.k3+1",
        "[gw1] engine e0 starting 5 s of ~35 s",
        "[gw1] engine e0 starting 10 s of ~35 s",
        "[gw1] engine e0 starting: after 12.5 s",
        "[gw1] hits to return: gave up after 30.0 s",
    ]


def test_live_form_keeps_one_line_with_every_wait_and_takes_it_away() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = TerminalProgress(stream, live=True, clock=clock)
    progress.case(1, 2, "P.a.1")
    for clock.now in (0.3, 0.35, 0.6):
        progress.waiting("engine e0 starting", clock.now, 35.0, 240.0)
        progress.waiting("engine e1 starting", clock.now, None, 240.0)
    progress.done("engine e0 starting", 0.7, True)
    progress.done("engine e1 starting", 0.7, True)
    progress.case_done(line_up=True)
    drawn = stream.getvalue().split("\r\x1b[2K")[1:]
    assert "\n" not in stream.getvalue()
    assert drawn[1] == "gate 1 of 2 P.a.1: engine e0 starting 0 s of ~35 s"
    assert (
        drawn[2] == "gate 1 of 2 P.a.1: engine e0 starting 1 s of ~35 s, engine e1 starting 0 s of at most 240 s"[:79]
    )
    assert drawn[3:] == [
        "",
        "gate 1 of 2 P.a.1: engine e1 starting 1 s of at most 240 s",
        "",
        "gate 1 of 2 P.a.1",
        "\x1b[1A",
    ], "0.05 s after the last drawing nothing is drawn; a wait that ended goes, the case stays until it is done"


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    reading, writing = os.pipe()
    progress = TerminalProgress(os.fdopen(writing, "w"), live=False)
    os.close(reading)
    progress.note("nobody hears this")
    progress.note("nor this")
    progress.close()


@pytest.mark.parametrize(
    ("environ", "prefix", "live"),
    [({}, "", True), ({"CI": "true"}, "", False), ({"TERM": "dumb"}, "", False), ({}, "gw0", False)],
)
def test_live_only_on_a_terminal_of_ones_own(environ: dict[str, str], prefix: str, live: bool) -> None:
    ours, theirs = pty.openpty()
    saved = os.dup(2)
    os.dup2(theirs, 2)
    try:
        progress = open_progress(prefix, environ)
        progress.note("hello")
        said = os.read(ours, 100)
        progress.close()
    finally:
        os.dup2(saved, 2)
        for fd in (saved, ours, theirs):
            os.close(fd)
    assert progress.live is live
    assert re.search(rb"hello\r?\n", said)


# Capabilities -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("word", capabilities.PROBES)
def test_every_probe_says_what_it_saw_and_how_to_mend_it(word: str) -> None:
    found = capabilities.probe(word)
    assert found.probe
    assert "\n" not in found.probe
    assert found.ok or found.mend


def test_an_unknown_requirement_is_our_mistake() -> None:
    with pytest.raises(HarnessError, match="unknown requirement 'gpus'; known: cpu-stack, gpu"):
        capabilities.probe("gpus")
