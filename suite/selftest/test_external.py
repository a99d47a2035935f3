"""The external runtime: units that the suite did not start, hurt by the user's commands, each with a proof from outside.

The deployed unit is a real HTTP server process that answers as a vLLM engine's control endpoints do; its commands are ``kill`` and a shell script.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fixtures.attach import api_key, look_at
from fixtures.errors import HarnessError, Untestable, UsageError
from fixtures.faults import Freeze, Kill, Restart, Stop
from fixtures.models import resolve_model
from fixtures.pytest_support.options import effective_spec
from fixtures.pytest_support.run import check_stack
from fixtures.runtimes import external
from fixtures.runtimes.base import Launch
from fixtures.runtimes.external import ExternalRuntime, ExternalUnit
from fixtures.spec import StackSpec, parse_spec, require_built
from fixtures.spec_external import CommandSpec, ExternalSpec
from fixtures.waiting import wait_for
from reports import records as r
from reports.history import History
from suite.contract import safe_judge
from suite.gates.arms import NOT_PLANTED
from suite.gates.test_prefix import BOUNDARY
from suite.selftest.process_helpers import own_state_dir
from suite.selftest.simulated_stack import SimulatedStack, run_case, simulated_spec

pytestmark = pytest.mark.selftest

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
ANSWERS = {
    "/health": "",
    "/version": json.dumps({"version": "0.32.0"}),
    "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}),
    "/html/v1/models": "<html>please log in</html>",
    "/list/v1/models": "[1]",
    "/metrics": 'vllm:cache_config_info{a="1",block_size="32",z="x"} 1.0',
}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = ANSWERS[self.path].encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
open(sys.argv[2], "w").write(f"{os.getpid()} {server.server_address[1]}")
server.serve_forever()
"""


ROOT = Path(__file__).resolve().parents[2]
RUNTIMES: list[ExternalRuntime] = []
"""Made by a test; closed when it ends."""


class Deployed:
    """A server process and the commands that act on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.note = folder / "note"
        self.port = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "server.py").write_text(SERVER)
        (folder / "start.sh").write_text(
            f'exec setsid "{sys.executable}" -SE "{folder}/server.py" "$(cat "{folder}/port")" "{self.note}" >/dev/null 2>&1 &\n'
        )
        self.up()

    def up(self) -> None:
        self.note.unlink(missing_ok=True)
        self.processes.append(
            subprocess.Popen([sys.executable, "-SE", str(self.folder / "server.py"), str(self.port), str(self.note)])
        )
        wait_for("the server", self._noted, bound_s=30, bound_source="a Python process starts", poll_s=0.01)
        self.port = int(self.note.read_text().split()[1])
        (self.folder / "port").write_text(str(self.port))

    def _noted(self) -> bool:
        return self.note.exists() and len(self.note.read_text().split()) == 2

    @property
    def pid(self) -> int:
        return int(self.note.read_text().split()[0])

    def commands(self, **other: tuple[str, ...]) -> CommandSpec:
        def send(word: str) -> tuple[str, ...]:
            return ("sh", "-c", f'kill -{word} "$(cut -d" " -f1 "{self.note}")"')

        given: dict[str, tuple[str, ...]] = {
            "kill": send("KILL"),
            "freeze": send("STOP"),
            "thaw": send("CONT"),
            "stop": send("TERM"),
            "start": ("sh", str(self.folder / "start.sh")),
            "identity": ("sh", "-c", f'ps -o pid=,lstart= -p "$(cut -d" " -f1 "{self.note}")"'),
            "logs": ("echo", "log of {unit}"),
        }
        return CommandSpec(**(given | other))

    def down(self) -> None:
        for word in ("-CONT", "-KILL"):
            subprocess.run(["kill", word, str(self.pid)], check=False, capture_output=True)
        for process in self.processes:
            process.wait(10)


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    found = Deployed(tmp_path)
    yield found
    found.down()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server on loopback answers at once; one that was stopped never does."""
    monkeypatch.setattr(external, "PROBE_S", 0.6)
    monkeypatch.setattr(external, "LANDING_S", 8.0)
    with own_state_dir(monkeypatch):
        yield
        external.HURT.clear()
        while RUNTIMES:
            assert RUNTIMES.pop().close() == []


