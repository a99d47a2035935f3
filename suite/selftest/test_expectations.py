"""Expectations files: good ones load, each kind of bad entry is one line that names file and entry."""

from pathlib import Path

import pytest

from fixtures.errors import UsageError
from fixtures.expectations import EXPECTATIONS_DIR, load_expectations
from fixtures.pytest_support.outcomes import Disposition, dispose
from reports import records as r

pytestmark = pytest.mark.selftest

GOOD = {
    "id": '"X.a.1"',
    "verdict": '"FAIL"',
    "finding": '"zero-hits"',
    "reason": '"known"',
    "link": '"not reported"',
    "observed": '["r1", "r2", "r3"]',
    "versions": '{ engine = "==1.2" }',
}
INSTALLED = {"engine": "1.2", "store": "0.3.13.post1"}.get


def write(tmp_path: Path, *entries: dict[str, str]) -> str:
    path = tmp_path / "known.toml"
    tables = ["[[case]]\n" + "\n".join(f"{k} = {v}" for k, v in e.items() if v) for e in entries]
    path.write_text("\n".join(tables))
    return str(path)


def verdict(outcome: str, *codes: str) -> r.Verdict:
    findings = tuple(r.Finding(code=r.FindingCode(code), message="") for code in codes)
    return r.Verdict(case_id="X.a.1", gate="X.a", outcome=r.Outcome(outcome), claim="", findings=findings)


def test_a_good_entry_accepts_its_verdict_and_finding_and_nothing_else(tmp_path: Path) -> None:
    expected = load_expectations(write(tmp_path, GOOD), {"X.a.1"}, installed=INSTALLED).results["X.a.1"]
    assert expected.met_by(verdict("FAIL", "zero-hits"))
    assert not expected.met_by(verdict("FAIL", "wrong-answer"))
    assert not expected.met_by(verdict("PASS"))
    assert not expected.met_by(verdict("HARNESS_ERROR", "harness-exception"))
    assert expected.reason == "known"


def test_one_of_adds_accepted_verdicts(tmp_path: Path) -> None:
    entry = {**GOOD, "one_of": '[{ verdict = "PASS" }, { verdict = "INCONCLUSIVE", finding = "no-control" }]'}
    expected = load_expectations(write(tmp_path, entry), {"X.a.1"}, installed=INSTALLED).results["X.a.1"]
    assert [expected.met_by(verdict(*v)) for v in (("PASS",), ("INCONCLUSIVE", "no-control"), ("FAIL", "hang"))] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("new", ["engine-died", "kv-leak", "hits-not-back", "admission-refused"])
def test_a_failure_of_its_own_does_not_hide_behind_a_known_one(tmp_path: Path, new: str) -> None:
    slow = {**GOOD, "finding": '"slow-degrade"'}
    expected = load_expectations(write(tmp_path, slow), {"X.a.1"}, installed=INSTALLED).results["X.a.1"]
    assert expected.met_by(verdict("FAIL", "slow-degrade", "unbounded-lookups", "unexplained-log"))
    worse = verdict("FAIL", "slow-degrade", new)
    assert not expected.met_by(worse)
    disposition, why = dispose(worse, expected)
    assert disposition is Disposition.FAILED
    assert why == f"expected FAIL slow-degrade (known), got FAIL slow-degrade, and beside it {new}"
    known = {**slow, "also": f'["{new}"]'}
    expected = load_expectations(write(tmp_path, known), {"X.a.1"}, installed=INSTALLED).results["X.a.1"]
    assert expected.met_by(worse)


def test_wrong_answers_may_come_with_reuse_that_came_out_right(tmp_path: Path) -> None:
    wrong = {**GOOD, "finding": '"wrong-answer"'}
    expected = load_expectations(write(tmp_path, wrong), {"X.a.1"}, installed=INSTALLED).results["X.a.1"]
    assert expected.met_by(verdict("FAIL", "wrong-answer", "foreign-reuse"))
    assert not expected.met_by(verdict("FAIL", "wrong-answer", "kv-leak"))


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ('{ engine = "==1.3" }', "engine ==1.3; installed is 1.2"),
        ('{ other = ">=1" }', "other >=1, which is not installed"),
        ('{ engine = "==1.2", store = ">0.4" }', "store >0.4; installed is 0.3.13.post1"),
    ],
)
def test_another_version_is_not_applied_and_says_so(tmp_path: Path, versions: str, why: str) -> None:
    loaded = load_expectations(write(tmp_path, {**GOOD, "versions": versions}), {"X.a.1"}, installed=INSTALLED)
    assert not loaded.results
    assert [(n.case_id, why in n.why) for n in loaded.not_applied] == [("X.a.1", True)]
    assert loaded.notices() == [f"expectation NOT APPLIED: X.a.1: {loaded.not_applied[0].why}"]


