"""Source of the inner test tree of ``test_plugin``: gates that come to any verdict, and a pool without processes.

The pool is a stand-in because a real stack takes half a minute; what it replaces is exercised by the gates themselves.
"""

CONFTEST = """
import os
import pytest
from fake import GATES, FakePool

pytest_plugins = ["fixtures.plugin"]

def pytest_kvgates_registry():
    return {gate.id: gate for gate in GATES}

def pytest_kvgates_pool(run_dir, record, progress):
    return FakePool(run_dir, record)
"""

FAKE = """
import os
import time
from pathlib import Path
from types import SimpleNamespace

from fixtures.errors import EngineDied, EngineRefused, HarnessError, Untestable, UsageError
from reports import records as r
from suite.contract import Case, Gate, outcome_of

CODES = {"fail": ["wrong-answer"], "hang": ["hang"], "inconclusive": ["no-control"], "harness": ["no-pressure"], "pass": []}
POOL_LOG = Path(__file__).parent / "pool.log"


def say(text):
    with POOL_LOG.open("a") as file:
        file.write(text + chr(10))


class FakeHandle:
    stopped = False
    code = None
    later_s = 0.0

    def alive(self):
        if self.code == "unseen":
            raise RuntimeError("the daemon does not answer")
        return self.code is None or time.monotonic() < self.later_s

    def exit_code(self):
        return None if self.alive() else self.code

    def log_tail(self, lines=20):
        return ["Traceback (most recent call last):", "  assert req_id in self.requests", "AssertionError", "EngineDeadError: later"]


class FakeStack:
    def __init__(self, spec, number, record):
        self.spec, self.stack_id, self.dirty, self.record = spec, f"s{number}", False, record
        self.engines = {"e0": SimpleNamespace(handle=FakeHandle())}
        self.names = ["e0"]

    def fact(self, name, value):
        self.record(r.Fact(name=name, t_s=time.monotonic(), value=value))

    def heal_all(self):
        return []


class FakePool:
    def __init__(self, run_dir, record):
        self.record, self.number, self.current = record, 0, None

    def acquire(self, spec):
        if self.current is not None and self.current.spec.key() == spec.key() and not self.current.dirty:
            return self.current
        if spec.name == "no-rdma":
            raise Untestable("rdma", "no device", "buy one")
        if spec.name == "bad-input":
            raise UsageError("--stack: port 1 is in use; choose another")
        if spec.name == "no-start":
            raise HarnessError("engine e0 exited with 1")
        if spec.name == "refused":
            raise EngineRefused("engine e0 exited with 1", "ValueError: x is not supported", "0.1")
        if spec.name == "dies":
            raise EngineDied("e0", "AssertionError: not that way", ("last line",))
        self.number += 1
        self.current = FakeStack(spec, self.number, self.record)
        say(f"start {spec.name}")
        return self.current

    def close(self):
        say("close")
        if os.environ.get("FAKE_INTERRUPT"):
            raise KeyboardInterrupt
        return ["/dev/shm/psm_left"] if os.environ.get("FAKE_LEFTOVER") else []


class FakeGate(Gate):
    claim = "what is claimed holds"
    proof = ("d1",)

    def __init__(self, id, cases):
        self.id, self._cases = id, cases
        self.may_be_refused = id == "P.families"

    def cases(self):
        return self._cases

    def stack(self, base, case):
        return base.with_changes(name=case.variant) if case.variant else base

    def collect(self, stack, case):
        say(f"collect {case.id}")
        stack.record(r.Fact(name="seen", t_s=time.monotonic(), value=case.params))
        does = case.params.get("collect", "")
        if does == "raise":
            raise HarnessError("the fault did not land")
        if does.startswith("dead"):
            handle = stack.engines["e0"].handle
            handle.code = {"dead-outside": -9, "dead-unseen": "unseen"}.get(does, 1)
            handle.stopped = does == "dead-stopped"
            if does == "dead-later":
                handle.later_s = time.monotonic() + 0.1
            if does == "dead-replaced":
                stack.engines["e0"] = SimpleNamespace(handle=FakeHandle())
            target = {"dead-hurt": "e0", "dead-at-a-link": "data:e0", "dead-beside-a-fault": "master|e00"}.get(does)
            if target:
                fault = dict(fault_id="f", fault="kill", target=target, landed=True, t_s=time.monotonic())
                stack.record(r.FaultRecord(action="inject", **fault))
            if does != "dead-quietly":
                raise ConnectionRefusedError("no answer")
        if does == "interrupt":
            raise KeyboardInterrupt
        if does == "die":
            os._exit(3)
        if does == "block":
            (POOL_LOG.parent / "blocked").touch()
            time.sleep(60)  # why: the test kills this process

    def judge(self, history):
        want = history.case.params.get("verdict", "pass")
        if Path(__file__).with_name("all-pass").exists():
            want = "pass"
        if want == "crash":
            raise ZeroDivisionError("checker")
        if want == "lie":
            return self.verdict(history, r.Outcome.FAIL)
        findings = tuple(r.Finding(code=r.FindingCode(c), message=f"saw {c}") for c in CODES[want])
        return self.verdict(history, outcome_of(findings), findings=findings, got="a", wanted="b", cause="c", production="d")


def case(gate, name, *, needs=(), core=True, smoke=False, dirties=False, variant="", **params):
    return Case(f"{gate}.{name}", params, needs, core, smoke, dirties, variant)

"""

TESTS = """
from fake import GATES
from suite.gates import gate_cases

def make(gate):
    @gate_cases(gate)
    def test(run_case, case):
        run_case(gate, case)
    return test

for number, gate in enumerate(GATES):
    globals()[f"test_{number}"] = make(gate)
"""
