"""The pytest mechanics, run for real inside pytest: every outcome, every exit code, expectations, xdist, resume, kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import fixtures.models  # noqa: F401 - pytester forgets what an inner run imports, and numpy cannot be imported twice
from fixtures.waiting import wait_for
from reports import records as r
from reports.evidence import load_run
from reports.render import json as verdicts_json
from reports.whole_lines import append_whole
from suite.selftest.fake_gates import CONFTEST, FAKE, TESTS

pytestmark = pytest.mark.selftest

ROOT = Path(__file__).parents[2]
STACK = """name = "fake"
engine_count = 2
[store]
[engine]
connector = "mooncake-store"
"""
Run = Callable[..., pytest.RunResult]


class Tree:
    """An inner test tree with fake gates, and pytest run on it with the suite's own configuration."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
        lines = ["[pytest]", "pythonpath = .", "filterwarnings = error", "markers ="]
        lines += [f"    {marker}" for marker in settings["markers"]]
        (self.path / "pytest.ini").write_text("\n".join(lines))
        (self.path / "conftest.py").write_text(CONFTEST)
        (self.path / "test_fake.py").write_text(TESTS)
        (self.path / "fake.toml").write_text(STACK)
        self.args = ["-p", "no:cacheprovider", "--strict-markers", "-ra"]
        self.args += ["--stack=fake.toml", "--evidence=out"]

    def gates(self, *lines: str) -> None:
        """Each line is ``case(...)``; the first argument's family and name make the gate."""
        (self.path / "fake.py").write_text(
            FAKE
            + "CASES = [\n"
            + ",\n".join(lines)
            + "]\n"
            + "GATES = [FakeGate(g, [c for c in CASES if c.id.startswith(g)])"
            + " for g in dict.fromkeys('.'.join(c.id.split('.')[:2]) for c in CASES)]\n"
        )

    def run(self, *args: str) -> pytest.RunResult:
        # Only where it is used: for a plugin that is named with -p the entry points of all that is installed are read.
        xdist = ["-p", "xdist.plugin"] if any(arg.startswith("-n") for arg in args) else []
        return self.pytester.runpytest_inprocess(*self.args, *xdist, *args, no_reraise_ctrlc=True)

    @property
    def run_dir(self) -> Path:
        (found,) = (self.path / "out").iterdir()
        return found

    @property
    def pool_log(self) -> list[str]:
        log = self.path / "pool.log"
        return log.read_text().splitlines() if log.exists() else []

    def expect(self, *entries: dict[str, str], versions: str = '{ pytest = ">=8" }') -> str:
        tables = []
        for entry in entries:
            full = {"reason": "known", "link": "not reported", **entry}
            tables.append("[[case]]\n" + "\n".join(f"{k} = {v!r}" for k, v in full.items()))
            tables.append(f'observed = ["a", "b", "c"]\nversions = {versions}')
        path = self.path / "known.toml"
        path.write_text("\n".join(tables))
        return f"--expect={path}"