def unit_of(deployed: Deployed, tmp_path: Path, commands: CommandSpec | None = None, **more: Any) -> ExternalUnit:
    spec = ExternalSpec(
        engines={"e0": f"http://127.0.0.1:{deployed.port}"}, commands=commands or deployed.commands(), **more
    )
    launch = Launch("e0", "engine", (), {}, tmp_path / "e0")
    return ExternalUnit(launch, spec.engines["e0"], "/health", spec)


def stack_of(unit: ExternalUnit, tmp_path: Path, *, allow_faults: bool = True) -> Any:
    """What faults use of a stack. (A whole one needs engines.)"""
    spec = SimpleNamespace(
        external=SimpleNamespace(allow_faults=allow_faults),
        timeouts=SimpleNamespace(engine_ready_s=20.0, store_ready_s=20.0, stop_s=5.0),
    )
    records: list[Any] = []
    runtime = ExternalRuntime(tmp_path / "run")
    RUNTIMES.append(runtime)
    runtime.deployed["e0"] = unit
    return SimpleNamespace(
        spec=spec, faults_active=[], dirty=False, record=records.append, records=records, runtime=runtime,
        handle=lambda _: unit, engines={}, store=None, replace_handle=lambda *_: None, fact=lambda *_: None,
        progress=None,
    )  # fmt: skip


def test_a_kill_is_proven_by_the_endpoint_that_is_gone(deployed: Deployed, tmp_path: Path) -> None:
    unit = unit_of(deployed, tmp_path)
    stack = stack_of(unit, tmp_path)
    record = Kill("e0").inject(stack)
    assert record.landed
    assert record.proof["seen"][-2:] == ["gone", "gone"]
    assert not unit.alive()
    with pytest.raises(HarnessError, match="gone already"):
        Kill("e0").inject(stack)


def test_what_a_fault_of_the_run_ended_is_brought_back_and_nothing_else(deployed: Deployed, tmp_path: Path) -> None:
    unit = unit_of(deployed, tmp_path)
    assert not unit.bring_back(20.0, "selftest"), "it answers"
    unit.act("kill", "gone")
    assert unit.bring_back(20.0, "selftest")
    assert unit.look() == "answers"
    subprocess.run(["kill", "-KILL", str(deployed.pid)], check=True)
    wait_for("its end", lambda: unit.look() == "gone", bound_s=20, bound_source="selftest")
    assert not unit.bring_back(20.0, "selftest"), "nobody asked the suite to mend what ended by itself"


def test_an_orderly_stop_too(deployed: Deployed, tmp_path: Path) -> None:
    assert Stop("e0").inject(stack_of(unit_of(deployed, tmp_path), tmp_path)).landed


