"""The preflight names what is wrong, in the words of whatever is wrong."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from fixtures.preflight import elf, gpu, report, system, wheels
from fixtures.preflight.fact import Fact, Host, Level

pytestmark = pytest.mark.selftest

SMI_LINE = "0, NVIDIA H200, 143771, 512, 580.159.04, Default, Enabled"


def shared_library(path: Path, *needs: str) -> Path:
    """A minimal ELF file that links ``needs``: program headers, a dynamic section, strings. Enough for a reader."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needs)
    offsets = [strings.index(name.encode()) for name in needs]
    at = 64 + 2 * 56
    dynamic = b"".join(struct.pack("<qQ", elf.DT_NEEDED, offset) for offset in offsets)
    dynamic_size = len(dynamic) + 32
    base = 0x10000
    dynamic += struct.pack("<qQ", elf.DT_STRTAB, base + at + dynamic_size) + struct.pack("<qQ", elf.DT_NULL, 0)
    total = at + dynamic_size + len(strings)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", elf.PT_LOAD, 5, 0, base, base, total, total, 4096)
    section = struct.pack("<IIQQQQQQ", elf.PT_DYNAMIC, 4, at, base + at, base + at, dynamic_size, dynamic_size, 8)
    path.write_bytes(header + load + section + dynamic + strings)
    return path


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvidia-smi, because this machine has no GPU. Returns the file whose text it prints."""
    answer = tmp_path / "answer"
    answer.write_text(SMI_LINE + "\n", encoding="utf-8")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec /bin/cat {answer}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return answer


def test_reads_what_a_library_links(tmp_path: Path) -> None:
    made = shared_library(tmp_path / "made.so", "libcudart.so.12", "libc.so.6")
    assert elf.needed(made) == ["libcudart.so.12", "libc.so.6"]
    assert "libc.so.6" in elf.needed(Path(sys.executable).resolve())  # a real one, made by a real linker
    text = tmp_path / "text.so"
    text.write_text("not an ELF file", encoding="utf-8")
    assert elf.needed(text) == []


def test_a_wheel_for_another_cuda_is_named_with_the_one_to_install(tmp_path: Path) -> None:
    made = shared_library(tmp_path / "engine.so", "libcudart.so.12", "libc.so.6")
    wheel = wheels.Wheel("mooncake", "mooncake-transfer-engine", "0.3.13", wheels.cuda_runtimes([made]))
    told = wheels.match_fact(wheel, cuda="13")
    assert told.level is Level.PROBLEM
    assert "engine.so of mooncake-transfer-engine 0.3.13 loads libcudart.so.12" in told.consequence
    assert told.fix.endswith("install mooncake-transfer-engine-cuda13==0.3.13")
    assert wheels.match_fact(wheel, cuda="").fix.endswith("mooncake-transfer-engine-non-cuda==0.3.13")
    assert wheels.match_fact(wheel, cuda="12").level is Level.OK
    bare = wheels.Wheel("mooncake", "mooncake-transfer-engine-non-cuda", "0.3.13", {})
    assert wheels.match_fact(bare, cuda="13").level is Level.PROBLEM
    assert wheels.match_fact(bare, cuda="").level is Level.OK


def test_two_wheels_of_one_package_are_a_problem() -> None:
    pair = [
        wheels.Wheel("mooncake", name, "0.3.13", {})
        for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
    ]
    assert [told.level for told in wheels.duplicates(pair)] == [Level.PROBLEM]
    assert wheels.duplicates(pair[:1]) == []


@pytest.mark.parametrize(
    ("code", "words", "fix"),
    [
        ("raise ImportError('libfoo.so.9: cannot open shared object file')", "ImportError: libfoo.so.9", "libfoo.so.9"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV", "make setup"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'", "make setup"),
    ],
)
def test_a_failed_import_is_shown_in_its_own_words(
    code: str, words: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(wheels.IMPORTS, "vllm", code)
    told = wheels.import_fact("vllm")
    assert told.level is Level.PROBLEM
    assert words in told.seen
    assert "not installed" not in told.seen + told.consequence
    assert fix in told.fix


def test_gpu_lines(smi: Path) -> None:
    found = gpu.facts("13", quick=True)
    assert [(f.name, f.level) for f in found] == [("driver", Level.OK), ("gpu 0", Level.OK)]
    assert "140 GiB" in found[1].seen
    smi.write_text(SMI_LINE.replace("580.159.04", "550.54.15") + "\n", encoding="utf-8")
    assert "CUDA 13 needs driver 580" in gpu.facts("13", quick=True)[0].consequence
    smi.write_text(SMI_LINE.replace(", 512,", ", 40000,") + "\n", encoding="utf-8")
    assert "somebody else works here" in gpu.facts("13", quick=True)[1].consequence
    smi.write_text(SMI_LINE.replace("Default", "Exclusive_Process") + "\n", encoding="utf-8")
    assert gpu.facts("13", quick=True)[1].level is Level.PROBLEM


def test_no_driver_is_a_problem_only_for_a_cuda_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [f.level for f in gpu.facts("13", host=Host(tmp_path))] == [Level.PROBLEM]
    assert [f.level for f in gpu.facts("", host=Host(tmp_path))] == [Level.LIMIT]


def made_up_host(root: Path, **files: str) -> Host:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Host(root)


def test_a_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n", encoding="utf-8")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{4 << 30}\n", encoding="utf-8")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{1 << 30}\n", encoding="utf-8")
    host = made_up_host(tmp_path, proc__meminfo="MemTotal: 99 kB\nMemAvailable:   67108864 kB\n")
    assert (system.processors(host).level, system.processors(host).seen) == (Level.LIMIT, "1 cores")
    assert (system.memory(host).level, system.memory(host).seen) == (Level.LIMIT, "3.0 GiB available")
    roomy = made_up_host(tmp_path / "b", proc__meminfo="MemAvailable:   67108864 kB\n")
    assert system.memory(roomy).level is Level.OK


def test_locked_memory_matters_where_rdma_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (65536, 65536))
    assert system.locked_memory(Host(tmp_path)).level is Level.OK
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert system.locked_memory(Host(tmp_path)).level is Level.PROBLEM
    assert system.open_files().level is Level.OK
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 1024))
    assert system.open_files().fix == "ulimit -n 4096"


def test_few_ports(tmp_path: Path) -> None:
    spans = tmp_path / "proc/sys/net/ipv4"
    spans.mkdir(parents=True)
    (spans / "ip_local_port_range").write_text("32768\t32800\n", encoding="utf-8")
    assert system.ports(Host(tmp_path)).level is Level.LIMIT


def test_a_proxy_is_named_without_its_secret() -> None:
    secret = {"http_proxy": "http://user:secret@proxy:3128"}
    told = system.proxies(secret)[0]
    assert told.level is Level.LIMIT
    assert "secret" not in str(told)
    assert system.proxies(secret | {"no_proxy": "localhost"})[0].level is Level.OK
    assert system.bending({"PYTHONHASHSEED": "7"})[0].seen == "PYTHONHASHSEED=7"


def test_a_broken_check_is_a_line_not_a_silence() -> None:
    def broken() -> list[Fact]:
        raise RuntimeError("as planted")

    told = report.guarded("gpu", broken)
    assert told[0].level is Level.PROBLEM
    assert "RuntimeError: as planted (test_preflight.py:" in told[0].seen


@pytest.mark.parametrize(("level", "code"), [(Level.LIMIT, 0), (Level.PROBLEM, 1)])
def test_table_json_and_exit_code(
    level: Level, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fact = Fact("host", "disk", level, "1 GiB free", "evidence may be cut off", "make room")
    monkeypatch.setattr(report, "collect", lambda quick: [fact])
    assert report.main(["--quick"]) == code
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("disk", "1 GiB free", "evidence may be cut off; make room", f"1 {level}"))
    assert report.main(["--quick", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["facts"][0]["fix"] == "make room"


def test_this_host_has_a_line_for_every_topic() -> None:
    found = report.collect(quick=True)
    assert {fact.topic for fact in found} >= {"wheels", "gpu", "needs", "host"}
    assert not [fact for fact in found if fact.name == "check"]
    assert not [fact for fact in found if fact.level in (Level.LIMIT, Level.PROBLEM) and not fact.consequence]