@pytest.fixture
def tree(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # pytester would import every plugin anew for each run
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("fixtures.deaths.SETTLE_S", 0.0)  # the engines here are dead at once, or are not meant to die
    return Tree(pytester)


# Outcomes and exit codes ----------------------------------------------------------------------------------------------
OUTCOMES = [
    ("pass", 'case("P.a", "1")', 0, {"passed": 1}, "PASS"),
    ("fail", 'case("P.a", "1", verdict="fail")', 10, {"failed": 1}, "FAIL"),
    ("inconclusive", 'case("P.a", "1", verdict="inconclusive")', 11, {"failed": 1}, "INCONCLUSIVE"),
    ("harness", 'case("P.a", "1", verdict="harness")', 12, {"failed": 1}, "HARNESS_ERROR"),
    ("checker crash", 'case("P.a", "1", verdict="crash")', 12, {"failed": 1}, "HARNESS_ERROR"),
    ("verdict against its findings", 'case("P.a", "1", verdict="lie")', 12, {"failed": 1}, "HARNESS_ERROR"),
    ("collect raises", 'case("P.a", "1", collect="raise")', 12, {"failed": 1}, "HARNESS_ERROR"),
    ("stack does not start", 'case("P.a", "1", variant="no-start")', 12, {"failed": 1}, "HARNESS_ERROR"),
    ("untestable need", 'case("P.a", "1", needs=("rdma",))', 13, {"skipped": 1}, "UNTESTABLE"),
    ("untestable stack", 'case("P.a", "1", variant="no-rdma")', 13, {"skipped": 1}, "UNTESTABLE"),
]


@pytest.fixture
def no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selftests may run on a host with RDMA; the probe's own truth is not the matter here."""
    from fixtures import capabilities

    monkeypatch.setattr(
        capabilities, "probe", lambda word: capabilities.Capability(word != "rdma", f"{word} looked at", "buy one")
    )


@pytest.mark.usefixtures("no_rdma")
@pytest.mark.parametrize(("line", "code", "counts", "outcome"), [o[1:] for o in OUTCOMES], ids=[o[0] for o in OUTCOMES])
def test_each_outcome_has_its_test_result_exit_code_and_recorded_verdict(
    tree: Tree, line: str, code: int, counts: dict[str, int], outcome: str
) -> None:
    tree.gates(line)
    result = tree.run("-m", "gates")
    assert result.ret == code
    result.assert_outcomes(**counts)
    (verdict,) = load_run(tree.run_dir).history.of(r.Verdict)
    assert (verdict.case_id, verdict.outcome) == ("P.a.1", outcome)
    board = verdicts_json.load(tree.run_dir / "verdicts.json")
    assert [str(row.verdict.outcome) for row in board.rows] == [outcome]
    assert load_run(tree.run_dir).history.of(r.RunFinished)[-1].exit_code == code


MIXES = [
    (("fail", "harness", "inconclusive", "pass"), 10),
    (("harness", "inconclusive", "pass"), 12),
    (("inconclusive", "pass"), 11),
]


@pytest.mark.parametrize(("verdicts", "code"), MIXES)
def test_the_exit_code_of_mixed_verdicts(tree: Tree, verdicts: tuple[str, ...], code: int) -> None:
    tree.gates(*(f'case("P.a", "{i}", verdict="{v}")' for i, v in enumerate(verdicts)))
    assert tree.run("-m", "gates").ret == code


def test_a_judged_failure_shows_the_message_in_order_and_no_frame_of_ours(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="fail")')
    result = tree.run("-m", "gates")
    labels = ["claim", "got", "wanted", "finding", "evidence", "likely cause", "in production", "next"]
    result.stdout.re_match_lines(["FAIL P.a.1: wrong-answer", *(rf"\s+{label}\s+\S" for label in labels)])
    result.stdout.no_re_match_line(r".*(Traceback|\.py:\d+: |def run_one|raise NotPassed)")
    result.stdout.re_match_lines(
        [r"FAILED test_fake.py::test_0\[P.a.1\] - .*FAIL P.a.1: wrong-answer", "=+ .*1 failed.*"]
    )


def test_a_harness_error_shows_its_traceback(tree: Tree) -> None:
    tree.gates('case("P.a", "1", collect="raise")')
    tree.run("-m", "gates").stdout.fnmatch_lines(["HARNESS_ERROR P.a.1: *", "Traceback*", "*the fault did not land*"])


def test_allow_inconclusive_lets_it_pass_and_still_says_so(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="inconclusive")', 'case("P.a", "2")')
    result = tree.run("-m", "gates", "--allow-inconclusive")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*INCONCL*", "*1 inconclusive*"])


def test_where_all_is_inconclusive_nothing_was_judged_allowed_or_not(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="inconclusive")')
    result = tree.run("-m", "gates", "--allow-inconclusive")
    assert result.ret == 13
    result.stdout.fnmatch_lines(["exit code 13: nothing was judged*"])


@pytest.mark.usefixtures("no_rdma")
def test_untestable_names_probe_and_mend_and_require_makes_it_fail(tree: Tree) -> None:
    tree.gates('case("P.a", "1", needs=("rdma",))', 'case("P.a", "2")')
    result = tree.run("-m", "gates")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["SKIPPED*UNTESTABLE needs rdma: rdma looked at; buy one"])
    result = tree.run("-m", "gates", "--require=gpu,rdma")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["UNTESTABLE P.a.1: --require names rdma, and this host lacks it"])


