"""Hand-made verdicts and histories for the selftests of ``reports``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reports import records as r
from reports.evidence import EvidenceWriter
from reports.history import History
from reports.scoreboard import Accepted, ExpectedResult, Scoreboard, build
from suite.contract import Gate

Out, Code = r.Outcome, r.FindingCode

SECRETS = {
    "hub": "hf_abcdefghijklmnop",
    "openai": "sk-abcdefghijklmnop1234",
    "bearer": "Bearer abcdef0123456789",
    "option": "--api-key Tr0ub4dor",
    "variable": "MY_PASSWORD=correct-horse",
    "url": "http://joe:hunter22@proxy/",
}
"""Texts that hold a secret. What must not be seen of them: ``SECRET_PARTS``."""
SECRET_PARTS = ("abcdefghijklmnop", "abcdef0123456789", "Tr0ub4dor", "correct-horse", "hunter22")
PRIVATE_PARTS = ("/home/joe", "secret-project", "build-box-17", "10.20.30.40")


def verdict(case_id: str, outcome: r.Outcome, *codes: r.FindingCode, **fields: Any) -> r.Verdict:
    """A verdict whose gate is the case id without its last part."""
    fields.setdefault("claim", "engines that should share do share, exactly")
    fields.setdefault("gate", case_id.rpartition(".")[0])
    findings = tuple(r.Finding(code=code, message=f"this is {code}", evidence={"request_id": "r1"}) for code in codes)
    return r.Verdict(case_id=case_id, outcome=outcome, findings=findings, **fields)


def verdicts() -> list[r.Verdict]:
    """One of each kind, with long texts and numbers."""
    return [
        verdict(
            "D.owner-killed.default",
            Out.FAIL,
            Code.FAILED_REQUEST,
            Code.SLOW_DEGRADE,
            claim="after the owner of stored blocks is killed, requests for them are answered right, with 200, in time",
            got="HTTP 500 on 12 of 12 requests for its blocks until the client TTL (10 s) ended, then right answers again",
            wanted="status 200, right tokens, TTFT at most 1.213 s",
            cause="kv_load_failure_policy is fail",
            production="vllm:request_success_total stands still",
            next_command="set kv_load_failure_policy=recompute",
            numbers={"requests": 12, "ttft": {"cold_s": 0.213, "external_s": 0.101}},
        ),
        verdict("H.parity.same", Out.PASS, got="1984 external tokens", wanted="1984 external tokens"),
        verdict("H.parity.seed", Out.FAIL, Code.SEED_MISMATCH, got="0 external tokens", wanted="1984 external tokens"),
        verdict("P.boundary.k3+1", Out.HARNESS_ERROR, Code.CHECKER_CRASHED, got="ZeroDivisionError"),
        verdict("P.boundary.k3-1", Out.INCONCLUSIVE, Code.ORACLE_BLIND, got="floor 0.4 nat"),
        verdict("T.certificate.rdma", Out.UNTESTABLE, Code.MISSING_CAPABILITY, got="no RDMA device"),
    ]


def expectation(outcome: r.Outcome, finding: str) -> ExpectedResult:
    """An expectation with one accepted verdict."""
    return ExpectedResult(
        accepted=(Accepted(outcome=outcome, finding=finding),),
        reason="upstream's default",
        link="https://example.org/1",
    )


def board(**fields: Any) -> Scoreboard:
    """The scoreboard of ``verdicts()``, two of them expected, nine cases not run, one gate proven."""
    fields.setdefault("expected", {"D.owner-killed.default": expectation(Out.FAIL, "failed-request")})
    fields.setdefault("not_run", [(f"P.size.{i}", "not in the core: --scope full") for i in range(9)])
    fields.setdefault("proofs", {"H.parity": ("other-seed",)})
    return build(verdicts(), **fields)


class Told(Gate):
    """A gate that judges what the case's ``judge-me`` fact says: outcome and finding."""

    id = "X.told"
    claim = "holds"
    version = 2
    proof = ("planted",)

    def judge(self, history: History) -> r.Verdict:
        """Adds up all requests (so that the time of judging them can be seen)."""
        fact = history.fact("judge-me")
        assert fact is not None
        outcome, code = fact.value
        findings = (r.Finding(code=Code(code), message="told so"),) if code else ()
        return self.verdict(
            history,
            Out(outcome),
            findings=findings,
            numbers={"tokens": sum(len(o.prompt_token_ids) for o in history.observations())},
        )


