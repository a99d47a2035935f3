"""Daemons of other hosts, as far as no daemon is needed: addresses, places of units, what ssh says, the agent, copies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.errors import Untestable, UsageError
from fixtures.runtimes import docker_files, docker_image, docker_places, far_agent, sight, ssh_tunnel
from fixtures.runtimes.docker_address import DEFAULT_SOCKET, HERE, parse
from fixtures.runtimes.docker_client import Daemon
from fixtures.runtimes.docker_hosts import _NO_IMAGE, DockerHost, check_network
from fixtures.runtimes.docker_image import find_image
from fixtures.runtimes.proc import ProcessId, Stat, facts, is_alive, read_stat, send, start_ticks, thread_states
from fixtures.runtimes.sockets import unix_sockets
from fixtures.spec import StackSpec, parse_spec
from suite.selftest.process_helpers import until
from suite.selftest.test_docker_input import INSIDE, FakeDaemon

pytestmark = pytest.mark.selftest

FAR_URL = "ssh://me@gpu7"
HEAD = 'name = "x"\nruntime = "docker"\n'


def spec(text: str = "", head: str = HEAD) -> StackSpec:
    return parse_spec(f"{head}{text}", "x.toml")


# Addresses ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("local", ("unix", "", "", 0, DEFAULT_SOCKET)),
        ("unix:///run/d.sock", ("unix", "", "", 0, "/run/d.sock")),
        ("ssh://gpu7", ("ssh", "gpu7", "", 0, DEFAULT_SOCKET)),
        ("ssh://me@gpu7:2222/run/other.sock", ("ssh", "gpu7", "me", 2222, "/run/other.sock")),
        ("tcp://10.0.0.7:2376", ("tcp", "10.0.0.7", "", 2376, DEFAULT_SOCKET)),
    ],
)
def test_an_address_is_taken_apart(text: str, wanted: tuple[Any, ...]) -> None:
    found = parse(text)
    assert (found.scheme, found.host, found.user, found.port, found.socket) == wanted
    assert "me@" not in found.shown


@pytest.mark.parametrize("text", ["gpu7", "ftp://gpu7", "ssh://", "ssh://gpu7:x", "tcp://gpu7", "tcp://gpu7:1/x"])
def test_what_is_no_address_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no daemon's address.*ssh://") as caught:
        Daemon(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["ssh://-oProxyCommand=x", "ssh://-l@gpu7"])
def test_an_address_is_never_an_option_of_ssh(text: str) -> None:
    with pytest.raises(ValueError, match="is no daemon's address"):
        parse(text)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="give ssh a key instead") as caught:
        parse("ssh://me:hunter2@gpu7")
    assert "hunter2" not in str(caught.value)


# Specs --------------------------------------------------------------------------------------------------------------
TWO = """docker_host = "local"
addresses = { "ssh://me@gpu7" = "10.0.0.7" }
[store]
mode = "standalone"
owners = 3
owner_docker_hosts = ["local", "ssh://me@gpu7"]
[[engines]]
[[engines]]
docker_host = "ssh://me@gpu7"
"""


def test_units_are_where_the_spec_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    placed = docker_places.daemons_of(spec(TWO))
    assert placed == {HERE: ["e0", "master", "owner0", "owner2"], FAR_URL: ["e1", "owner1"]}
    joining = docker_places.daemon_of(spec(TWO), "joiner", "engine")
    assert joining == HERE, "an engine that joins goes where the first one is"


def test_without_a_word_in_the_spec_docker_host_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", FAR_URL)
    assert docker_places.daemons_of(spec("[store]\n[engine]\n")) == {FAR_URL: ["e0", "master"]}
    here = spec('[store]\ndocker_host = "local"\n[engine]\n')
    assert docker_places.daemons_of(here) == {FAR_URL: ["e0"], HERE: ["master"]}
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/mine.sock")
    assert docker_places.daemons_of(here) == {"unix:///run/mine.sock": ["e0", "master"]}


@pytest.mark.parametrize(
    ("text", "head", "wanted"),
    [
        (
            'docker_host = "ssh://gpu7"\n[engine]\nconnector = "native"\n',
            'name = "x"\n',
            "only containers can be placed",
        ),
        ('[engine]\nconnector = "native"\ndocker_host = "gpu7"\n', HEAD, "engine e0: docker_host: 'gpu7' is no daemon"),
        ('[store]\nowner_docker_hosts = ["local"]\n[engine]\n', HEAD, "names more than there are owners"),
        ('addresses = { "ssh://gpu7" = "127.0.0.1" }\n[store]\n[engine]\n', HEAD, "127.0.0.1 is loopback"),
        ('addresses = { "ssh://gpu7" = "gpu7" }\n[store]\n[engine]\n', HEAD, "'gpu7' is no IP address"),
        ('addresses = { "local" = "10.0.0.7" }\n[store]\n[engine]\n', HEAD, "local is this host"),
        (
            'docker_host = "local"\naddresses = { "ssh://gpu7" = "10.0.0.7" }\n[store]\n[engine]\n',
            HEAD,
            "no unit is on ssh://gpu7",
        ),
    ],
)
def test_a_place_that_cannot_be_is_one_line(text: str, head: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted) as caught:
        spec(text, head)
    assert "\n" not in str(caught.value)


# Where hosts are reached --------------------------------------------------------------------------------------------
def test_the_address_of_another_host_is_that_of_its_name_or_the_specs() -> None:
    plain = spec("[store]\n[engine]\n")
    assert docker_places.host_address(plain, parse("tcp://192.0.2.7:2376")) == "192.0.2.7"
    assert docker_places.host_address(spec(TWO), parse(FAR_URL)) == "10.0.0.7"
    with pytest.raises(UsageError, match="loopback, which every host has for itself; set addresses"):
        docker_places.host_address(plain, parse("tcp://127.0.0.1:2375"))


def test_a_name_of_the_users_ssh_configuration_is_looked_up_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("Host node\n  HostName 192.0.2.9\n", encoding="utf-8")
    monkeypatch.setenv("KVGATES_SSH", f"ssh -F {tmp_path}/config")
    assert docker_places.host_address(spec("[store]\n[engine]\n"), parse("ssh://me@node")) == "192.0.2.9"


def test_this_hosts_address_is_the_specs_or_the_kernels_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = spec('host = "10.9.9.9"\n[store]\n[engine]\n')
    assert docker_places.own_address(given, ["192.0.2.7"]) == "10.9.9.9"
    plain = spec("[store]\n[engine]\n")
    monkeypatch.setattr(docker_places, "_source_of", lambda other: f"10.0.0.{other[-1]}")
    assert docker_places.own_address(plain, ["192.0.2.7", "198.51.100.7"]) == "10.0.0.7"
    with pytest.raises(UsageError, match=r"several addresses .*; set host to one that all reach"):
        docker_places.own_address(plain, ["192.0.2.7", "192.0.2.8"])
    monkeypatch.setattr(docker_places, "_source_of", lambda _: "127.0.0.1")
    with pytest.raises(UsageError, match="units elsewhere cannot reach this host"):
        docker_places.own_address(plain, ["192.0.2.7"])


# The image there ----------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    docker_image._seen.clear()
    yield
    docker_image._seen.clear()


def far_daemon(arch: str, theirs: str) -> Any:
    daemon = FakeDaemon(arch, INSIDE)  # an image and a host of another architecture cannot be had here
    return SimpleNamespace(**vars(daemon), version=lambda: {"Arch": theirs})


def test_an_image_has_to_fit_the_other_host_not_this_one() -> None:
    address = parse("ssh://me@gpu7:2222")
    assert find_image(far_daemon("riscv64", "riscv64"), "x:1", True, address).python == INSIDE["python"]
    with pytest.raises(UsageError, match="built for amd64, the host of ssh://me@gpu7:2222 is riscv64"):
        find_image(far_daemon("amd64", "riscv64"), "x:1", True, address)


def test_how_an_image_gets_to_another_host_is_one_line() -> None:
    import docker

    def missing(name: str) -> None:
        raise docker.errors.ImageNotFound(name)

    client = SimpleNamespace(images=SimpleNamespace(get=missing))
    with pytest.raises(UsageError, match=r"docker save x:1 \| ssh -p 2222 me@gpu7 docker load$"):
        find_image(client, "x:1", True, parse("ssh://me@gpu7:2222"))
    with pytest.raises(UsageError, match=r"docker save x:1 \| docker -H tcp://gpu7:1 load$"):
        find_image(client, "x:1", True, parse("tcp://gpu7:1"))


def test_a_rootless_daemon_has_no_network_of_its_host() -> None:
    check_network("ssh://gpu7", {"SecurityOptions": ["name=seccomp,profile=default"]})
    check_network("ssh://gpu7", {"SecurityOptions": None})
    with pytest.raises(UsageError, match=r"ssh://gpu7: a rootless daemon, .* needs one that runs as root"):
        check_network("ssh://gpu7", {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]})


# What ssh says ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("ssh: Could not resolve hostname gpu7: Name or service not known", "no host of that name is known"),
        ("ssh: connect to host gpu7 port 22: No route to host", "no route to its sshd"),
        ("ssh: connect to host gpu7 port 22: Connection timed out", "no route to its sshd"),
        ("Host key verification failed.", "its host key is unknown"),
        ("Warning\nme@gpu7: Permission denied (publickey).", "it takes no key of this user's"),
        ("channel 2: open failed: administratively prohibited: open failed", "its sshd forwards no sockets"),
        ("x\nsomething else", "ssh ended without a connection (ssh: something else)"),
        ("", "it said nothing"),
    ],
)
def test_what_ssh_says_becomes_one_line(words: str, wanted: str) -> None:
    said = ssh_tunnel.complaint(words)
    assert wanted in said
    assert "\n" not in said


def test_a_port_where_no_sshd_is_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match=r"ssh://127.0.0.1:\d+: no route to its sshd .*Connection refused"):
        Daemon(f"ssh://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("none", f"no docker on that host: no socket {DEFAULT_SOCKET} there; start dockerd"),
        ("closed", f"no permission for {DEFAULT_SOCKET} there; add the user to its group docker"),
    ],
)
def test_a_socket_that_cannot_be_used_there_is_one_line(
    answer: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In ssh's place, because it takes a second user to be refused a socket: root may use them all.
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho welcome\necho kvgates-socket {answer}\ncat\n", encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("KVGATES_SSH", str(tmp_path / "ssh"))
    with pytest.raises(UsageError, match=wanted):
        Daemon("ssh://me@gpu7")


def test_without_ssh_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATES_SSH", "/no/such/ssh")
    with pytest.raises(UsageError, match="cannot start /no/such/ssh: No such file or directory; install ssh"):
        Daemon("ssh://me@gpu7")


# Seen from inside ---------------------------------------------------------------------------------------------------
class LocalSight:
    """The agent's own functions, on this host's processes: what a container of another host would answer."""

    kernel = "ssh://gpu7"
    page_bytes = 4 * os.sysconf("SC_PAGE_SIZE")

    def read(self, pid: int, name: str) -> bytes:
        return str(far_agent.answer("read", pid, name)).encode("latin-1")

    def links(self, pid: int, name: str) -> list[str]:
        return list(far_agent.answer("links", pid, name))

    def threads(self, pid: int) -> list[str]:
        return list(far_agent.answer("threads", pid))

    def signal(self, pid: int, start_ticks: int, signum: int) -> bool:
        try:
            return bool(far_agent.answer("signal", pid, start_ticks, signum))
        except ProcessLookupError:
            return False


def stat_of(pid: int) -> Stat:
    found = read_stat(pid)
    assert found is not None
    return found


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], env={"PYTHONHASHSEED": "7"}) as process:
        yield process
        process.kill()


def test_a_process_of_another_host_is_described_like_one_of_this(sleeper: subprocess.Popen[bytes]) -> None:
    base = sight.register(LocalSight())
    # Before its exec is over, memory and command line are still its parent's.
    until(lambda: facts("", stat_of(base + sleeper.pid)).cmdline == ("sleep", "60"), "the sleeper's exec")
    until(lambda: thread_states(base + sleeper.pid) == {"S"}, "the sleeper to sleep")
    far, near = stat_of(base + sleeper.pid), stat_of(sleeper.pid)
    assert (far.pid - base, far.ppid - base, far.start_ticks) == (near.pid, near.ppid, near.start_ticks)
    assert far.rss_pages == 4 * near.rss_pages, "pages of that host"
    shown = facts("e1", far)
    assert (shown.cmdline, shown.env) == (("sleep", "60"), {"PYTHONHASHSEED": "7"})
    assert read_stat(base + (1 << 22)) is None


def test_a_signal_to_another_host_never_hits_a_stranger(sleeper: subprocess.Popen[bytes]) -> None:
    base = sight.register(LocalSight())
    ticks = start_ticks(base + sleeper.pid)
    assert ticks is not None
    who = ProcessId(base + sleeper.pid, ticks)
    assert not send(who._replace(start_ticks=ticks + 1), signal.SIGKILL)
    assert is_alive(who)
    assert send(who, signal.SIGKILL)
    sleeper.wait()
    assert not is_alive(who)
    assert not send(who, signal.SIGKILL)


def test_a_number_of_another_host_is_no_process_of_this(sleeper: subprocess.Popen[bytes]) -> None:
    """The kernel gives out no such number, so a reader that knows nothing of other hosts finds nothing, never somebody else."""
    base = sight.register(LocalSight())
    assert base + sleeper.pid > int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    assert not Path(f"/proc/{base + sleeper.pid}").exists()


def test_sockets_of_two_hosts_with_equal_inodes_are_not_mixed_up() -> None:
    """One listening socket of this process, held by a unit here and, under the same inode, by one on "another host"."""
    pid = os.getpid()
    base = sight.register(LocalSight())

    def unit(name: str, number: int) -> Any:
        stat = stat_of(number)
        return SimpleNamespace(launch=SimpleNamespace(name=name), processes=lambda: [facts(name, stat)], address="")

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = unix_sockets({"here": unit("here", pid), "there": unit("there", base + pid)}).listening
    assert {line for line in found if line.endswith(f":{port}")} == {f"{u} 127.0.0.1:{port}" for u in ("here", "there")}


def test_the_agent_answers_line_by_line_and_ends_with_its_input() -> None:
    source = Path(far_agent.__file__).read_text(encoding="utf-8")
    asked = [["hello"], ["pids"], ["read", 1 << 22, "stat"], ["read", 1, "comm"]]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source],
        input="".join(json.dumps(question) + "\n" for question in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    hello, pids, gone, comm = map(json.loads, done.stdout.splitlines())
    assert hello == {"page_bytes": os.sysconf("SC_PAGE_SIZE")}
    assert os.getpid() in pids
    assert gone is None
    assert comm == Path("/proc/1/comm").read_text()


# Copies -------------------------------------------------------------------------------------------------------------
def test_the_digest_of_a_folder_is_that_of_its_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "w.bin").write_bytes(b"weights")
    same = docker_files.digest_of(tmp_path / "a")
    assert docker_files.digest_of(tmp_path / "b") == same
    (tmp_path / "b" / "sub" / "w.bin").write_bytes(b"Weights")
    changed = docker_files.digest_of(tmp_path / "b")
    (tmp_path / "b" / "sub" / "w.bin").rename(tmp_path / "b" / "sub" / "v.bin")
    assert len({same, changed, docker_files.digest_of(tmp_path / "b")}) == 3


def test_a_copy_holds_the_files_behind_links_and_leaves_logs_here(tmp_path: Path) -> None:
    (tmp_path / "e0" / "home").mkdir(parents=True)
    (tmp_path / "e0" / "log.txt").write_text("x", encoding="utf-8")
    (tmp_path / "shared.json").write_text("{}", encoding="utf-8")
    (tmp_path / "e0" / "mooncake.json").symlink_to(tmp_path / "shared.json")
    sent: list[tuple[str, int, bytes | None]] = []

    def put_archive(place: str, chunks: Iterator[bytes]) -> None:
        (tmp_path / "sent.tar").write_bytes(b"".join(chunks))
        with tarfile.open(tmp_path / "sent.tar") as archive:
            for entry in archive:
                held = archive.extractfile(entry) if entry.isfile() else None
                sent.append((entry.name, entry.uid, held.read() if held else None))

    # In a container's place: what a daemon makes of it is tried with a real one (test_docker_far.py).
    docker_files.put(
        SimpleNamespace(put_archive=put_archive), tmp_path / "e0", Path("/runs/e0"), (7, 8), without=("log.txt",)
    )
    assert sent == [("runs/e0", 7, None), ("runs/e0/home", 7, None), ("runs/e0/mooncake.json", 7, b"{}")]


def test_a_daemon_that_refuses_a_copy_ends_it(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(4 << 20))

    def refuse(place: str, chunks: Iterator[bytes]) -> None:
        next(chunks)
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        docker_files.put(SimpleNamespace(put_archive=refuse), tmp_path, Path("/m"), (0, 0))


def test_a_connector_of_this_clone_cannot_be_loaded_there(tmp_path: Path) -> None:
    from fixtures.runtimes.base import Launch
    from fixtures.runtimes.docker_launch import PROJECT_ROOT

    host = DockerHost(SimpleNamespace(), _NO_IMAGE)  # type: ignore[arg-type]  # no daemon is asked
    with pytest.raises(Untestable, match="needs shared-files: e0 loads its connector from this clone"):
        host.check_files(Launch("e0", "engine", (), {"PYTHONPATH": str(PROJECT_ROOT)}, tmp_path))
    host.check_files(Launch("e0", "engine", (), {}, tmp_path))