def test_nothing_selected_although_gates_were_asked_for_is_13(tree: Tree) -> None:
    tree.gates('case("P.a", "1")')
    assert tree.run("-m", "smoke").ret == 13
    assert tree.run("-m", "gates", "-k", "nothing").ret == 13
    assert not (tree.path / "out").exists()


def test_a_gate_test_that_judges_nothing_is_a_harness_error(tree: Tree) -> None:
    tree.gates('case("P.a", "1")')
    (tree.path / "test_fake.py").write_text(TESTS.replace("run_case(gate, case)", "pass"))
    result = tree.run("-m", "gates")
    assert result.ret == 12
    result.stdout.fnmatch_lines(["*ended without a verdict*"])


def test_a_broken_gate_module_is_a_harness_error(tree: Tree) -> None:
    tree.gates('case("P.a", "1")')
    tree.path.joinpath("test_other.py").write_text("import nowhere_at_all")
    assert tree.run("-m", "gates").ret == 12


def test_other_tests_keep_pytests_own_codes_and_leave_nothing(tree: Tree) -> None:
    tree.gates('case("P.a", "1")')
    for body, code in (("pass", 0), ("assert False", 1)):
        tree.path.joinpath("test_own.py").write_text(f"import pytest\n@pytest.mark.selftest\ndef test_x(): {body}\n")
        assert tree.run("-m", "selftest").ret == code
    assert not (tree.path / "out").exists()
    assert tree.pool_log == []


@pytest.mark.usefixtures("no_rdma")
def test_needs_and_untestable_of_tests_that_are_no_gates(tree: Tree) -> None:
    tree.gates('case("P.a", "1")')
    tree.path.joinpath("test_own.py").write_text(
        "import pytest\nfrom fixtures.errors import Untestable\n"
        "@pytest.mark.bench\n@pytest.mark.needs('rdma')\ndef test_x(): assert False\n"
        "@pytest.mark.bench\ndef test_y(): raise Untestable('gpu', 'none', 'buy')\n"
        "@pytest.fixture\ndef z(): raise Untestable('etcd', 'none', 'buy')\n"
        "@pytest.mark.bench\ndef test_z(z): pass\n"
    )
    result = tree.run("-m", "bench")
    assert result.ret == 13
    result.assert_outcomes(skipped=3, deselected=1)
    result = tree.run("-m", "bench", "--require=rdma,etcd")
    assert result.ret == 1
    result.assert_outcomes(skipped=1, failed=0, errors=2, deselected=1)


# Usage ----------------------------------------------------------------------------------------------------------------
BAD_OPTIONS = [
    ("--stack=nowhere.toml", "--stack nowhere.toml: no such file; give a path or one of: *"),
    ("--runtime=podman", "--runtime podman: one of process, docker, external"),
    ("--transport=ib", "--transport ib: one of tcp, rdma"),
    ("--transport=rdma", "--transport rdma: *needs device = *"),
    ("--engines=two", "--engines two: a whole number, 1 or more"),
    ("--engines=0", "--engines 0: a whole number, 1 or more"),
    ("--kv-config={", "--kv-config: not valid JSON: *"),
    ("--kv-config=[]", "--kv-config: a list, but it must be an object*"),
    ("--model=/nowhere/at/all", "--model /nowhere/at/all: *"),
    ("--reference=none", "--reference none: one of salt, engine"),
    ("--evidence=fake.toml", "--evidence fake.toml: is a file; give a folder"),
    ("--evidence=fake.toml/x", "--evidence fake.toml/x: */fake.toml is a file; give a folder"),
    ("--expect=nowhere", "--expect nowhere: no such file*"),
    ("--require=gpu,tape", "--require tape: one of *"),
    ("--scope=half", "--scope half: one of core, full"),
    ("--resume=nowhere", "--resume nowhere: no run here*"),
    ("--stack=", "--stack: empty; give it a value, or leave it out"),
    ("--expect=", "--expect: empty; *"),
    ("--engine-arg=", "--engine-arg: empty; *"),
    (
        "--engine-arg=--block_size=64",
        "--engine-arg --block_size=64: *--block-size is what the suite sets *block_tokens",
    ),
    (f"--engines={'9' * 5000}", "--engines 999*: a whole number, 1 or more"),
    ('--kv-config={"a": [NaN]}', "--kv-config: a[[]0[]] = nan: must be a finite number"),
    (f"--kv-config={'[' * 20000}", "--kv-config: nested too deeply; *"),
    (f"--model={'x' * 300}", "--model xxx*: cannot be looked at: OSError"),
]