def test_a_freeze_is_proven_by_silence_and_healed_by_an_answer(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = unit_of(deployed, tmp_path)
    stack = stack_of(unit, tmp_path)
    fault = Freeze("e0")
    assert fault.inject(stack).landed
    assert unit.alive(), "a frozen unit is not dead"
    with monkeypatch.context() as patched:
        patched.setattr(external, "LANDING_S", 0.2)
        landed, _ = unit_of(deployed, tmp_path, deployed.commands(thaw=("true",))).act("thaw", "answers", before=None)
        assert not landed, "a heal that does nothing"
    healed = fault.heal(stack)
    assert healed is not None
    assert healed.landed
    assert unit.look() == "answers"


def test_a_command_that_does_nothing_has_not_landed(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "LANDING_S", 0.2)
    nothing = deployed.commands(kill=("true",), freeze=("true",), stop=("true",))
    for fault in (Kill("e0"), Freeze("e0"), Stop("e0")):
        assert not fault.inject(stack_of(unit_of(deployed, tmp_path, nothing), tmp_path)).landed


def test_a_restart_is_another_identity_at_the_same_place(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fixtures.revive as revive_module

    monkeypatch.setattr(
        revive_module, "ready_probe", lambda stack, unit: lambda: stack.handle(unit).look() == "answers"
    )
    monkeypatch.setattr(revive_module, "note_endpoint", lambda *_: None)
    stack = stack_of(unit_of(deployed, tmp_path), tmp_path)
    from fixtures.waiting import Silent

    stack.progress = Silent()
    record = Restart("e0").inject(stack)
    assert record.landed, record.proof
    assert record.proof["before"] != record.proof["after"]
    with pytest.raises(Untestable, match="other flags"):
        Restart("e0", {"--x": "1"}).inject(stack)


def test_nothing_is_hurt_without_leave(deployed: Deployed, tmp_path: Path) -> None:
    unit = unit_of(deployed, tmp_path)
    for fault in (Kill("e0"), Freeze("e0"), Stop("e0"), Restart("e0")):
        with pytest.raises(Untestable, match="allow-faults"):
            fault.inject(stack_of(unit, tmp_path, allow_faults=False))
    assert unit.look() == "answers"


def test_what_no_command_can_do_is_untestable_and_does_nothing(deployed: Deployed, tmp_path: Path) -> None:
    unit = unit_of(deployed, tmp_path, CommandSpec())
    stack = stack_of(unit, tmp_path)
    for fault in (Kill("e0"), Freeze("e0"), Stop("e0")):
        with pytest.raises(Untestable, match=r"external\.commands\."):
            fault.inject(stack)
    with pytest.raises(Untestable, match=r"external\.commands\.identity"):
        unit.processes()
    with pytest.raises(Untestable, match="sees no processes"):
        _ = unit.pid
    with pytest.raises(Untestable, match="deployed by somebody else"):
        stack.runtime.start(Launch("e9", "engine", (), {}, tmp_path))
    assert unit.look() == "answers"


def test_a_command_that_fails_is_said_in_its_own_words(deployed: Deployed, tmp_path: Path) -> None:
    unit = unit_of(deployed, tmp_path, deployed.commands(kill=("sh", "-c", "echo no such pod {unit} >&2; exit 3")))
    with pytest.raises(HarnessError, match="ended with 3: no such pod e0"):
        unit.act("kill", "gone")
    missing = unit_of(deployed, tmp_path, deployed.commands(kill=("/nowhere/at/all",)))
    with pytest.raises(HarnessError, match="nowhere"):
        missing.act("kill", "gone")
    slow = unit_of(deployed, tmp_path, deployed.commands(kill=("sleep", "60")), command_s=0.1)
    with pytest.raises(HarnessError, match="timed out"):
        slow.act("kill", "gone")


def test_commands_call_units_by_the_users_names_and_no_shell_reads_them(deployed: Deployed, tmp_path: Path) -> None:
    unit = unit_of(
        deployed, tmp_path, deployed.commands(logs=("echo", "[{unit}]", "$HOME;")), names={"e0": "vllm-0.pod"}
    )
    assert unit.command("logs") == "[vllm-0.pod] $HOME;\n"
    assert unit.read_log()
    assert unit.log_tail() == ["[vllm-0.pod] $HOME;"]
    assert not unit_of(deployed, tmp_path, CommandSpec()).read_log()


@pytest.mark.parametrize("separator", [r"\n", r"\0"])
def test_what_engines_have_to_agree_on_is_read_from_their_environment_and_no_secret(
    deployed: Deployed, tmp_path: Path, separator: str
) -> None:
    text = separator.join(("PYTHONHASHSEED=7", "HF_TOKEN=s3cret", "EDITOR=vi", "VLLM_HOST_IP=10.0.0.1", ""))
    unit = unit_of(deployed, tmp_path, deployed.commands(environ=("printf", text)))
    (seen,) = unit.processes()
    assert seen.env == {"PYTHONHASHSEED": "7", "VLLM_HOST_IP": "10.0.0.1"}
    (unseen,) = unit_of(deployed, tmp_path).processes()
    assert unseen.env == {}


def test_the_identity_of_a_unit_changes_with_its_process(deployed: Deployed, tmp_path: Path) -> None:
    unit = unit_of(deployed, tmp_path)
    first = unit.processes()
    assert first == unit.processes()
    unit.act("kill", "gone")
    deployed.up()
    assert unit.processes() != first


# Looking at what is deployed ------------------------------------------------------------------------------------------
TABLE = """
name = "prod"
runtime = "external"
[store]
[engine]
model = "tiny-base"
served_model_name = "m"
[[engines]]
[[engines]]
[external]
master_admin = "http://127.0.0.1:9003"
engines = { e0 = "http://127.0.0.1:8000", e1 = "http://gpu-b:8000/" }
"""


def spec_of(text: str = TABLE, **changes: str) -> StackSpec:
    for old, new in changes.items():
        text = text.replace(old, new)
    return require_built(parse_spec(text, "x.toml"), "x.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"needs an \[external\] table"),
        ("[external]\nengines = {e0 = 'http://a:1'}\nmaster_admin = 'http://m:1'", "no URL for engine 'e1'"),
        ("[external]\nengines = {e0 = 'http://a:1', e1 = 'http://b:1', e2 = 'http://c:1'}", "'e2' is no engine"),
        ("[external]\nengines = {e0 = 'a:1', e1 = 'http://b:1/v1'}", "no root URL"),
        ("[external]\nengines = {e0 = 'http://a:1', e1 = 'http://b:1'}", "master_admin"),
        (
            "[external]\nengines = {e0 = 'http://a:1', e1 = 'http://b:1'}\nmaster_admin = 'http://m:1'\nnames = {x = 'y'}",
            "'x' is no unit",
        ),
        (
            "[external]\nengines = {e0 = 'http://a:1', e1 = 'http://b:1'}\nmaster_admin = 'http://m:1'\ncommands = {freeze = ['x']}",
            "go together",
        ),
        ("[external]\nengines = {e0 = 'http://a:1', e1 = 'http://b:1'}\ncommands = {kil = ['x']}", "kil"),
    ],
)
def test_a_bad_table_is_one_line(text: str, message: str) -> None:
    head = TABLE.split("[external]")[0]
    with pytest.raises(UsageError, match=message) as caught:
        spec_of(head + text)
    assert "\n" not in str(caught.value)


def test_an_external_table_on_a_stack_that_the_suite_starts_is_refused() -> None:
    with pytest.raises(UsageError, match="runtime = 'external'"):
        require_built(parse_spec(TABLE.replace('runtime = "external"', ""), "x.toml"), "x.toml")


def test_facts_of_a_deployed_engine_are_looked_at_and_a_wrong_description_is_refused(deployed: Deployed) -> None:
    url = f"http://127.0.0.1:{deployed.port}"
    spec = spec_of()
    facts = look_at(spec, spec.engines[0], resolve_model("tiny-base"), url, {})
    assert (facts.served_model, facts.versions, facts.block_tokens) == ("m", {"vllm": "0.32.0"}, 32)
    assert facts.kv_bytes_per_token == 2048
    for wrong, message in (
        ({"block_tokens": 64}, "block_tokens is 32, the spec says 64"),
        ({"max_model_len": 8192}, "max_model_len is 4096, the spec says 8192"),
        ({"served_model_name": "other"}, "serves m, not 'other'"),
    ):
        with pytest.raises(UsageError, match=message):
            look_at(spec, msgspec.structs.replace(spec.engines[0], **wrong), resolve_model("tiny-base"), url, {})
    for path in ("/html", "/list"):  # behind a proxy's page, or another server
        with pytest.raises(UsageError, match="/v1/models: not the answer of a vLLM server"):
            look_at(spec, spec.engines[0], resolve_model("tiny-base"), f"{url}{path}", {})
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:9/v1/models"):
        look_at(spec, spec.engines[0], resolve_model("tiny-base"), "http://127.0.0.1:9", {})


def test_an_api_key_comes_from_the_environment_and_stays_out_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ExternalSpec(engines={}, api_key_env="KVGATES_TEST_KEY")
    monkeypatch.delenv("KVGATES_TEST_KEY", raising=False)
    with pytest.raises(UsageError, match="KVGATES_TEST_KEY"):
        api_key(spec)
    monkeypatch.setenv("KVGATES_TEST_KEY", "s3cret")
    assert api_key(spec) == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in json.dumps(msgspec.to_builtins(spec))


def test_a_case_that_needs_another_stack_than_the_deployed_one_is_untestable() -> None:
    base = spec_of()
    boundary = next(iter(BOUNDARY.cases()))
    check_stack(BOUNDARY, BOUNDARY.stack(base, boundary), base)
    with pytest.raises(Untestable, match=r"e1\.max_model_len 4096 -> 512"):
        check_stack(BOUNDARY, base.with_engine("e1", max_model_len=512), base)
    with pytest.raises(Untestable, match=r"store\.client_ttl_s 10 -> 3"):
        check_stack(BOUNDARY, base.with_store(client_ttl_s=3), base)


def test_allow_faults_is_for_deployed_stacks(tmp_path: Path) -> None:
    (tmp_path / "prod.toml").write_text(TABLE)
    given: dict[str, Any] = {"stack": str(tmp_path / "prod.toml")}
    plain, allowed = effective_spec(given), effective_spec({**given, "allow_faults": True})
    assert plain.external is not None
    assert allowed.external is not None
    assert (plain.external.allow_faults, allowed.external.allow_faults) == (False, True)
    with pytest.raises(UsageError, match="no deployed stack"):
        effective_spec({"stack": "cpu", "allow_faults": True})


def test_the_example_of_the_manual_is_a_good_spec_but_for_its_model(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "external.md").read_text()
    example = text.split("```toml\n")[1].split("```")[0]
    spec = require_built(parse_spec(example, "docs/external.md"), "docs/external.md")
    assert spec.external is not None
    assert spec.external.commands.kill[:2] == ("kubectl", "exec")


def simulated(**fields: Any) -> SimulatedStack:
    urls = {"e0": "http://a:1", "e1": "http://b:1"}
    external_spec = ExternalSpec(engines=urls, master_admin="http://m:1", **fields)
    return SimulatedStack(simulated_spec(external=external_spec))


def test_without_leave_nothing_is_planted_and_the_contrast_shows_that_the_oracle_sees() -> None:
    stack = simulated()
    verdict = run_case(BOUNDARY, "P.boundary.k3", stack=stack)
    assert verdict.outcome is r.Outcome.PASS, verdict
    assert verdict.numbers["planted_nat"] == {}
    assert min(verdict.numbers["contrast_nat"].values()) > 1
    assert [rec.value["mend"] for rec in stack.records if isinstance(rec, r.Fact) and rec.name == NOT_PLANTED]


def test_an_oracle_that_sees_no_block_is_no_pass_there_either() -> None:
    stack = simulated()
    run_case(BOUNDARY, "P.boundary.k3", stack=stack)
    blind = [rec for rec in stack.records if not (isinstance(rec, r.Observation) and rec.role.startswith("contrast/"))]
    assert safe_judge(BOUNDARY, History(blind).for_case("P.boundary.k3")).outcome is r.Outcome.INCONCLUSIVE


def test_zero_hits_of_a_deployed_stack_are_red() -> None:
    stack = simulated()
    stack.lies.add("zero-hits")
    assert run_case(BOUNDARY, "P.boundary.k3", stack=stack).finding == "zero-hits"