def observation(number: int, case_id: str, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> r.Observation:
    """An answered request that took 0.2 s and was sent at second ``number``."""
    defaults: dict[str, Any] = {
        "phase": "p",
        "engine": "e0",
        "role": "cold",
        "output_token_ids": (7, 8),
        "http_status": 200,
        "sent_s": float(number),
        "first_token_s": number + 0.1,
        "done_s": number + 0.2,
        "deadline_s": 30.0,
        "sampling": {"max_tokens": 2, "temperature": 0.0, "model": "tiny", "stream": True},
    }
    return r.Observation(request_id=f"r{number}", case_id=case_id, prompt_token_ids=prompt, **(defaults | fields))


def write_case(
    writer: EvidenceWriter,
    case_id: str,
    judged: tuple[str, str],
    *,
    recorded: tuple[str, str] | None = ("", ""),
    gate: str = Told.id,
    version: int = Told.version,
    requests: tuple[r.Observation, ...] = (),
    finished: bool = True,
) -> None:
    """One case: its evidence leads to ``judged`` (outcome, finding); ``recorded`` is the verdict in the run.

    recorded None: none was written; ("", ""): the same as ``judged``.
    """
    writer.write(r.CaseStarted(case_id=case_id, gate=gate, gate_version=version, claim="holds", t_s=0.0))
    for request in requests:
        writer.write(request)
    writer.write(r.Fact(name="judge-me", t_s=1.0, value=list(judged)))
    if finished:
        writer.write(r.CaseFinished(case_id=case_id, t_s=2.0))
    if recorded is not None:
        outcome, code = judged if recorded == ("", "") else recorded
        findings = (r.Finding(code=Code(code), message="recorded"),) if code else ()
        writer.write(
            r.Verdict(
                case_id=case_id, gate=gate, gate_version=version, outcome=Out(outcome), claim="holds", findings=findings
            )
        )


def private_run(directory: Path) -> None:
    """A run that is full of secrets, private paths, host names and addresses, with one FAIL."""
    dirt = " ".join(SECRETS.values()) + " /home/joe/secret-project/models/tiny on build-box-17 at 10.20.30.40:8000"
    with EvidenceWriter(directory) as writer:
        writer.write(
            r.RunStarted(
                run_id="run-1",
                suite_version="0.1.0",
                wall_s=1.0e9,
                t_s=0.0,
                command=("/home/joe/secret-project/.venv/bin/pytest", "-m", "gates", "--api-key", "Tr0ub4dor", dirt),
                host={"hostname": "build-box-17", "cpus": 2, "kernel": "6.1", "cpu": dirt},
                options={"secret": "Tr0ub4dor"},
            )
        )
        writer.write(stack_up(directory, env={"HF_TOKEN": "hf_abcdefghijklmnop", "NOTE": dirt}))
        writer.write(r.CaseStarted(case_id="D.x.a", gate="D.x", gate_version=1, claim=dirt, stack_id="s1", t_s=1.0))
        writer.write(
            observation(2, "D.x.a", error=dirt, http_status=500, sampling={"user": dirt, "api_key": "Tr0ub4dor"})
        )
        writer.write(r.CaseFinished(case_id="D.x.a", t_s=4.0))
        finding = r.Finding(
            code=Code.FAILED_REQUEST, message=dirt, evidence={"log": [dirt], "token": {"HF_TOKEN": "Tr0ub4dor"}}
        )
        words = dict.fromkeys(("claim", "got", "wanted", "cause", "production", "next_command"), dirt)
        writer.write(
            r.Verdict(case_id="D.x.a", gate="D.x", outcome=Out.FAIL, findings=(finding,), notes=(dirt,), **words)  # type: ignore[arg-type]
        )


def stack_up(
    run_dir: Path, *, argv: tuple[str, ...] = (), env: dict[str, str] | None = None, url: str = ""
) -> r.StackUp:
    """A stack of one master and one engine."""
    engine = r.EngineFacts(
        name="e0",
        url=url or "http://127.0.0.1:18000",
        model="/home/joe/secret-project/models/tiny",
        served_model="tiny",
        connector="mooncake-store",
        block_tokens=32,
        max_model_len=4096,
        load_failure_policy="recompute",
        hash_seed="0",
        versions={"vllm": "0.32.0"},
    )
    unit = f"{run_dir}/stacks/s1"
    default_argv = (
        "/home/joe/secret-project/.venv/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/home/joe/secret-project/models/tiny",
        "--api-key",
        "Tr0ub4dor",
        "--kv-transfer-config",
        '{"kv_connector": "MooncakeStoreConnector", "path": "/home/joe/plugins"}',
    )
    master = r.ProcessFacts(
        name="master",
        pid=10,
        ppid=1,
        start_ticks=1,
        cmdline=(
            "/home/joe/secret-project/.venv/lib/python3.11/site-packages/mooncake/mooncake_master",
            "--rpc_port=19000",
            "--metrics_host=127.0.0.1",
            "--metrics_port=19001",
        ),
    )
    first = r.ProcessFacts(
        name="e0",
        pid=20,
        ppid=1,
        start_ticks=2,
        cmdline=argv or default_argv,
        env={"MOONCAKE_CONFIG_PATH": f"{unit}/e0/mooncake.json", "TMPDIR": "/run/kv/e0", "PATH": "/home/joe/bin"}
        | (env or {}),
    )
    worker = r.ProcessFacts(name="e0", pid=21, ppid=20, start_ticks=3, title="VLLM::EngineCore")
    return r.StackUp(
        stack_id="s1",
        t_s=0.5,
        spec={"name": "cpu", "runtime": "process", "platform": "cpu", "transport": "tcp"},
        engines=(engine,),
        processes=(worker, first) if argv else (worker, first, master),
        deviations=(
            r.Deviation(
                where="e0", setting="kv_load_failure_policy", upstream="fail", ours="recompute", reason="safer"
            ),
        ),
    )