@pytest.mark.parametrize(("option", "line"), BAD_OPTIONS, ids=[o[0][:40] for o in BAD_OPTIONS])
def test_a_bad_value_is_one_line_and_exit_code_4_before_anything_starts(tree: Tree, option: str, line: str) -> None:
    tree.gates('case("P.a", "1")')
    result = tree.run("-m", "gates", option)
    assert result.ret == 4
    said = [text for text in result.stderr.lines if text.strip()]
    assert len(said) == 1
    result.stderr.fnmatch_lines([f"ERROR: {line}"])
    assert tree.pool_log == []
    assert not (tree.path / "out").exists()


def test_bad_input_found_while_starting_the_stack_stops_the_run_with_4(tree: Tree) -> None:
    tree.gates('case("P.a", "1", variant="bad-input")', 'case("P.a", "2", variant="other")')
    result = tree.run("-m", "gates")
    assert result.ret == 4
    result.stdout.fnmatch_lines(["usage: --stack: port 1 is in use; choose another"])
    result.stdout.no_fnmatch_line("*Traceback*")
    assert not any("collect" in line for line in tree.pool_log)


def test_an_evidence_folder_that_cannot_be_written_is_4_before_anything_starts(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's answer is made up: root may write anywhere but to what is mounted read-only."""
    tree.gates('case("P.a", "1")')
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tree.path and allowed(path, mode))
    result = tree.run("-m", "gates", "--evidence=in/here")
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: --evidence in/here: nothing can be written to {tree.path}; give another*"])
    assert tree.pool_log == []


def test_an_evidence_folder_without_room_stops_the_run_with_4_and_keeps_what_it_has(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(descriptor: int, line: bytes) -> None:
        if b"P.a.2" in line:
            full.append(True)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append_whole(descriptor, line)

    full: list[bool] = []
    monkeypatch.setattr("reports.evidence.append_whole", append)
    tree.gates(*(f'case("P.a", "{n}")' for n in (1, 2, 3)))
    result = tree.run("-m", "gates")
    assert result.ret == 4
    result.stdout.fnmatch_lines(["usage: --evidence *: No space left on device; give a folder that can be written to*"])
    result.stdout.fnmatch_lines(["1 PASS, 2 NOT RUN"])
    result.stdout.no_fnmatch_line("*Traceback*")
    assert tree.pool_log[-1] == "close"


def test_the_header_shows_the_effective_stack_and_every_option(tree: Tree) -> None:
    tree.gates('case("P.a", "1")')
    result = tree.run(
        "-m", "gates", "--engines=3", '--kv-config={"a": 1}', "--engine-arg=--seed=7", "--engine-arg=--api-key=verysecret"
    )  # fmt: skip
    result.stdout.fnmatch_lines(
        [
            "stack: fake (runtime process, platform cpu, transport tcp*",
            "engines e0, e1, e2: mooncake-store, *load failures: recompute, hash seed 0*kv config {'a': 1}*--seed=7*",
            "store: embedded*",
            "versions: *pytest *",
            "options: *--stack=fake.toml --engines=3 *--engine-arg=--seed=7*",
            "evidence: out/*-fake-*",
        ]
    )
    assert "verysecret" not in result.stdout.str()
    assert all("verysecret" not in p.read_text() for p in tree.run_dir.glob("*.jsonl"))


# Expectations ---------------------------------------------------------------------------------------------------------
KNOWN = {"id": "P.a.1", "verdict": "FAIL", "finding": "wrong-answer"}


def test_an_expected_failure_is_as_wanted_and_the_scoreboard_still_says_fail(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="fail")', 'case("P.a", "2")')
    result = tree.run("-m", "gates", tree.expect(KNOWN))
    assert result.ret == 0
    result.assert_outcomes(passed=1, xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL*P.a.1*wrong-answer: known (not reported)"])
    result.stdout.re_match_lines([r"\s+FAIL\s+1  wrong-answer.*\[expected\]"])


@pytest.mark.parametrize(
    ("verdict", "code", "said"),
    [
        ("pass", 10, "PASS P.a.1: expected FAIL wrong-answer (known), got PASS; it no longer fails*"),
        ("hang", 10, "FAIL P.a.1: expected FAIL wrong-answer (known), got FAIL hang"),
        ("inconclusive", 11, "INCONCLUSIVE P.a.1: expected FAIL wrong-answer*"),
        ("harness", 12, "HARNESS_ERROR P.a.1: *"),
    ],
)
def test_any_other_verdict_than_the_expected_one_is_loud(tree: Tree, verdict: str, code: int, said: str) -> None:
    tree.gates(f'case("P.a", "1", verdict="{verdict}")')
    result = tree.run("-m", "gates", tree.expect(KNOWN))
    assert result.ret == code
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])