def test_nothing_is_known_of_a_stack_that_is_deployed(tmp_path: Path) -> None:
    """Its versions are those of its hosts: what is installed here may match, and says nothing."""
    entries = write(tmp_path, GOOD, {**GOOD, "id": '"X.a.2"'})
    loaded = load_expectations(entries, {"X.a.1", "X.a.2"}, installed=INSTALLED, elsewhere="it is deployed")
    assert not loaded.results
    assert loaded.notices() == ["expectations NOT APPLIED (2): it is deployed"]


BAD = [
    ({"id": '"X.a.2"'}, "no gate has a case of this id"),
    ({"verdict": '"PASS"', "finding": ""}, "PASS' needs no entry"),
    ({"verdict": '"HARNESS_ERROR"', "finding": '"no-pressure"'}, "HARNESS_ERROR can never be expected"),
    ({"also": '["slow-degrade"]'}, "only wrong-answer, foreign-reuse"),
    ({"one_of": '[{ verdict = "HARNESS_ERROR" }]'}, "HARNESS_ERROR can never be expected"),
    ({"verdict": '"UNTESTABLE"'}, "one of PASS, FAIL, INCONCLUSIVE"),
    ({"verdict": '"Fail"'}, "verdict = 'Fail'"),
    ({"finding": '"zero-hit"'}, "no finding of FAIL; one of .*zero-hits"),
    ({"finding": ""}, "finding = '' is no finding of FAIL"),
    ({"finding": '"no-control"'}, "'no-control' is no finding of FAIL"),
    ({"one_of": '[{ verdict = "PASS", finding = "hang" }]'}, "PASS has no finding"),
    ({"reason": '"  "'}, "reason is empty"),
    ({"reason": '""', "one_of": '[{ verdict = "PASS" }]'}, "why it varies"),
    ({"reason": ""}, "missing required field `reason`"),
    ({"link": '"soon"'}, "a URL, or 'not reported'"),
    ({"observed": '["r1", "r2"]'}, "names 2 different"),
    ({"observed": '["r1", "r1", "r1"]'}, "names 1 different"),
    ({"versions": "{}"}, "versions is empty"),
    ({"versions": '{ engine = "1.2" }'}, "no version range"),
    ({"versions": '{ engine = "" }'}, "versions.engine is empty"),
    ({"comment": '"x"'}, "unknown field `comment`"),
    ({"observed": "3"}, "Expected `array`"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:24] for _, m in BAD])
def test_a_bad_entry_is_one_line_with_file_and_entry(tmp_path: Path, change: dict[str, str], message: str) -> None:
    path = write(tmp_path, {**GOOD, **change})
    with pytest.raises(UsageError, match=message) as caught:
        load_expectations(path, {"X.a.1"}, installed=INSTALLED)
    text = str(caught.value)
    assert text.startswith(
        f"known.toml: [[case]] 1 ({GOOD['id'] if 'id' not in change else change['id']})".replace('"', "")
    )
    assert "\n" not in text


def test_an_id_listed_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[\[case\]\] 2 \(X.a.1\): .*listed twice"):
        load_expectations(write(tmp_path, GOOD, GOOD), {"X.a.1"}, installed=INSTALLED)


@pytest.mark.parametrize(
    ("text", "message"),
    [("x =", "not valid TOML"), ("cases = 1", "unknown field `cases`"), ("case = 1", r"\[\[case\]\]")],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_expectations(str(path), set())


def test_a_missing_file_names_the_ready_ones() -> None:
    with pytest.raises(UsageError, match="--expect nowhere: no such file; give a path or one of: "):
        load_expectations("nowhere", set())


@pytest.mark.parametrize("path", sorted(EXPECTATIONS_DIR.glob("*.toml")), ids=lambda p: p.stem)
def test_every_file_of_the_suite_is_valid_against_the_gates_that_exist(path: Path) -> None:
    from suite.gates import registry

    universe = {case.id for gate in registry().values() for case in gate.cases()}
    assert load_expectations(str(path), universe)