def test_an_expectation_for_another_version_is_not_applied_and_said_twice(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="fail")')
    result = tree.run("-m", "gates", tree.expect(KNOWN, versions='{ pytest = "<1" }'))
    assert result.ret == 10
    assert sum("NOT APPLIED: P.a.1: recorded for pytest <1" in line for line in result.outlines) == 2


def test_an_expectation_of_a_case_that_was_not_selected_is_fine_and_of_none_is_usage(tree: Tree) -> None:
    tree.gates('case("P.a", "1", core=False)', 'case("P.a", "2")')
    assert tree.run("-m", "gates", tree.expect(KNOWN)).ret == 0
    result = tree.run("-m", "gates", tree.expect({**KNOWN, "id": "P.a.3"}))
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: known.toml: *(P.a.3): no gate has a case of this id*"])


# Selection and order --------------------------------------------------------------------------------------------------
def test_scope_core_leaves_cases_out_and_lists_them_as_not_run(tree: Tree) -> None:
    tree.gates('case("P.a", "1")', 'case("P.a", "2", core=False)', 'case("P.a", "3", core=False, smoke=True)')
    result = tree.run("-m", "gates")
    result.assert_outcomes(passed=1, deselected=2)
    result.stdout.fnmatch_lines(["NOT RUN*2 cases: outside the core; --scope full runs it (P.a.2, P.a.3)"])
    tree.run("-m", "gates", "--scope=full").assert_outcomes(passed=3)
    tree.run("-m", "smoke").assert_outcomes(passed=1, deselected=2)
    tree.run("-m", "gates", "-k", "P.a.2").assert_outcomes(passed=1, deselected=2)
    result = tree.run("-m", "gates", "-k", "P.a.1")
    result.stdout.fnmatch_lines(["NOT RUN*outside the core*(P.a.2, P.a.3)"])


def test_cases_are_ordered_so_that_stacks_start_as_few_times_as_possible(tree: Tree) -> None:
    tree.gates(
        'case("P.a", "v1", variant="v")',
        'case("P.a", "d1", dirties=True)',
        'case("P.a", "b1")',
        'case("D.b", "v2", variant="v", dirties=True)',
        'case("D.b", "b2")',
        'case("D.b", "v3", variant="v")',
    )
    assert tree.run("-m", "gates").ret == 0
    assert tree.pool_log == [
        "start fake", "collect P.a.b1", "collect D.b.b2", "collect P.a.d1",
        "start v", "collect P.a.v1", "collect D.b.v3", "collect D.b.v2", "close",
    ]  # fmt: skip


def test_a_dirtying_or_raising_case_costs_a_new_stack(tree: Tree) -> None:
    tree.gates('case("P.a", "1", collect="raise")', 'case("P.a", "2", dirties=True)', 'case("P.a", "3", dirties=True)')
    tree.run("-m", "gates")
    assert tree.pool_log.count("start fake") == 3


def test_an_engine_that_dies_at_its_first_request_is_the_stacks_failure(tree: Tree) -> None:
    tree.gates('case("P.a", "1", variant="dies")', 'case("P.a", "2", variant="no-start")', 'case("P.a", "3")')
    assert tree.run("-m", "gates").ret == 10
    verdicts = {v.case_id: v for v in load_run(tree.run_dir).history.of(r.Verdict)}
    died = verdicts["P.a.1"]
    assert (died.outcome, died.finding) == (r.Outcome.FAIL, r.FindingCode.ENGINE_DIED)
    assert "AssertionError: not that way" in died.got
    assert verdicts["P.a.2"].outcome is r.Outcome.HARNESS_ERROR
    assert verdicts["P.a.3"].outcome is r.Outcome.PASS


def test_an_engine_that_refuses_what_a_gate_asks_for_is_untestable_where_the_gate_expects_that(tree: Tree) -> None:
    tree.gates('case("P.families", "1", variant="refused")', 'case("P.a", "1", variant="refused")')
    assert tree.run("-m", "gates").ret == 12
    verdicts = {v.case_id: v for v in load_run(tree.run_dir).history.of(r.Verdict)}
    assert verdicts["P.families.1"].outcome is r.Outcome.UNTESTABLE
    assert "vLLM 0.1 says at its start: ValueError: x is not supported" in verdicts["P.families.1"].got
    assert verdicts["P.a.1"].outcome is r.Outcome.HARNESS_ERROR


BLAMED = ("dead", "dead-later", "dead-beside-a-fault")
NOT_BLAMED = ("dead-hurt", "dead-at-a-link", "dead-stopped", "dead-replaced", "dead-outside", "dead-unseen", "raise")


def test_an_engine_that_ends_by_itself_in_a_case_is_the_stacks_failure_and_one_that_was_hurt_is_not(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fixtures.deaths.SETTLE_S", 0.25)
    tree.gates(*(f'case("P.a", "{kind}", collect="{kind}")' for kind in (*BLAMED, *NOT_BLAMED)))
    assert tree.run("-m", "gates").ret == 10
    verdicts = {v.case_id.removeprefix("P.a."): v for v in load_run(tree.run_dir).history.of(r.Verdict)}
    for kind in BLAMED:
        died = verdicts.pop(kind)
        assert (died.outcome, died.finding) == (r.Outcome.FAIL, r.FindingCode.ENGINE_DIED), kind
        assert died.got == "engine e0 ended by itself (exit code 1): AssertionError"
    assert sorted(verdicts) == sorted(NOT_BLAMED)
    assert {v.finding for v in verdicts.values()} == {r.FindingCode.HARNESS_EXCEPTION}, verdicts


def test_a_case_at_whose_end_an_engine_is_gone_is_no_pass_and_the_next_one_has_a_stack_of_its_own(tree: Tree) -> None:
    tree.gates(
        'case("P.a", "1", collect="dead-quietly")',
        'case("P.a", "2", collect="dead-quietly", verdict="fail")',
        'case("P.a", "3")',
    )
    assert tree.run("-m", "gates").ret == 10
    found = {v.case_id: v.finding for v in load_run(tree.run_dir).history.of(r.Verdict)}
    assert found == {"P.a.1": "engine-died", "P.a.2": "wrong-answer", "P.a.3": ""}
    assert tree.pool_log.count("start fake") == 3


# Ends ---------------------------------------------------------------------------------------------------------------
def test_an_interrupt_closes_the_pool_and_keeps_what_was_judged(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LEFTOVER", "1")
    tree.gates('case("P.a", "1", verdict="fail")', 'case("P.a", "2", collect="interrupt")', 'case("P.a", "3")')
    result = tree.run("-m", "gates")
    assert result.ret == 2
    assert tree.pool_log[-1] == "close"
    result.stdout.fnmatch_lines(
        ["NOT RUN*2 cases:*(P.a.2, P.a.3)", "left behind, removed by force: /dev/shm/psm_left", "evidence: *"]
    )
    history = load_run(tree.run_dir).history
    assert [v.case_id for v in history.of(r.Verdict)] == ["P.a.1"]
    assert not history.for_case("P.a.2").complete


def test_a_second_interrupt_costs_no_summary(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_INTERRUPT", "1")
    tree.gates('case("P.a", "1", verdict="fail")', 'case("P.a", "2", collect="interrupt")')
    result = tree.run("-m", "gates")
    assert result.ret == 2
    result.stdout.fnmatch_lines(["1 FAIL, 1 NOT RUN", "left behind, *: interrupted again: *", "evidence: *"])
    assert load_run(tree.run_dir).history.of(r.RunFinished)


def test_a_killed_run_keeps_readable_evidence_and_can_be_resumed(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="fail")', 'case("P.a", "2", collect="block")', 'case("P.a", "3")')
    command = [sys.executable, "-m", "pytest", *tree.args, "-m", "gates"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(
            "the case that blocks",
            (tree.path / "blocked").exists,
            bound_s=30,
            bound_source="a cold start of pytest on a busy machine",
            dead=lambda: None if process.poll() is None else "pytest ended",
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    history = load_run(tree.run_dir).history
    assert [v.case_id for v in history.of(r.Verdict)] == ["P.a.1"]
    assert history.for_case("P.a.2").facts("seen")
    assert not history.of(r.RunFinished)

    fake = tree.path / "fake.py"
    fake.write_text(fake.read_text().replace('does == "block"', 'does == "not any more"'))
    (tree.path / "all-pass").touch()
    (tree.path / "pool.log").unlink()
    result = tree.run("-m", "gates", "--resume=latest")
    assert result.ret == 10, "the verdict from before the kill stands"
    assert [line for line in tree.pool_log if "collect" in line] == ["collect P.a.2", "collect P.a.3"]
    result.stdout.fnmatch_lines(["FAIL P.a.1: wrong-answer", "1 verdicts carried over*"])
    board = verdicts_json.load(tree.run_dir / "verdicts.json")
    assert [(row.verdict.case_id, row.verdict.outcome) for row in board.rows] == [
        ("P.a.1", "FAIL"), ("P.a.2", "PASS"), ("P.a.3", "PASS"),
    ]  # fmt: skip
    assert set(load_run(tree.run_dir).histories) == {"history-main", "history-main-2"}


def test_resume_judges_again_what_was_not_decided_and_refuses_another_stack(tree: Tree) -> None:
    tree.gates('case("P.a", "1")', 'case("P.a", "2", verdict="inconclusive")', 'case("P.a", "3", verdict="harness")')
    assert tree.run("-m", "gates").ret == 12
    result = tree.run("-m", "gates", "--resume=latest", "--engines=3")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --resume *: it ran on another stack*"])
    (tree.path / "all-pass").touch()
    assert tree.run("-m", "gates", f"--resume={tree.run_dir.name}").ret == 0
    assert [line for line in tree.pool_log if "P.a.1" in line] == ["collect P.a.1"]


def test_resume_does_not_take_over_what_another_version_of_the_gate_judged(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="fail")')
    assert tree.run("-m", "gates").ret == 10
    fake = tree.path / "fake.py"
    fake.write_text(fake.read_text().replace('proof = ("d1",)', 'proof = ("d1",)\n    version = 2'))
    (tree.path / "all-pass").touch()
    result = tree.run("-m", "gates", "--resume=latest")
    assert result.ret == 0
    assert [line for line in tree.pool_log if "collect" in line] == ["collect P.a.1"] * 2
    result.stdout.no_fnmatch_line("*carried over*")


def test_junit_properties_carry_case_verdict_and_finding(tree: Tree) -> None:
    tree.gates('case("P.a", "1", verdict="fail")')
    tree.run("-m", "gates", "--junitxml=j.xml")
    text = (tree.path / "j.xml").read_text()
    for name, value in (("case", "P.a.1"), ("verdict", "FAIL"), ("finding", "wrong-answer")):
        assert f'<property name="kvgates.{name}" value="{value}"' in text


# xdist ----------------------------------------------------------------------------------------------------------------
def test_xdist_merges_verdicts_of_workers_and_decides_in_the_controller(tree: Tree) -> None:
    tree.gates(
        'case("P.a", "1", variant="v")',
        'case("P.a", "2", verdict="fail")',
        'case("P.a", "3")',
        'case("P.a", "4", variant="v", verdict="inconclusive")',
        'case("P.a", "5", variant="w", verdict="hang")',
    )
    result = tree.run("-m", "gates", "-n2", "--dist=loadgroup", tree.expect({**KNOWN, "id": "P.a.2"}))
    assert result.ret == 10
    result.assert_outcomes(passed=2, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(["FAIL P.a.5: hang"])
    board = verdicts_json.load(tree.run_dir / "verdicts.json")
    assert {row.verdict.case_id: str(row.verdict.outcome) for row in board.rows} == {
        "P.a.1": "PASS", "P.a.2": "FAIL", "P.a.3": "PASS", "P.a.4": "INCONCLUSIVE", "P.a.5": "FAIL",
    }  # fmt: skip
    histories = load_run(tree.run_dir).histories
    assert set(histories) == {"history-gw0", "history-gw1"}
    groups = [{h.for_case(c).case.stack_id for c in h.case_ids()} for h in histories.values()]
    assert sum(map(len, groups)) == 3, "each stack was started once, by one worker"
    assert tree.pool_log.count("close") == 2


def test_a_worker_that_dies_inside_a_case_is_a_harness_error(tree: Tree) -> None:
    tree.gates('case("P.a", "1", collect="die")')
    result = tree.run("-m", "gates", "-n1", "--dist=loadgroup", "--max-worker-restart=0")
    assert result.ret == 12
    result.stdout.fnmatch_lines(["harness error: test_fake.py::test_0?P.a.1? broke in its worker"])


def test_bad_input_found_by_a_worker_is_4(tree: Tree) -> None:
    tree.gates('case("P.a", "1", variant="bad-input")')
    result = tree.run("-m", "gates", "-n1", "--dist=loadgroup")
    assert result.ret == 4
    result.stdout.fnmatch_lines(["usage: --stack: port 1 is in use; choose another"])


def test_a_verdict_survives_the_way_from_worker_to_controller() -> None:
    from fixtures.pytest_support.outcomes import Disposition, Judged

    verdict = r.Verdict(case_id="P.a.1", gate="P.a", outcome=r.Outcome.PASS, claim="c", numbers={"x": 1.5})
    judged = Judged(verdict=verdict, disposition=Disposition.PASSED)
    assert msgspec.json.decode(msgspec.json.encode(judged), type=Judged) == judged


DEPLOYED = """
name = "prod"
runtime = "external"
[store]
[engine]
served_model_name = "m"
[[engines]]
[external]
master_admin = "http://127.0.0.1:9003"
engines = { e0 = "http://127.0.0.1:8000" }
"""


def test_nothing_is_expected_of_a_deployed_stack_and_its_versions_are_not_claimed(tree: Tree) -> None:
    """What is installed here matches the entry, and says nothing of what runs there."""
    tree.gates('case("P.a", "1")')
    (tree.path / "prod.toml").write_text(DEPLOYED)
    result = tree.run("-m", "gates", "--stack=prod.toml", tree.expect(KNOWN))
    result.stdout.fnmatch_lines(
        [
            "*versions of this environment (a deployed stack has its own): *",
            "*NOT APPLIED: P.a.1: the stack is deployed*",
        ]
    )


def test_an_evidence_folder_behind_a_broken_link_is_4(tree: Tree) -> None:
    tree.gates('case("P.a", "1")')
    (tree.path / "gone").symlink_to(tree.path / "nowhere")
    result = tree.run("-m", "gates", "--evidence=gone")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --evidence gone: is a link to nowhere; give a folder"])
    assert tree.pool_log == []
